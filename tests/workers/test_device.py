"""Whole engines on a GPU that is not there: every drafter's tensors are in its memory, and the text is the CPU's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from drafter.base import DraftLimits
from drafter.factory import plan_drafter
from drafter.network_draft import NetworkDraft
from drafter.options import DraftOptions
from tests.drafter.eagle_heads import EagleShape, save_tiny_eagle
from tests.drafter.heads import HeadShape, save_tiny_head
from tests.drafter.medusas import MedusaShape, random_medusa, save_medusa, vllm_config
from tests.gpu import GpuTensor, pretended_gpu
from tests.matrix import Case, make_requests
from tests.models import save_tiny_model
from verifier.verifier import Verifier
from workers.config import EngineConfig
from workers.engine import Engine
from workers.sequence import Request

NUM_PAGES, PAGE_SIZE, MAX_ROWS = 40, 8, 32
NOISY = DraftOptions(noise_ranking=True)
EAGLE_3 = HeadShape(target_hidden=72, hidden=72, head_dim=16, own_embedding=True, fc_norm=True)
MEDUSA = MedusaShape(num_heads=3, num_layers=2, hidden=72, truncated=50)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, and a draft network of every kind for it."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "target": save_tiny_model(folder / "target"),
        "eagle3": save_tiny_head(folder / "eagle3", EAGLE_3, eagle_aux_hidden_state_layer_ids=[0, 1, 3]),
        "eagle": save_tiny_eagle(folder / "eagle", EagleShape(target_hidden=72, hidden=72)),
        "model": save_tiny_model(folder / "model", seed=1, num_hidden_layers=1),
        "medusa": save_medusa(folder / "medusa", random_medusa(MEDUSA), vllm_config(MEDUSA)),
    }


def requests() -> list[Request]:
    """Greedy and not; some begin alike, and there are not pages for all at a time."""
    cases = [Case("none", True, 2, PAGE_SIZE, temperature, True, True) for temperature in (0.0, 1.0)]
    both = [request for case in cases for request in make_requests(case, 160)]
    return [replace(request, id=str(number), max_tokens=14) for number, request in enumerate(both)]


def engine(folders: dict[str, Path], kind: str, device: str) -> Engine:
    verifier = Verifier.load(
        folders["target"], num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_rows=MAX_ROWS, device=device
    )
    names = [str(folders.get(each, each)) for each in kind.split("+")]
    options = DraftOptions() if kind == "none" else NOISY
    drafter = plan_drafter("+".join(names), verifier.config, options).create(verifier)
    return Engine(verifier, drafter, EngineConfig(NUM_PAGES, PAGE_SIZE, max_rows=MAX_ROWS, limits=DraftLimits(3, 2, 5)))


def texts(engine: Engine) -> list[tuple[int, ...]]:
    results = engine.run(requests())
    engine.check_integrity()
    assert engine.stats().drafter_failures == 0
    return [tuple(result.output_ids) for result in results]


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> list[tuple[int, ...]]:
    return texts(engine(folders, "none", "cpu"))


@pytest.mark.parametrize("kind", ["none", "eagle3", "eagle", "model", "medusa", "eagle3+ngram"])
def test_the_text_is_that_of_plain_decoding(kind: str, folders: dict[str, Path], plain: list[tuple[int, ...]]) -> None:
    with pretended_gpu():
        there = engine(folders, kind, "cuda")
        assert texts(there) == plain
        assert (there.stats().counters.speculation.drafted_tokens > 0) == (kind != "none")
        if isinstance(there.drafter, NetworkDraft):
            assert isinstance(there.drafter.sessions.pool.keys, GpuTensor)
