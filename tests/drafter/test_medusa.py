"""Medusa heads against their definition, and the trees that their candidates make."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.base import DraftLimits, DraftRequest
from drafter.growth import Guesses
from drafter.medusa import MedusaDraft, MedusaHeads, grow_likeliest
from drafter.medusa_config import MedusaCheckpoint
from drafter.options import DraftOptions
from tests.drafter.medusas import MedusaShape, Weights, random_medusa, save_medusa, slow_logits, vllm_config
from tests.drafter.requests import LIMITS, assert_within
from tests.models import save_tiny_model
from verifier.attention import create_attention
from verifier.model import Model
from verifier.sampling import SamplingParams, draw
from verifier.weights import Checkpoint

# Two heads and more, one block and more, own outputs and shared ones, whole vocabularies and truncated ones.
SHAPES = [
    MedusaShape(),
    MedusaShape(num_heads=3, num_layers=3, bias=False),
    MedusaShape(num_heads=2, num_layers=2, shared=True),
    MedusaShape(num_heads=4, truncated=48),
    MedusaShape(num_heads=2, truncated=48, shared=True),
    MedusaShape(num_heads=2, num_layers=0, bias=False),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Model:
    checkpoint = Checkpoint.open(save_tiny_model(tmp_path_factory.mktemp("models") / "target", "llama2"))
    return Model(checkpoint.config, checkpoint, create_attention())


def load(folder: Path, shape: MedusaShape, weights: Weights, target: Model) -> MedusaHeads:
    save_medusa(folder, weights, vllm_config(shape))
    return MedusaHeads(MedusaCheckpoint.open(folder, target.config), target)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_heads_say_what_the_definition_says(shape: MedusaShape, tmp_path: Path, target: Model) -> None:
    weights = random_medusa(shape)
    heads = load(tmp_path, shape, weights, target)
    states = torch.randn(3, shape.hidden, generator=torch.Generator().manual_seed(1))
    expected = [[slow_logits(shape, weights, state, head) for state in states] for head in range(shape.num_heads)]
    for num_heads in (1, shape.num_heads):
        rows = torch.stack([torch.stack(rows) for rows in expected[:num_heads]])
        torch.testing.assert_close(heads.logits(states, num_heads), rows, atol=1e-4, rtol=1e-4)


def test_the_targets_own_output_and_a_scale(tmp_path: Path, target: Model) -> None:
    shape = MedusaShape(num_heads=2, shared=True, truncated=48)
    weights = random_medusa(shape)
    del weights["lm_head.weight"]
    save_medusa(tmp_path, weights, vllm_config(shape) | {"logit_scale": 0.5})
    heads = MedusaHeads(MedusaCheckpoint.open(tmp_path, target.config), target)
    weights["lm_head.weight"] = torch.eye(shape.hidden)
    state = torch.randn(1, shape.hidden)
    expected = target.head(slow_logits(shape, weights, state[0], 1)[None]) * 0.5
    got = heads.logits(state, 2)[1]
    torch.testing.assert_close(got, expected[:, weights["token_map"]], atol=1e-4, rtol=1e-4)


def test_heads_read_the_state_after_the_final_norm(tmp_path: Path, target: Model) -> None:
    heads = load(tmp_path, MedusaShape(), random_medusa(MedusaShape()), target)
    states = torch.randn(4, 64)
    assert heads.fusion.taps == (3,)
    torch.testing.assert_close(heads.fusion([states]), target.norm(states))


# ── trees ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@st.composite
def levels(draw: st.DrawFn) -> list[Guesses]:
    """Of a few probabilities, so that equals are common."""
    probs = st.lists(st.sampled_from([0.5, 0.25, 0.125, 1e-9]), max_size=5)
    return [
        [(10 * depth + rank, math.log(prob)) for rank, prob in enumerate(sorted(draw(probs), reverse=True))]
        for depth in range(draw(st.integers(0, 4)))
    ]


@settings(max_examples=100)
@given(levels(), LIMITS, st.sampled_from([0.0, 0.2]), st.sampled_from([1.0, 0.9]))
def test_the_likeliest_paths_of_all_are_kept(
    levels: list[Guesses], limits: DraftLimits, threshold: float, decay: float
) -> None:
    grown = grow_likeliest(99, levels, limits, threshold=threshold, decay=decay)
    assert_within(grown.tree, limits)
    usable = [level[: limits.draft_top_k] for level in levels[: limits.max_draft]]
    paths = [path for depth in range(1, len(usable) + 1) for path in product(*usable[:depth])]
    probs = [(math.prod(math.exp(log_prob) for _, log_prob in path), len(path)) for path in paths]
    by_rank = sorted((prob * decay**depth for prob, depth in probs if prob >= threshold), reverse=True)
    ranks = [prob * decay**depth for prob, depth in zip(grown.survival, grown.tree.depths, strict=True)][1:]
    assert sorted(ranks, reverse=True) == pytest.approx(by_rank[: limits.max_nodes])
    for node in range(1, len(grown.tree)):
        guesses = dict(levels[grown.tree.depths[node] - 1])
        assert grown.shares[node] == pytest.approx(math.exp(guesses[grown.tree.tokens[node]]))


def request(ids: list[int], features: torch.Tensor, limits: DraftLimits, sequence: int = 1) -> DraftRequest:
    """``features [positions, hidden]`` of the whole text, of which a drafter may read all but the last."""

    def read(first: int, end: int) -> torch.Tensor:
        assert 0 <= first < end < len(ids)
        return features[first:end]

    return DraftRequest(sequence, ids, limits, SamplingParams(temperature=0), read)


def test_children_of_one_depth_are_the_same_guesses(tmp_path: Path, target: Model) -> None:
    """All read the state before the root's position; each is proposed below every parent."""
    shape = MedusaShape(num_heads=3)
    weights = random_medusa(shape)
    drafter = MedusaDraft(load(tmp_path, shape, weights, target))
    features = torch.randn(6, 64, generator=torch.Generator().manual_seed(2))
    batch = [
        request([1, 2, 3, 4, 5, 6], features, DraftLimits(9, 2, 14), sequence=1),
        request([7, 8, 9], features, DraftLimits(1, 3, 9), sequence=2),
    ]
    trees = drafter.propose_all(batch)
    for sequence, state, depth, width in ((1, features[4], 3, 2), (2, features[1], 1, 3)):
        scored = trees[sequence]
        assert len(scored.tree) - 1 == sum(width**level for level in range(1, depth + 1))
        for node in range(len(scored.tree)):
            children = [child for child, parent in enumerate(scored.tree.parents) if parent == node]
            if scored.tree.depths[node] < depth:
                probs = slow_logits(shape, weights, state, scored.tree.depths[node]).softmax(-1)
                assert [scored.tree.tokens[child] for child in children] == probs.topk(width).indices.tolist()
                shares = pytest.approx(probs.topk(width).values.tolist(), rel=1e-4)
                assert [scored.shares[child] for child in children] == shares
    assert drafter.propose(batch[1]).tree == trees[2].tree


