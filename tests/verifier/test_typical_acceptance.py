"""The lossy rule: what passes, and which path is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.verifier.trees import token_trees
from verifier.acceptance import Typical, Verdict, walk_typically
from verifier.sampling import Draw, SamplingParams, process
from verifier.tree import TokenTree

P = np.log(np.array([0.1, 0.2, 0.3, 0.4], dtype=np.float32))
ROOT = 9


def test_the_threshold_falls_with_the_entropy() -> None:
    """For p = (.1 .2 .3 .4): H = 1.27985, exp(-H) = 0.27808, and 0.3 of that is less than 0.09: all four pass."""
    typical = Typical.of(P)
    assert math.exp(typical.log_threshold) == pytest.approx(0.08342, abs=1e-5)
    assert (typical.log_probs > typical.log_threshold).all()
    certain = Typical.of(np.log(np.array([0.97, 0.01, 0.01, 0.01], dtype=np.float32)))
    assert math.exp(certain.log_threshold) == pytest.approx(0.09)
    assert math.exp(Typical.of(P, epsilon=0.05, delta=0.3).log_threshold) == pytest.approx(0.05)
    assert math.exp(Typical.of(P, epsilon=0.5, delta=0.1).log_threshold) == pytest.approx(0.027808, abs=1e-6)


def test_scores_need_not_be_normalised_and_impossible_tokens_never_pass() -> None:
    scores = process(P + 100, SamplingParams(top_k=2))
    typical = Typical.of(scores)
    assert np.exp(typical.log_probs) == pytest.approx([0, 0, 3 / 7, 4 / 7])
    assert math.exp(typical.log_threshold) == pytest.approx(0.09)
    assert list(typical.log_probs > typical.log_threshold) == [False, False, True, True]


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=9))
def test_the_likeliest_token_always_passes(scores: list[float]) -> None:
    """exp(-H) is at most the greatest probability."""
    typical = Typical.of(np.array(scores, dtype=np.float32))
    assert typical.log_probs.max() > typical.log_threshold


def accepting(*nodes: int, log_probs: Sequence[float] = (-1.0,) * 10) -> Callable[[int], Typical]:
    """At these nodes all tokens pass, at others none."""

    def typical(node: int) -> Typical:
        return Typical(np.array(log_probs), -math.inf if node in nodes else math.inf)

    return typical


def bonus(node: int) -> Draw:
    return Draw(7, float(node))


def test_the_longest_path_wins_whatever_would_be_drawn() -> None:
    tree = TokenTree((ROOT, 1, 2, 3, 4), (-1, 0, 0, 2, 3))
    assert walk_typically(tree, accepting(0, 1, 2), bonus) == Verdict((2, 3, 7), (0, 2, 3), (math.inf, math.inf, 3.0))
    assert walk_typically(tree, accepting(0), bonus).tokens == (1, 7)
    assert walk_typically(tree, accepting(), bonus) == Verdict((7,), (0,), (0.0,))


def test_the_likelier_of_two_equally_long_paths_wins() -> None:
    tree = TokenTree((ROOT, 1, 2, 3, 4), (-1, 0, 0, 1, 2))
    log_probs = [-9.0, -1.0, -2.0, -5.0, -3.0]
    assert walk_typically(tree, accepting(0, 1, 2, log_probs=log_probs), bonus).nodes == (0, 2, 4)
    log_probs[4] = -5.0
    assert walk_typically(tree, accepting(0, 1, 2, log_probs=log_probs), bonus).nodes == (0, 1, 3)


def test_a_drawn_token_ends_the_walk_even_if_a_node_carries_it() -> None:
    assert walk_typically(TokenTree((ROOT, 7), (-1, 0)), accepting(), bonus) == Verdict((7,), (0,), (0.0,))


@given(token_trees(), st.integers(0, 2**32))
def test_what_is_kept_is_a_path_of_passing_guesses_and_one_drawn_token(tree: TokenTree, seed: int) -> None:
    def typical(node: int) -> Typical:
        return Typical.of(np.random.default_rng([seed, node]).standard_normal(6).astype(np.float32) * 3)

    asked: list[int] = []

    def choose(node: int) -> Draw:
        asked.append(node)
        return Draw(5, 1.0)

    verdict = walk_typically(tree, typical, choose)
    assert asked == [verdict.nodes[-1]]
    assert tree.paths[verdict.nodes[-1]] == verdict.nodes
    assert verdict.tokens == (*(tree.tokens[node] for node in verdict.nodes[1:]), 5)
    passing = []
    for path in tree.paths:
        steps = [(typical(parent), tree.tokens[node]) for parent, node in pairwise(path)]
        if all(each.log_probs[token] > each.log_threshold for each, token in steps):
            passing.append((len(path), sum(each.log_probs[token] for each, token in steps)))
    steps = [(typical(parent), token) for parent, token in zip(verdict.nodes, verdict.tokens[:-1], strict=False)]
    assert (len(verdict.nodes), sum(each.log_probs[token] for each, token in steps)) == max(passing)
