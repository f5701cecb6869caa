"""Growing trees within limits: path by path, by a static shape, or best first over a source of scores.

Knows tokens, log-probabilities and limits. Knows no network: hidden states stay with the source, which finds them by
the numbers of the nodes it is asked about.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from drafter.base import DraftLimits
from drafter.options import DraftOptions
from drafter.scored import UNKNOWN_SHARE, ScoredTree
from verifier.errors import BadSetting
from verifier.tree import TokenTree


class TreeBuilder:
    """A tree that grows child by child and never beyond its limits."""

    def __init__(self, root: int, limits: DraftLimits) -> None:
        self._limits = limits
        self._tokens = [root]
        self._parents = [-1]
        self._shares = [1.0]
        self._depths = [0]
        self._children: list[dict[int, int]] = [{}]  # of each node: token -> child

    @property
    def is_full(self) -> bool:
        return len(self._tokens) > self._limits.max_nodes

    def add(self, parent: int, token: int, share: float = UNKNOWN_SHARE) -> int | None:
        """The child of ``parent`` that carries ``token``, new or old; None where the limits allow no more."""
        siblings = self._children[parent]
        if token in siblings:
            return siblings[token]
        depth = self._depths[parent] + 1
        if self.is_full or depth > self._limits.max_draft or len(siblings) >= self._limits.draft_top_k:
            return None
        node = siblings[token] = len(self._tokens)
        self._tokens.append(token)
        self._parents.append(parent)
        self._shares.append(share)
        self._depths.append(depth)
        self._children.append({})
        return node

    def add_path(self, tokens: Iterable[int]) -> None:
        """A path from the root, shared with what is there already, as far as the limits allow."""
        node = 0
        for token in tokens:
            child = self.add(node, token)
            if child is None:
                return
            node = child

    def build(self) -> ScoredTree:
        return ScoredTree(TokenTree(tuple(self._tokens), tuple(self._parents)), tuple(self._shares))


class GrowthNode(NamedTuple):
    """A node as its source sees it. The root has number 0; numbers go up in the order in which nodes came to be."""

    number: int
    parent: int  # its number; -1 for the root
    token: int
    depth: int
    log_prob: float  # of the path from the root, 0 or less


Guesses = Sequence[tuple[int, float]]  # tokens with their log-probabilities, likeliest first


class Source(Protocol):
    """Anything that scores next tokens: a draft network, a table, a test.

    It may rank by other things than its own probabilities, such as log q plus the acceptance noise, as long as the
    second entry is a log-probability of being accepted.
    """

    def expand(self, frontier: Sequence[GrowthNode], num_guesses: int) -> Sequence[Guesses]:
        """For each node of the frontier, ``num_guesses`` guesses at its child; fewer are fine. No node comes twice."""
        ...


class Growth(Protocol):
    """A tree in the making. Whoever drives many at once merges their frontiers into one call of a source."""

    num_guesses: int
    max_expanded: int  # nodes below the root that are expanded at most

    @property
    def frontier(self) -> Sequence[GrowthNode]:
        """What to expand next; empty when the tree is done."""
        ...

    def extend(self, guesses: Sequence[Guesses]) -> None:
        """Takes the guesses for the frontier, node by node, and moves it on."""
        ...

    def build(self) -> ScoredTree: ...


def grow(growth: Growth, source: Source) -> ScoredTree:
    """One forward of the source for each level of the tree."""
    while growth.frontier:
        growth.extend(source.expand(growth.frontier, growth.num_guesses))
    return growth.build()


def create_growth(root: int, limits: DraftLimits, options: DraftOptions) -> Growth:
    """As a network's options ask."""
    if options.growth == "static":
        return StaticGrowth(root, EAGLE_TREE, limits)
    return BestFirstGrowth(root, limits, threshold=options.threshold, decay=options.decay)


# EAGLE-1's tree of 25 nodes (Li et al., 2024, https://arxiv.org/abs/2401.15077), as its authors' code has it.
EAGLE_TREE = (
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)


