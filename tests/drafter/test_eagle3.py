"""The EAGLE-3 head against its definition, its trees against best-first growth by hand, its features where they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafter.base import DraftLimits
from drafter.growth import BestFirstGrowth, GrowthNode, Guesses, grow
from drafter.options import DraftOptions
from tests.drafter.bench import CHAIN, PAGE_SIZE, TEXT, TREE, Bench, Target
from tests.drafter.heads import HeadShape, SlowHead, random_weights, safeailab_config, save_head
from verifier.batch import Segment, StepPlan
from verifier.sampling import SamplingParams, gumbel_noise
from verifier.tree import TokenTree

SHAPES = {
    "plain": HeadShape(),
    "norm_before_residual": HeadShape(norm_before_residual=True),
    "norm_before_fc": HeadShape(norm_before_fc=True),
    "fc_norm": HeadShape(fc_norm=True),
    "norm_output": HeadShape(norm_output=True),
    "norm_output, norm_before_residual": HeadShape(norm_output=True, norm_before_residual=True),
    "no fc": HeadShape(fuses_layers=False, num_taps=1),
    "attention_bias": HeadShape(attention_bias=True),
    "qk_norm": HeadShape(qk_norm=True),
    "three layers": HeadShape(num_layers=3),
    "own embedding, narrower": HeadShape(own_embedding=True, hidden=48, norm_output=True),
    "the target's output": HeadShape(own_output=False, draft_vocab=160),
    "four taps, other base": HeadShape(num_taps=4, rope_theta=500.0, rms_norm_eps=1e-3),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(tmp_path_factory.mktemp("target") / "target")


@pytest.fixture
def bench(target: Target, tmp_path: Path) -> Callable[..., Bench]:
    def create(shape: HeadShape = SHAPES["plain"], **options: Any) -> Bench:
        weights, config = random_weights(shape, seed=3), safeailab_config(shape)
        if shape.fuses_layers:
            config["eagle_aux_hidden_state_layer_ids"] = [1, 3, 4, 6][-shape.num_taps :]
        folder = save_head(tmp_path / "head", weights, config)
        return Bench(target, folder, DraftOptions(**options), SlowHead(shape, weights, target.weights))

    return create


# ── the network ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", SHAPES)
def test_every_flag_computes_what_its_definition_says(name: str, bench: Callable[..., Bench]) -> None:
    """Features, logits of the context, and a chain of four guesses that feed on the head's own output."""
    here = bench(SHAPES[name])
    ids = TEXT[:12]
    here.verify(ids)
    fused = here.fused(ids)
    torch.testing.assert_close(here.read(0, 11), torch.stack(fused), atol=1e-4, rtol=1e-4)

    logits, guesses = here.slow.run(ids[1:], fused, num_guesses=3)
    tree = here.drafter.propose(here.request(ids, CHAIN)).tree
    assert tree == TokenTree.chain([ids[-1], *guesses])
    state = here.drafter.sessions.by_sequence[1].state
    assert state is not None
    torch.testing.assert_close(here.drafter.network.logits(state[None])[0], logits[10], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["plain", "norm_output", "three layers"])
def test_trees_are_best_first_growth_over_the_definition(name: str, bench: Callable[..., Bench]) -> None:
    here = bench(SHAPES[name])
    ids = TEXT[:9]
    here.verify(ids)
    fused = here.fused(ids)
    target_ids = here.drafter.network.target_ids
    paths: dict[int, list[int]] = {0: []}

    class Slow:
        def expand(self, frontier: Sequence[GrowthNode], num_guesses: int) -> list[Guesses]:
            return [self._guesses(node, num_guesses) for node in frontier]

        def _guesses(self, node: GrowthNode, num_guesses: int) -> Guesses:
            paths[node.number] = [*paths[node.parent], node.token] if node.number else []
            logits = slow_logits(here, ids, fused, paths[node.number])
            best = logits.log_softmax(-1).topk(num_guesses)
            return [(int(target_ids[i]), float(value)) for value, i in zip(*best, strict=True)]

    expected, ours = grow(BestFirstGrowth(ids[-1], TREE), Slow()), here.drafter.propose(here.request(ids))
    assert ours.tree == expected.tree
    assert ours.shares == pytest.approx(expected.shares, rel=1e-3)
    assert len(expected.tree) == 13
    assert max(expected.tree.depths) > 2
    assert max(expected.tree.depths) < len(expected.tree) - 1


