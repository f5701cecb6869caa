"""The walk, and the laws that it must keep.

Every statistical test here has a fixed seed, so it passes or fails for good. The odds named are those that another
seed would raise a false alarm: at most one in a million for each assertion.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.verifier.trees import token_trees
from verifier.acceptance import Verdict, walk
from verifier.sampling import Draw, SamplingParams, draw, gumbel_noise, process
from verifier.tree import TokenTree

P = np.log(np.array([0.1, 0.2, 0.3, 0.4], dtype=np.float32))
Q = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
NUM_DRAWS = 200_000
ROOT = 9
ONE_IN_A_MILLION = {3: 30.67, 8: 42.71, 15: 56.5}  # chi-square by degrees of freedom


# --- the walk


def always(*tokens: int) -> Callable[[int], Draw]:
    """Draws ``tokens[node]`` at a node."""
    return lambda node: Draw(tokens[node], float(node))


def test_one_node_is_plain_decoding() -> None:
    assert walk(TokenTree.chain([ROOT]), always(5)) == Verdict(tokens=(5,), nodes=(0,), margins=(0.0,))


def test_a_right_chain_is_accepted_whole_with_a_bonus() -> None:
    verdict = walk(TokenTree.chain([ROOT, 1, 2]), always(1, 2, 3))
    assert verdict == Verdict(tokens=(1, 2, 3), nodes=(0, 1, 2), margins=(0.0, 1.0, 2.0))
    assert verdict.num_accepted == 2


@pytest.mark.parametrize("length", [1, 4])
def test_a_wrong_first_token_is_not_accepted(length: int) -> None:
    """Fault: the loop compared guess i + 1 and never guess 0, so that a guess of one token always passed."""
    assert walk(TokenTree.chain([ROOT] + [42] * length), always(7, 42, 42, 42, 42)).tokens == (7,)


def test_the_walk_descends_through_nodes_that_are_no_prefix() -> None:
    tree = TokenTree((ROOT, 1, 2, 3, 1, 2), (-1, 0, 0, 1, 2, 4))
    assert walk(tree, always(2, 0, 1, 0, 2, 8)) == Verdict((2, 1, 2, 8), (0, 2, 4, 5), (0.0, 2.0, 4.0, 5.0))


@given(token_trees(), st.integers(0, 2**32))
def test_only_the_nodes_on_the_walk_are_drawn_at(tree: TokenTree, seed: int) -> None:
    """Noise for the whole vocabulary costs time; it is made only where the walk goes."""
    asked: list[int] = []

    def choose(node: int) -> Draw:
        asked.append(node)
        return Draw(Random(f"{seed} {node}").randrange(6), 1.0)

    verdict = walk(tree, choose)
    assert tuple(asked) == verdict.nodes
    assert tree.paths[verdict.nodes[-1]] == verdict.nodes
    assert [tree.tokens[node] for node in verdict.nodes[1:]] == list(verdict.tokens[:-1])
    assert tree.child(verdict.nodes[-1], verdict.tokens[-1]) is None


# --- our law: the same tokens as plain decoding, whatever the tree


def model(ids: Sequence[int]) -> torch.Tensor:
    """Logits [6] that depend on the whole text."""
    rng = np.random.default_rng([1, *ids])
    return torch.from_numpy(rng.standard_normal(6).astype(np.float32) * 2)


def decode(ids: list[int], params: SamplingParams, num_tokens: int, trees: Sequence[TokenTree] = ()) -> list[int]:
    """Decodes with the given trees' shapes and tokens, one a step, and with a tree of one node when they run out."""
    ids, end = list(ids), len(ids) + num_tokens
    supply = iter(trees)
    while len(ids) < end:
        guess = next(supply, TokenTree.chain([0]))
        ids += step(ids, TokenTree((ids[-1], *guess.tokens[1:]), guess.parents), params).tokens
    return ids[:end]


