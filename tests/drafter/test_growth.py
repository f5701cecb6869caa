from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.base import DraftLimits
from drafter.growth import EAGLE_TREE, BestFirstGrowth, GrowthNode, Guesses, StaticGrowth, TreeBuilder, grow
from tests.drafter.requests import LIMITS, assert_within
from verifier.errors import BadSetting
from verifier.tree import TokenTree

A, B, C, D, E, F, G, H, K, L, ROOT = range(11)
Scored = tuple[float, int, int, tuple[int, ...]]  # minus score, depth, index in the pool, path
EAGLE_1 = [  # the published tree of 25 nodes
    *([i] for i in range(4)),
    *([0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0], [2, 1], [3, 0]),
    *([0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1], [0, 2, 0], [0, 2, 1], [1, 0, 0]),
    *([0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]),
]


class Table:
    """Probabilities by the path of tokens below the root; remembers which paths it was asked about, call by call."""

    def __init__(self, table: dict[tuple[int, ...], list[tuple[int, float]]]) -> None:
        self.table = table
        self.paths: dict[int, tuple[int, ...]] = {}
        self.asked: list[list[tuple[int, ...]]] = []

    def expand(self, frontier: Sequence[GrowthNode], num_guesses: int) -> Sequence[Guesses]:
        for node in frontier:
            assert node.number not in self.paths
            self.paths[node.number] = (*self.paths[node.parent], node.token) if node.depth else ()
        self.asked.append([self.paths[node.number] for node in frontier])
        return [self.guesses(self.paths[node.number])[:num_guesses] for node in frontier]

    def guesses(self, path: tuple[int, ...]) -> Guesses:
        return [(token, math.log(p) if p else -math.inf) for token, p in self.table.get(path, [])]


class Coin(Table):
    """Five random guesses for every path. With few possible values, many paths are equally likely."""

    def __init__(self, seed: int, probabilities: Sequence[float]) -> None:
        super().__init__({})
        self.seed, self.probabilities = seed, probabilities

    def guesses(self, path: tuple[int, ...]) -> Guesses:
        rng = Random(f"{self.seed} {path}")
        ranked = sorted((rng.choice(self.probabilities) for _ in range(5)), reverse=True)
        return [(token, math.log(p)) for token, p in zip(rng.sample(range(20), 5), ranked, strict=True)]


def best_first(source: Table, limits: DraftLimits) -> TokenTree:
    return grow(BestFirstGrowth(ROOT, limits), source).tree


def all_nodes(source: Table, limits: DraftLimits) -> list[Scored]:
    """EAGLE-2 to the letter, nothing left out: the whole pool."""
    pool: list[Scored] = []
    frontier: list[Scored] = [(0.0, 0, -1, ())]
    for depth in range(1, limits.max_draft + 1):
        level: list[Scored] = []
        for score, _, _, path in frontier:
            for token, log_prob in source.guesses(path)[: limits.draft_top_k]:
                level.append((score - log_prob, depth, len(pool) + len(level), (*path, token)))
        pool += level
        frontier = sorted(level)[: limits.draft_top_k]
    return pool


def token_paths(tree: TokenTree) -> list[tuple[int, ...]]:
    return [tuple(tree.tokens[node] for node in path[1:]) for path in tree.paths[1:]]


# --- best first

WORKED_EXAMPLE = {
    (): [(A, 0.6), (B, 0.3)],
    (A,): [(C, 0.7), (D, 0.2)],
    (B,): [(E, 0.9), (F, 0.05)],
    (A, C): [(G, 0.5), (H, 0.4)],
    (B, E): [(K, 0.8), (L, 0.1)],
}


def test_the_worked_example() -> None:
    """Two wide, three deep, six nodes: computed by hand from EAGLE-2's description."""
    source = Table(WORKED_EXAMPLE)
    tree = best_first(source, DraftLimits(max_draft=3, draft_top_k=2, max_nodes=6))
    assert tree.tokens == (ROOT, A, B, C, E, G, K)
    assert tree.parents == (-1, 0, 0, 1, 2, 3, 4)
    assert tree.depths == (0, 1, 1, 2, 2, 3, 3)
    mask = ["".join("01"[node in path] for node in range(7)) for path in tree.paths]
    assert mask == ["1000000", "1100000", "1010000", "1101000", "1010100", "1101010", "1010101"]
    assert source.asked == [[()], [(A,), (B,)], [(A, C), (B, E)]]


def test_scores_are_products_along_the_path() -> None:
    growth = BestFirstGrowth(ROOT, DraftLimits(3, 2, 6))
    source = Table(WORKED_EXAMPLE)
    scores = []
    while growth.frontier:
        scores.append([round(math.exp(node.log_prob), 6) for node in growth.frontier])
        growth.extend(source.expand(growth.frontier, growth.num_guesses))
    assert scores == [[1.0], [0.6, 0.3], [0.42, 0.27]]