class StaticGrowth:
    """EAGLE-1 and Medusa: a shape fixed beforehand, given as paths of ranks, such as ``[0], [1], [0, 0]``.

    ``[0, 2]`` is the third-best child of the best child of the root. Paths beyond the limits are left out. Of more than
    ``max_nodes`` those stay that would be the likeliest if a best child had probability 1/2, the second 1/8, and so on.

    Raises:
        BadSetting: a path whose parent is not among the paths.
    """

    def __init__(self, root: int, choices: Iterable[Sequence[int]], limits: DraftLimits) -> None:
        shape = sorted({tuple(path) for path in choices if path}, key=lambda path: (len(path), path))
        for path in shape:
            if len(path) > 1 and path[:-1] not in shape:
                raise BadSetting("choices", path, f"below a path that is there, and {path[:-1]} is not")
        fitting = [path for path in shape if len(path) <= limits.max_draft and max(path) < limits.draft_top_k]
        likeliest = sorted(fitting, key=lambda path: len(path) + 2 * sum(path))[: limits.max_nodes]
        self._ranks: dict[tuple[int, ...], list[int]] = {}  # of each path: the ranks of its children, ascending
        for path in sorted(likeliest):
            self._ranks.setdefault(path[:-1], []).append(path[-1])
        self.num_guesses = limits.draft_top_k
        self.max_expanded = max(0, len(self._ranks) - 1)
        self._nodes = [GrowthNode(0, -1, root, 0, 0.0)]
        self._paths: list[tuple[int, ...]] = [()]
        self.frontier = self._nodes[:] if self._ranks else []

    def extend(self, guesses: Sequence[Guesses]) -> None:
        first_new = len(self._nodes)
        for parent, row in zip(self.frontier, guesses, strict=True):
            distinct = _distinct(row)
            path = self._paths[parent.number]
            for rank in self._ranks[path]:
                if rank < len(distinct):
                    self._nodes.append(_child(parent, len(self._nodes), *distinct[rank]))
                    self._paths.append((*path, rank))
        self.frontier = [node for node in self._nodes[first_new:] if self._paths[node.number] in self._ranks]

    def build(self) -> ScoredTree:
        return _scored(self._nodes)


class BestFirstGrowth:
    """EAGLE-2 and EAGLE-3: expand the likeliest nodes level by level, then keep the likeliest of all.

    A node's score is the product of the probabilities along its path, as a sum of logarithms in float64. The
    ``draft_top_k`` best children of a level are expanded next, and at the end the ``max_nodes`` best of the pool are
    kept, ordered by (score falling, depth, number). Scores fall along a path and equals go to the shallower node, so
    that what is kept is closed under parents.

    Args:
        threshold: guesses whose paths are less likely than this are left out at once, with all below them.
        decay: factor on a node's score for each level, where nodes of different levels are compared; at most 1.
    """

    def __init__(self, root: int, limits: DraftLimits, *, threshold: float = 0.0, decay: float = 1.0) -> None:
        self.num_guesses = limits.draft_top_k
        self.max_expanded = 0 if limits.off else min(limits.draft_top_k, limits.max_nodes - 1) * (limits.max_draft - 1)
        self._limits = limits
        self._least = math.log(threshold) if threshold else -math.inf
        self._log_decay = math.log(decay)
        self._pool = [GrowthNode(0, -1, root, 0, 0.0)]  # by number
        self._best: list[GrowthNode] = []  # the max_nodes best of the pool, best first
        self.frontier = [] if limits.off else self._pool[:]

    def extend(self, guesses: Sequence[Guesses]) -> None:
        first_new = len(self._pool)
        for parent, row in zip(self.frontier, guesses, strict=True):
            for token, log_prob in _distinct(row)[: self._limits.draft_top_k]:
                child = _child(parent, len(self._pool), token, log_prob)
                if child.log_prob >= self._least:
                    self._pool.append(child)
        level = sorted(self._pool[first_new:], key=self._rank)
        self._best = sorted(self._best + level, key=self._rank)[: self._limits.max_nodes]
        self.frontier = self._next_frontier(level)

    def build(self) -> ScoredTree:
        return _scored([self._pool[0], *sorted(self._best, key=lambda node: node.number)])

    def _next_frontier(self, level: Sequence[GrowthNode]) -> list[GrowthNode]:
        if not level or level[0].depth == self._limits.max_draft:
            return []
        # A child ranks behind its parent for good. So a node that is not among the best max_nodes - 1 by now will have
        # no kept child, and expanding it would change nothing.
        hopeful = set(self._best[: self._limits.max_nodes - 1])
        return [node for node in level[: self._limits.draft_top_k] if node in hopeful]

    def _rank(self, node: GrowthNode) -> tuple[float, int, int]:
        return -(node.log_prob + node.depth * self._log_decay), node.depth, node.number


def _scored(nodes: Sequence[GrowthNode]) -> ScoredTree:
    """Of the root and nodes in order of their numbers."""
    place = {node.number: index for index, node in enumerate(nodes)}
    assert all(node.parent in place for node in nodes[1:]), "a node was kept without its parent"
    parents = [place[node.parent] for node in nodes[1:]]
    shares = [math.exp(node.log_prob - nodes[parent].log_prob) for node, parent in zip(nodes[1:], parents, strict=True)]
    return ScoredTree(TokenTree(tuple(node.token for node in nodes), (-1, *parents)), (1.0, *shares))


def _child(parent: GrowthNode, number: int, token: int, log_prob: float) -> GrowthNode:
    # A log-softmax can come out a rounding error above 0, and no child may score above its parent.
    return GrowthNode(number, parent.number, token, parent.depth + 1, parent.log_prob + min(log_prob, 0.0))


def _distinct(guesses: Guesses) -> list[tuple[int, float]]:
    """Without the impossible ones, and each token once, where it ranks highest."""
    seen: dict[int, float] = {}
    for token, log_prob in guesses:
        if log_prob > -math.inf:
            seen.setdefault(token, log_prob)
    return list(seen.items())
