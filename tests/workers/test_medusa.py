"""Medusa heads in the engine: the same text as plain decoding, and the right hidden state in every situation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from drafter.base import Drafter, DraftLimits, DraftRequest, NoDraft
from drafter.factory import plan_drafter
from drafter.medusa import MedusaDraft
from drafter.medusa_config import MedusaCheckpoint
from drafter.options import DraftOptions
from drafter.scored import ScoredTree
from tests.drafter.medusas import MedusaShape, random_medusa, save_medusa, save_medusa_1, vllm_config
from tests.matrix import MAX_ROWS, Case, make_requests
from tests.models import save_tiny_model
from verifier.verifier import Verifier
from workers.config import EngineConfig
from workers.engine import Engine
from workers.sequence import Request

PAGE_SIZE = 8
SHAPE = MedusaShape(num_heads=4, hidden=72)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "target")


def case(temperature: float, tight: bool = False, prefix_cache: bool = True) -> tuple[Case, list[Request], int]:
    """With its requests and the pages that they get."""
    case = Case("none", True, 6, PAGE_SIZE, temperature, prefix_cache, tight)
    return case, make_requests(case, 160), 13 * (1 if tight else 6)


def serve(verifier: Verifier, drafter: Drafter, case: Case, requests: Sequence[Request], num_pages: int) -> Engine:
    """Twice, and compares with plain decoding."""
    config = EngineConfig(
        num_pages, PAGE_SIZE, max_rows=MAX_ROWS, prefix_cache=case.prefix_cache, limits=DraftLimits(4, 3, 8)
    )
    plain = Engine(verifier, NoDraft(), config).run(requests)
    engine = Engine(verifier, drafter, config)
    for _ in range(2):
        assert [result.output_ids for result in engine.run(requests)] == [result.output_ids for result in plain]
        engine.check_integrity()
    assert engine.stats().drafter_failures == 0
    return engine


@pytest.mark.parametrize(
    ("temperature", "tight", "prefix_cache", "static"),
    [(0.0, True, True, False), (1.0, False, True, True), (1.0, True, False, False)],
)
def test_the_text_is_that_of_plain_decoding(
    target: Path, tmp_path: Path, temperature: float, tight: bool, prefix_cache: bool, static: bool
) -> None:
    """Chunked prompts, prefix hits, preemption, trees of either kind."""
    what, requests, num_pages = case(temperature, tight, prefix_cache)
    verifier = Verifier.load(target, num_pages=num_pages, page_size=PAGE_SIZE, max_rows=MAX_ROWS)
    options = DraftOptions(growth="static") if static else DraftOptions()
    plan = plan_drafter(str(save_medusa_1(tmp_path, random_medusa(SHAPE))), verifier.config, options)
    drafter = plan.create(verifier)
    assert isinstance(drafter, MedusaDraft)
    stats = serve(verifier, drafter, what, requests, num_pages).stats()
    assert stats.counters.speculation.drafted_tokens > 500
    assert (stats.counters.preemptions > 0) == tight
    assert (stats.counters.cached_tokens > 0) == prefix_cache


class EchoingDraft(MedusaDraft):
    """With heads that say what the target's own output says, the first guess is the root's token over again."""

    num_checked = 0
    prompts: frozenset[tuple[int, ...]] = frozenset()  # whose last tokens nobody drew

    def propose_all(self, batch: Sequence[DraftRequest]) -> Mapping[int, ScoredTree]:
        trees = super().propose_all(batch)
        for request in batch:
            if tuple(request.ids) not in self.prompts:
                assert trees[request.sequence].tree.tokens[1] == request.ids[-1]
                self.num_checked += 1
        return trees


def test_heads_read_the_state_that_the_root_was_drawn_from(target: Path, tmp_path: Path) -> None:
    """After prefix hits and preemption, and of kept nodes that were moved."""
    what, requests, num_pages = case(0.0, tight=True)
    verifier = Verifier.load(target, num_pages=num_pages, page_size=PAGE_SIZE, max_rows=MAX_ROWS)
    shape = MedusaShape(num_heads=2, hidden=72, bias=False, shared=True)
    weights = {name: torch.zeros_like(tensor) for name, tensor in random_medusa(shape).items()}
    del weights["lm_head.weight"]
    heads = MedusaCheckpoint.open(save_medusa(tmp_path, weights, vllm_config(shape)), verifier.config)
    drafter = EchoingDraft.load(heads, verifier)
    assert isinstance(drafter, EchoingDraft)
    drafter.prompts = frozenset(request.prompt_ids for request in requests)
    serve(verifier, drafter, what, requests, num_pages)
    assert drafter.num_checked > 200