@given(LIMITS, st.integers(0, 1000), st.sampled_from([(0.5, 1.0), (1.0,), (0.9, 0.3, 0.31, 0.02)]))
def test_what_is_kept_is_what_the_whole_pool_would_keep(
    limits: DraftLimits, seed: int, probabilities: tuple[float, ...]
) -> None:
    """Nodes without hope are not expanded; that must change nothing, least of all among equal scores."""
    source = Coin(seed, probabilities)
    tree = best_first(source, limits)
    assert_within(tree, limits)
    best = sorted(all_nodes(source, limits))[: limits.max_nodes]
    expected = [] if limits.off else [path for _, _, _, path in sorted(best, key=lambda node: node[2])]
    assert token_paths(tree) == expected
    assert sum(len(level) for level in source.asked) <= 1 + limits.draft_top_k * max(0, limits.max_draft - 1)


def test_certain_guesses_keep_their_parents() -> None:
    """Fault: with scores that round to the same number, a child was kept and its parent was not."""
    tree = best_first(Coin(0, [1.0]), DraftLimits(max_draft=5, draft_top_k=3, max_nodes=7))
    assert tree.depths == (0, 1, 1, 1, 2, 2, 2, 2)


def test_a_log_probability_above_zero_by_rounding_does_not_lift_a_child_above_its_parent() -> None:
    source = Table({})
    source.guesses = lambda path: [(A, 1e-7), (B, 1e-7)]  # type: ignore[method-assign]
    assert best_first(source, DraftLimits(2, 2, 2)).parents == (-1, 0, 0)


def test_growth_stops_when_deeper_nodes_cannot_be_kept() -> None:
    chain = Table({(1,) * depth: [(1, 0.9)] for depth in range(9)})
    assert len(best_first(chain, DraftLimits(max_draft=8, draft_top_k=1, max_nodes=3))) == 4
    assert len(chain.asked) == 3


def test_a_threshold_leaves_out_what_is_unlikely_to_be_reached() -> None:
    """By the product along the path: what is below an unlikely node is left out with it, and never asked for."""
    source = Table(WORKED_EXAMPLE)
    tree = grow(BestFirstGrowth(ROOT, DraftLimits(3, 2, 9), threshold=0.25), source).tree
    assert token_paths(tree) == [(A,), (B,), (A, C), (B, E)]
    assert source.asked == [[()], [(A,), (B,)], [(A, C), (B, E)]]
    assert len(grow(BestFirstGrowth(ROOT, DraftLimits(3, 2, 9), threshold=0.7), Table(WORKED_EXAMPLE)).tree) == 1


def test_decay_prefers_shallow_nodes_and_changes_no_share() -> None:
    """.6 and .3 fall to .54 and .27; .42 to .34, .27 to .22 and .12 to .1; .216 to .157 and .21 to .153."""
    limits = DraftLimits(3, 2, 6)
    plain = grow(BestFirstGrowth(ROOT, limits), Table(WORKED_EXAMPLE))
    slight, strong = (grow(BestFirstGrowth(ROOT, limits, decay=decay), Table(WORKED_EXAMPLE)) for decay in (0.9, 0.5))
    assert slight == plain
    assert token_paths(strong.tree) == [(A,), (B,), (A, C), (A, D), (B, E), (B, E, K)]
    assert strong.shares == pytest.approx((1, 0.6, 0.3, 0.7, 0.2, 0.9, 0.8))


@given(LIMITS, st.integers(0, 100), st.sampled_from([0.1, 0.9, 1.0]), st.sampled_from([0.0, 0.05, 0.3]))
def test_options_keep_the_limits_and_every_parent(
    limits: DraftLimits, seed: int, decay: float, threshold: float
) -> None:
    source = Coin(seed, (0.9, 0.3, 0.31, 0.02))
    growth = BestFirstGrowth(ROOT, limits, decay=decay, threshold=threshold)
    scored = grow(growth, source)
    assert_within(scored.tree, limits)
    assert min(scored.survival) >= threshold
    assert sum(map(len, source.asked)) <= 1 + growth.max_expanded


def test_guesses_that_are_double_or_impossible_are_left_out() -> None:
    source = Table({(): [(A, 0.5), (A, 0.3), (B, 0.2), (C, 0.0)], (A,): [(D, math.nan)]})
    tree = best_first(source, DraftLimits(2, 4, 9))
    assert (tree.tokens, tree.parents) == ((ROOT, A, B), (-1, 0, 0))
    likelier_first = Table({(): [(A, 0.5), (B, 0.4), (A, 0.1)]})
    assert best_first(likelier_first, DraftLimits(1, 3, 1)) == TokenTree.chain([ROOT, A])