def slow_logits(here: Bench, ids: Sequence[int], fused: list[Tensor], path: Sequence[int]) -> Tensor:
    """At the end of a path of guesses, each slot fed with the output of the one before."""
    cache: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(here.slow.shape.num_layers)]
    logits, state = torch.empty(0), torch.empty(0)
    for slot, token in enumerate([*ids[1:], *path]):
        hidden = fused[slot] if slot < len(fused) else state
        logits, state = here.slow.read(here.slow.slot(token, hidden, slot, cache))
    return logits


def test_several_sequences_grow_together_as_each_does_alone(bench: Callable[..., Bench]) -> None:
    here = bench()
    here.verify(TEXT)
    texts = [TEXT[:10], TEXT[:23], TEXT[:2], TEXT[:17]]
    limits = [TREE, CHAIN, TREE, replace(TREE, max_draft=1)]
    requests = [here.request(*each, sequence=i) for i, each in enumerate(zip(texts, limits, strict=True))]
    together = here.drafter.collect(here.drafter.start(requests), 1.0)
    assert {sequence: scored.tree for sequence, scored in together.items()} == {
        request.sequence: here.create().propose(request).tree for request in requests
    }
    assert len({len(tree.tree) for tree in together.values()}) > 2


def test_noise_ranks_what_the_target_would_draw_first(bench: Callable[..., Bench]) -> None:
    here = bench()
    here.verify(TEXT[:12])
    sampling = SamplingParams(temperature=0.8, seed=6)
    tree = here.drafter.propose(here.request(TEXT[:12], DraftLimits(1, 1, 1), sampling)).tree
    logits, _ = here.slow.run(TEXT[1:12], here.fused(TEXT[:12]))
    ids = here.drafter.network.target_ids
    scores = logits[-1] / 0.8 + torch.from_numpy(gumbel_noise(6, 0, 12, ids.numpy()))
    assert tree.tokens[1] == int(ids[scores.argmax()])
    assert tree.tokens[1] != int(ids[logits[-1].argmax()])  # the seed is one with which it makes a difference


# ── the verifier's side ──────────────────────────────────────────────────────────────────────────────────────────────


def test_features_move_and_are_copied_with_their_tokens(bench: Callable[..., Bench]) -> None:
    here = bench()
    here.verify(TEXT[:11])
    tree = TokenTree((TEXT[10], 7, 8, 9, 11, 12), (-1, 0, 0, 2, 2, 4))
    here.verifier.forward(StepPlan((Segment(10, tree, here.pages),)))
    here.verifier.move([here.slot(10 + node) for node in (2, 4, 5)], [here.slot(logical) for logical in (11, 12, 13)])
    ids = [*TEXT[:11], 8, 11, 12, 33]
    torch.testing.assert_close(here.read(0, 14), torch.stack(here.fused(ids)), atol=1e-4, rtol=1e-4)
    before = here.read(0, 14)
    source, spare = here.pages[2], here.pages[40]
    here.verifier.copy_pages([(source, spare)])
    assert torch.equal(here.features.read(range(spare * PAGE_SIZE, (spare + 1) * PAGE_SIZE)), before[8:12])


def test_another_head_has_features_of_its_own(bench: Callable[..., Bench], target: Target, tmp_path: Path) -> None:
    here = bench()
    fusion = here.drafter.fusion
    assert fusion is not None
    assert here.verifier.keep_features(replace(fusion)) is here.features
    assert here.verifier.keep_features(replace(fusion, key="other")) is not here.features