def step(ids: list[int], tree: TokenTree, params: SamplingParams) -> Verdict:
    def choose(node: int) -> Draw:
        context = ids[:-1] + [tree.tokens[above] for above in tree.paths[node]]
        return draw(model(context), params, position=len(context))

    return walk(tree, choose)


@st.composite
def any_params(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
        top_k=draw(st.sampled_from([0, 1, 3])),
        top_p=draw(st.sampled_from([1.0, 0.8])),
        min_p=draw(st.sampled_from([0.0, 0.1])),
        seed=draw(st.integers(-(2**63), 2**64 - 1)),
    )


@settings(max_examples=60)
@given(any_params(), st.lists(token_trees(), max_size=12))
def test_random_trees_do_not_change_a_token(params: SamplingParams, trees: list[TokenTree]) -> None:
    assert decode([1, 2], params, 12, trees) == decode([1, 2], params, 12)


@settings(max_examples=60)
@given(any_params(), st.data())
def test_trees_that_know_the_future_do_not_change_a_token(params: SamplingParams, data: st.DataObject) -> None:
    """The right continuation with wrong nodes around it, so that walks go deep."""
    plain = decode([1, 2], params, 12)
    tree = TokenTree.chain([0, *plain[2 : 2 + data.draw(st.integers(1, 9))]])
    for _ in range(data.draw(st.integers(0, 6))):
        parent, token = data.draw(st.integers(0, len(tree) - 1)), data.draw(st.integers(0, 5))
        if tree.child(parent, token) is None:
            tree = TokenTree((*tree.tokens, token), (*tree.parents, parent))
    assert decode([1, 2], params, 12, [tree]) == plain


# --- the laws of the distribution


def chi_square(counts: NDArray[np.int64], law: NDArray[np.float64]) -> float:
    expected = law * counts.sum()
    assert np.all(counts[expected == 0] == 0)
    possible = expected > 0
    return float(((counts - expected)[possible] ** 2 / expected[possible]).sum())


def many_draws(scores: NDArray[np.float32], position: int) -> list[int]:
    """What would be drawn from ``scores`` [4], many times. Each row of the noise serves as a vocabulary of its own."""
    noise = gumbel_noise(11, 0, position, np.arange(NUM_DRAWS * 4)).reshape(NUM_DRAWS, 4)
    tokens: list[int] = np.argmax(scores + noise, axis=1).tolist()
    return tokens


def without_replacement() -> list[tuple[int, ...]]:
    """Two distinct tokens from q: the two best of log q plus noise that nobody else uses."""
    noise = np.random.default_rng(3).gumbel(size=(NUM_DRAWS, 4))
    return [tuple(row) for row in np.argsort(-(Q + noise), axis=1)[:, :2].tolist()]


def independent() -> list[tuple[int, ...]]:
    rows = np.random.default_rng(4).choice(4, size=(NUM_DRAWS, 2), p=[0.4, 0.3, 0.2, 0.1])
    return [tuple(dict.fromkeys(row)) for row in rows.tolist()]


Grow = Callable[[], list[tuple[int, ...]]]
GROWN: dict[str, tuple[Grow, float]] = {
    "top two by q": (lambda: [(0, 1)] * NUM_DRAWS, 0.30),
    "the same in the order of p": (lambda: [(1, 0)] * NUM_DRAWS, 0.30),
    "two sampled without replacement": (without_replacement, 0.4194),
    "two independent draws without duplicates": (independent, 0.35),
    "the best by q": (lambda: [(0,)] * NUM_DRAWS, 0.10),
    "two sampled, the likelier kept": (lambda: [(min(pair),) for pair in without_replacement()], 0.1331),
}


