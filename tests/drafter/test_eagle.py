"""The EAGLE-1 head against its definition, and both ways to grow a tree of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafter.base import DraftLimits
from drafter.growth import EAGLE_TREE, BestFirstGrowth, GrowthNode, Guesses, StaticGrowth, grow
from drafter.options import DraftOptions
from tests.drafter.bench import CHAIN, TEXT, TREE, Bench, Target
from tests.drafter.eagle_heads import EagleShape, SlowEagle, eagle_config, eagle_weights
from tests.drafter.heads import save_head

SHAPES = {
    "plain": EagleShape(),
    "no bias, other base": EagleShape(fc_bias=False, rope_theta=5e5, rms_norm_eps=1e-3),
    "qkv_bias": EagleShape(attention_bias=True),
    "the target's embedding": EagleShape(own_embedding=False),
    "two layers": EagleShape(num_layers=2),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(tmp_path_factory.mktemp("target") / "target")


@pytest.fixture
def bench(target: Target, tmp_path: Path) -> Callable[..., Bench]:
    def create(shape: EagleShape = SHAPES["plain"], **options: Any) -> Bench:
        weights = eagle_weights(shape, seed=3)
        folder = save_head(tmp_path / "head", weights, eagle_config(shape))
        return Bench(target, folder, DraftOptions(**options), SlowEagle(shape, weights, target.weights))

    return create


@pytest.mark.parametrize("name", SHAPES)
def test_every_flag_computes_what_its_definition_says(name: str, bench: Callable[..., Bench]) -> None:
    """The target's last states, logits of the context, and a chain of guesses that feed on the head's own states."""
    here = bench(SHAPES[name])
    ids = TEXT[:12]
    here.verify(ids)
    fused = here.fused(ids)
    with torch.inference_mode():
        states = here.target.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(torch.stack(fused), states[-1][0, :-1], atol=1e-4, rtol=1e-4)  # after the final norm
    torch.testing.assert_close(here.read(0, 11), torch.stack(fused), atol=1e-4, rtol=1e-4)

    logits, guesses = here.slow.run(ids[1:], fused, num_guesses=3)
    scored = here.drafter.propose(here.request(ids, CHAIN))
    assert scored.tree.tokens == (ids[-1], *guesses)
    assert max(scored.tree.depths) == len(scored.tree) - 1
    state = here.drafter.sessions.by_sequence[1].state
    assert state is not None
    torch.testing.assert_close(here.drafter.network.logits(state[None])[0], logits[10], atol=2e-4, rtol=1e-4)


class Definition:
    """A source of scores that computes every path anew."""

    def __init__(self, here: Bench, ids: Sequence[int]) -> None:
        self.here, self.ids, self.fused = here, ids, here.fused(ids)
        self.paths: dict[int, list[int]] = {}

    def expand(self, frontier: Sequence[GrowthNode], num_guesses: int) -> list[Guesses]:
        return [self._guesses(node, num_guesses) for node in frontier]

    def _guesses(self, node: GrowthNode, num_guesses: int) -> Guesses:
        path = self.paths[node.number] = [*self.paths[node.parent], node.token] if node.number else []
        cache: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(self.here.slow.shape.num_layers)]
        logits, state = torch.empty(0), torch.empty(0)
        for slot, token in enumerate([*self.ids[1:], *path]):
            hidden = self.fused[slot] if slot < len(self.fused) else state
            logits, state = self.here.slow.read(self.here.slow.slot(token, hidden, slot, cache))
        best = logits.log_softmax(-1).topk(num_guesses)
        return [(int(i), float(value)) for value, i in zip(*best, strict=True)]


def test_a_static_tree_has_eagle_1s_shape(bench: Callable[..., Bench]) -> None:
    here = bench(growth="static")
    here.verify(TEXT[:9])
    limits = DraftLimits(max_draft=5, draft_top_k=4, max_nodes=25)
    ours = here.drafter.propose(here.request(TEXT[:9], limits))
    expected = grow(StaticGrowth(TEXT[8], EAGLE_TREE, limits), Definition(here, TEXT[:9]))
    assert ours.tree == expected.tree
    assert [ours.tree.depths.count(depth) for depth in range(6)] == [1, 4, 8, 8, 3, 2]
    assert ours.shares == pytest.approx(expected.shares, rel=1e-3)
    here.assert_rebuilt(TEXT[:9])


@pytest.mark.parametrize("options", [{}, {"threshold": 0.05}, {"decay": 0.5}])
def test_eagle_2_grows_the_same_head_best_first(options: dict[str, float], bench: Callable[..., Bench]) -> None:
    here = bench(**options)
    here.verify(TEXT[:9])
    ours = here.drafter.propose(here.request(TEXT[:9], TREE))
    expected = grow(BestFirstGrowth(TEXT[8], TREE, **options), Definition(here, TEXT[:9]))
    assert ours.tree == expected.tree
    plain = here.create(options=DraftOptions()).propose(here.request(TEXT[:9], TREE)).tree
    assert (ours.tree == plain) == (not options)
    assert max(ours.tree.depths) < len(ours.tree) - 1