def test_a_published_list_gives_every_tree_its_shape(tmp_path: Path, target: Model) -> None:
    shape = MedusaShape(num_heads=2)
    choices = [[0], [1], [0, 0], [0, 2], [1, 0], [0, 0, 0]]
    weights = random_medusa(shape)
    drafter = MedusaDraft(load(tmp_path, shape, weights, target), DraftOptions(growth="static"), choices)
    features = torch.randn(3, 64)
    scored = drafter.propose(request([1, 2, 3], features, DraftLimits(5, 10, 63)))
    first, second = (slow_logits(shape, weights, features[1], head).topk(3).indices.tolist() for head in range(2))
    paths = [tuple(scored.tree.tokens[node] for node in path[1:]) for path in scored.tree.paths]
    expected = [(), first[:1], first[1:2], (first[0], second[0]), (first[0], second[2]), (first[1], second[0])]
    assert paths == [tuple(path) for path in expected]  # no third head, so no third level


def test_no_features_no_guesses(tmp_path: Path, target: Model) -> None:
    drafter = MedusaDraft(load(tmp_path, MedusaShape(), random_medusa(MedusaShape()), target))
    limits = DraftLimits(3, 1, 3)
    assert len(drafter.propose(request([1], torch.zeros(1, 64), limits)).tree) == 1
    assert len(drafter.propose(DraftRequest(1, [1, 2], limits, SamplingParams())).tree) == 1


def test_candidates_can_be_ranked_with_the_noise_of_their_positions(tmp_path: Path, target: Model) -> None:
    """The best candidate of each depth is then what the target would draw there, had it the head's distribution."""
    shape = MedusaShape(num_heads=3, truncated=48)
    weights = random_medusa(shape)
    drafter = MedusaDraft(load(tmp_path, shape, weights, target), DraftOptions())
    features = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    sampling = SamplingParams(temperature=5.0, top_p=0.95, seed=3)  # hot, so that the noise decides
    noisy = replace(request([1, 2, 3, 4, 5], features, DraftLimits(3, 1, 3)), sampling=sampling)
    tokens = []
    for head in range(3):
        logits = torch.full((160,), -torch.inf)
        logits[weights["token_map"]] = slow_logits(shape, weights, features[3], head)
        tokens.append(draw(logits, sampling, position=5 + head).token)
    assert list(drafter.propose(noisy).tree.tokens) == [5, *tokens]
    greedy = request([1, 2, 3, 4, 5], features, DraftLimits(3, 1, 3))
    assert drafter.propose(greedy) == MedusaDraft(drafter.heads).propose(greedy)