def test_a_source_without_guesses_gives_the_root_alone() -> None:
    assert best_first(Table({}), DraftLimits(3, 2, 6)) == TokenTree.chain([ROOT])


def test_many_trees_can_grow_through_one_call_of_a_source() -> None:
    sources = [Coin(seed, (0.9, 0.3, 0.2)) for seed in range(3)]
    limits = DraftLimits(4, 3, 9)
    growths = [BestFirstGrowth(ROOT, limits) for _ in sources]
    while running := [(growth, source) for growth, source in zip(growths, sources, strict=True) if growth.frontier]:
        for growth, source in running:
            growth.extend(source.expand(growth.frontier, growth.num_guesses))
    assert [growth.build().tree for growth in growths] == [
        best_first(Coin(seed, (0.9, 0.3, 0.2)), limits) for seed in range(3)
    ]


# --- static shapes


def static(source: Table, limits: DraftLimits, choices: Sequence[Sequence[int]] = EAGLE_1) -> TokenTree:
    return grow(StaticGrowth(ROOT, choices, limits), source).tree


def test_the_tree_of_eagle_1() -> None:
    assert [list(path) for path in EAGLE_TREE] == EAGLE_1
    source = Coin(0, (0.9, 0.3))
    tree = static(source, DraftLimits(5, 4, 25))
    assert [tree.depths.count(depth) for depth in range(6)] == [1, 4, 8, 8, 3, 2]
    for path, choice in zip(token_paths(tree), EAGLE_1, strict=True):
        assert list(path) == [source.guesses(path[:depth])[rank][0] for depth, rank in enumerate(choice)]
    assert [len(level) for level in source.asked] == [1, 4, 4, 1, 1]


def test_choices_may_come_in_any_order_and_twice() -> None:
    limits = DraftLimits(5, 4, 25)
    shuffled = [*reversed(EAGLE_1), [0], [1, 1]]
    assert static(Coin(0, (0.9, 0.3)), limits, shuffled) == static(Coin(0, (0.9, 0.3)), limits)


@given(LIMITS, st.integers(0, 100))
def test_static_trees_keep_the_limits(limits: DraftLimits, seed: int) -> None:
    tree = static(Coin(seed, (0.9, 0.3)), limits)
    assert_within(tree, limits)
    fitting = [path for path in EAGLE_1 if len(path) <= limits.max_draft and max(path) < limits.draft_top_k]
    assert len(tree) - 1 == min(limits.max_nodes, len(fitting))
    growth = StaticGrowth(ROOT, EAGLE_1, limits)
    grow(growth, source := Coin(seed, (0.9, 0.3)))
    assert sum(map(len, source.asked)) == growth.max_expanded + bool(fitting and limits.max_nodes)


def test_of_a_shape_too_large_the_likeliest_stay() -> None:
    """The first ones stayed, which are the shallow ones: five nodes never came to a third level."""
    tree = static(Coin(0, (0.9, 0.3)), DraftLimits(5, 4, 5))
    assert (tree.depths, tree.parents) == ((0, 1, 1, 2, 2, 3), (-1, 0, 0, 1, 1, 3))


def test_missing_and_double_guesses_leave_their_subtrees_out() -> None:
    source = Table({(): [(A, 0.5), (A, 0.4), (B, 0.1)], (A,): [(C, 0.5)], (B,): [(D, 1.0), (E, 0.1)]})
    tree = static(source, DraftLimits(2, 3, 9), [[0], [1], [2], [0, 0], [0, 1], [1, 1], [2, 0]])
    assert (tree.tokens, tree.parents) == ((ROOT, A, B, C, E), (-1, 0, 0, 1, 2))


def test_a_path_without_its_parent_is_refused() -> None:
    with pytest.raises(BadSetting, match=r"choices is \(0, 1\)"):
        StaticGrowth(ROOT, [[1], [0, 1]], DraftLimits(2, 2, 4))


# --- path by path


@given(LIMITS, st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=10))
def test_a_builder_shares_prefixes_and_keeps_the_limits(limits: DraftLimits, texts: list[list[int]]) -> None:
    builder = TreeBuilder(ROOT, limits)
    for text in texts:
        builder.add_path(text)
    tree = builder.build().tree
    assert_within(tree, limits)
    assert builder.is_full == (len(tree) > limits.max_nodes)
    prefixes = {tuple(text[:length]) for text in texts for length in range(1, len(text) + 1)}
    assert set(token_paths(tree)) <= prefixes


def test_a_builder_returns_nodes_old_and_new() -> None:
    builder = TreeBuilder(ROOT, DraftLimits(2, 2, 3))
    assert [builder.add(0, A), builder.add(0, B), builder.add(0, A), builder.add(0, C)] == [1, 2, 1, None]
    assert [builder.add(1, A), builder.add(3, A), builder.add(1, B)] == [3, None, None]
