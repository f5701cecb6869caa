"""Whole engines on a GPU that is not there: every drafter's tensors are in its memory, and the text is the CPU's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import get_args
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from drafter.base import DraftLimits, DraftRequest, FeatureReader
from drafter.factory import plan_drafter
from drafter.network_draft import NetworkDraft
from drafter.options import DraftOptions
from tests.deployments.tiny import make_tiny_model
from tests.drafter.eagle_heads import EagleShape, save_tiny_eagle
from tests.drafter.heads import HeadShape, save_tiny_head
from tests.drafter.medusas import MedusaShape, random_medusa, save_medusa, vllm_config
from tests.gpu import GpuTensor, OnGpu, pretended_gpu
from tests.matrix import Case, make_requests
from tests.models import save_tiny_model
from verifier.device import DeviceName
from verifier.sampling import SamplingParams
from verifier.verifier import Verifier
from workers.build import EngineSpec, build_engine
from workers.config import EngineConfig
from workers.engine import Engine
from workers.exchange import load_drafter
from workers.remote.messages import Rows
from workers.remote.placement import load_network
from workers.sequence import Request

NUM_PAGES, PAGE_SIZE, MAX_ROWS = 40, 8, 32
LIMITS = DraftLimits(3, 2, 5)
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
    drafter = plan_drafter("+".join(names), verifier.config).create(verifier)
    return Engine(verifier, drafter, EngineConfig(NUM_PAGES, PAGE_SIZE, max_rows=MAX_ROWS, limits=LIMITS))


def texts(engine: Engine) -> list[tuple[int, ...]]:
    results = engine.run(requests())
    engine.check_integrity()
    assert engine.stats().drafter_failures == 0
    return [tuple(result.output_ids) for result in results]


def on_its_loading_thread(module: str) -> AbstractContextManager[object]:
    """That has the GPU, too: a thread sees it only if told to."""

    def see_it() -> None:
        OnGpu().__enter__()  # type: ignore[no-untyped-call]

    loading = ThreadPoolExecutor(max_workers=1, initializer=see_it)
    return mock.patch(f"{module}.ThreadPoolExecutor", return_value=loading)


def reader(rows: Tensor) -> FeatureReader:
    return lambda first, end: rows[first:end]


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


def test_an_engine_is_built_where_it_is_asked_for(tmp_path: Path) -> None:
    """From settings alone, as for the command line: memory, costs, and a first answer."""
    model = make_tiny_model(tmp_path / "tiny")
    spec = EngineSpec(str(model), "ngram", max_model_len=64, max_rows=16)
    said: list[str] = []
    with pretended_gpu():
        with on_its_loading_thread("workers.build"):
            built, text = build_engine(spec, said.append)
        assert isinstance(built.verifier, Verifier)
        assert isinstance(built.verifier.pool.keys, GpuTensor)
        request = Request("r", tuple(text.encode("hello")), SamplingParams(temperature=0), 8)
        (there,) = built.run([request])
    assert said == ["Loading tiny onto the GPU …"]
    here, _ = build_engine(replace(spec, device="cpu"), said.append)
    assert said[1:] == ["Loading tiny …"]
    assert here.run([request])[0].output_ids == there.output_ids


@pytest.mark.parametrize("kind", ["eagle3", "model"])
def test_a_remote_drafter_reads_what_comes_over_the_wire(kind: str, folders: dict[str, Path]) -> None:
    """Features leave the verifier's GPU as bytes and reach the drafter's from the CPU."""
    ids = tuple(range(20))
    trees, devices = [], get_args(DeviceName)[1:]
    for device in devices:
        with pretended_gpu():
            drafter, _ = load_network(
                str(folders[kind]), folders["target"], DraftOptions(), num_pages=8, page_size=8, device=device
            )
            states = torch.randn(20, 72, generator=torch.Generator().manual_seed(0)).to(device)
            rows = Rows.of(states, "fp16").tensor(72)
            request = DraftRequest(0, ids, LIMITS, SamplingParams(), reader(rows))
            trees.append(drafter.propose(request).tree)
            assert isinstance(drafter.sessions.pool.keys, GpuTensor) == (device == "cuda")
    assert trees[0] == trees[1]
    assert len(trees[0]) > 1


def test_another_head_is_tried_where_the_engine_is(folders: dict[str, Path]) -> None:
    spec = EngineSpec(str(folders["target"]), str(folders["eagle3"]))
    with pretended_gpu(), on_its_loading_thread("workers.exchange"):
        load_drafter(str(folders["eagle3"]), engine(folders, "none", "cuda"), spec)
