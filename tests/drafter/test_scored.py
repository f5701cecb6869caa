"""Shares, survival, and which nodes are worth most."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.scored import ScoredTree
from verifier.tree import TokenTree

#   0 ─ 1 (.6) ─ 3 (.5)
#     ╰ 2 (.4) ─ 4 (.9) ─ 5 (1)
TREE = ScoredTree(TokenTree((9, 1, 2, 3, 4, 5), (-1, 0, 0, 1, 2, 4)), (1.0, 0.6, 0.4, 0.5, 0.9, 1.0))


def test_survival_is_the_product_along_the_path() -> None:
    assert TREE.survival == pytest.approx((1.0, 0.6, 0.4, 0.3, 0.36, 0.36))


def test_equals_go_to_the_shallower_node() -> None:
    assert TREE.ranking == (0, 1, 2, 4, 5, 3)
    chain_first = ScoredTree(TokenTree((0, 1, 2, 3), (-1, 0, 1, 0)), (1.0, 0.5, 1.0, 0.5))
    assert chain_first.ranking == (0, 1, 3, 2)


def test_the_best_keep_their_order_and_their_shares() -> None:
    assert TREE.best(3) == ScoredTree(TokenTree((9, 1, 2, 4), (-1, 0, 0, 2)), (1.0, 0.6, 0.4, 0.9))
    assert TREE.best(0) == ScoredTree.root(9)
    assert TREE.best(5) is TREE


def test_the_likeliest_come_first() -> None:
    assert TREE.likeliest(3, 2) == ScoredTree(TokenTree((9, 1, 2, 4), (-1, 0, 0, 2)), (1.0, 0.6, 0.4, 0.9))
    assert TREE.likeliest(4, 2).tree == TokenTree((9, 1, 2, 4, 5), (-1, 0, 0, 2, 3))
    assert TREE.likeliest(0, 2) == ScoredTree.root(9)


def test_siblings_beyond_the_branching_go_with_all_below_them() -> None:
    assert TREE.likeliest(5, 1) == ScoredTree(TokenTree((9, 1, 3), (-1, 0, 1)), (1.0, 0.6, 0.5))
    assert TREE.likeliest(5, 0) == ScoredTree.root(9)


@pytest.mark.parametrize("shares", [(1.0,), (1.0, -0.1), (1.0, 1.1), (1.0, math.nan)])
def test_what_is_no_probability_is_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="shares"):
        ScoredTree(TokenTree((1, 2), (-1, 0)), shares)


@st.composite
def trees(draw: st.DrawFn) -> ScoredTree:
    parents = [-1, *(draw(st.integers(0, node)) for node in range(draw(st.integers(0, 8))))]
    shares = [1.0, *(draw(st.sampled_from((0.0, 0.3, 1.0))) for _ in parents[1:])]
    return ScoredTree(TokenTree(tuple(range(len(parents))), tuple(parents)), tuple(shares))


@given(trees(), st.integers(0, 8))
def test_no_subtree_of_that_size_survives_longer(scored: ScoredTree, num_guesses: int) -> None:
    best, num_guesses = scored.best(num_guesses), min(num_guesses, len(scored.tree) - 1)
    subsets = itertools.combinations(range(1, len(scored.tree)), num_guesses)
    closed = [nodes for nodes in subsets if all(scored.tree.parents[node] in (0, *nodes) for node in nodes)]
    assert sum(best.survival) == pytest.approx(
        max(1 + sum(scored.survival[node] for node in nodes) for nodes in closed)
    )