@pytest.mark.parametrize("name", GROWN)
def test_one_level_keeps_the_law_and_accepts_as_computed(name: str) -> None:
    """Acceptance by exact enumeration, and p as the law of the next token, for p = (.1 .2 .3 .4), q = (.4 .3 .2 .1)."""
    grow, acceptance = GROWN[name]
    cases = Counter(zip(grow(), many_draws(P, position=10), strict=True))
    counts, num_accepted = np.zeros(4, dtype=np.int64), 0
    for (children, token), times in cases.items():
        tree = TokenTree((ROOT, *children), (-1, *[0] * len(children)))
        verdict = walk(tree, always(token, 0, 0))
        counts[verdict.tokens[0]] += times
        num_accepted += times * verdict.num_accepted
    assert chi_square(counts, np.exp(P.astype(np.float64))) < ONE_IN_A_MILLION[3]
    error = math.sqrt(acceptance * (1 - acceptance) / NUM_DRAWS)
    assert num_accepted / NUM_DRAWS == pytest.approx(acceptance, abs=5 * error + 5e-5)  # the table has four digits


SECOND = [np.roll(P, shift) for shift in range(4)]  # p at the second level, by the token of the first


@pytest.mark.parametrize("top_p", [1.0, 0.75])
def test_two_levels_keep_the_joint_law(top_p: float) -> None:
    """Trees sampled from q, pruned to the likelier child at the second level; p whole, and cut to its best three."""
    params = SamplingParams(top_p=top_p)
    levels = [process(scores, params) for scores in (P, *SECOND)]
    first = many_draws(levels[0], position=10)
    seconds = [many_draws(scores, position=11) for scores in levels[1:]]
    second = [seconds[token][index] for index, token in enumerate(first)]
    cases = Counter(zip(without_replacement(), first, second, strict=True))
    counts, num_accepted = np.zeros((4, 4), dtype=np.int64), 0
    for (children, token, next_token), times in cases.items():
        tree = TokenTree((ROOT, *children, min(children)), (-1, 0, 0, 1))
        verdict = walk(tree, always(token, next_token, next_token, 0))
        assert verdict.tokens[:2] == (token, next_token)[: len(verdict.tokens)]
        num_accepted += times * verdict.num_accepted
        counts[token, next_token] += times  # a walk of one token is followed by another from there
    laws = [np.exp(scores.astype(np.float64)) for scores in levels]
    laws = [law / law.sum() for law in laws]
    joint = laws[0][:, None] * np.stack(laws[1:])
    assert num_accepted > 0.4 * NUM_DRAWS
    assert chi_square(counts.ravel(), joint.ravel()) < ONE_IN_A_MILLION[15 if top_p == 1 else 8]


def test_the_real_draw_keeps_the_law_over_seeds_and_positions() -> None:
    """Few draws, but by the very function that serves, and each with noise of its own."""
    logits = torch.from_numpy(P)
    tokens = [draw(logits, SamplingParams(seed=seed), position).token for seed in range(60) for position in range(100)]
    assert chi_square(np.bincount(tokens, minlength=4), np.exp(P.astype(np.float64))) < ONE_IN_A_MILLION[3]


def test_ranking_with_the_acceptance_noise_comes_close_to_ratio_rules() -> None:
    """A drafter that proposes the argmax of log q + g, with the noise of the draw itself.

    The two argmaxes agree with probability sum over x of 1 / sum over y of max(p_y / p_x, q_y / q_x): here .543, where
    the ratio rule accepts 1 - TV(p, q) = .60, q's best token .10 and a sample from q with noise of its own .20.
    """
    agreed = np.equal(many_draws(P, position=10), many_draws(Q, position=10))
    p, q = np.exp(P.astype(np.float64)), np.exp(Q.astype(np.float64))
    ratios = np.maximum(p[None, :] / p[:, None], q[None, :] / q[:, None])
    expected = float((1 / ratios.sum(axis=1)).sum())
    assert expected == pytest.approx(0.5429, abs=1e-4)
    assert agreed.mean() == pytest.approx(expected, abs=5 * math.sqrt(expected * (1 - expected) / NUM_DRAWS))
