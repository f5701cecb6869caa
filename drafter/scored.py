"""A tree of guesses with what is thought of them.

Knows tokens and probabilities. Knows nothing of where either came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from verifier.tree import TokenTree

UNKNOWN_SHARE = 0.5  # of guesses whose drafter has no opinion


@dataclass(frozen=True)
class ScoredTree:
    """``shares[i]`` is the estimated probability that a walk which has reached the parent of node i goes on to node i.

    The root's is 1. Estimates only: they decide what is checked and what is left out, never what is said.

    Raises:
        ValueError: not one share for each node, or one that is no probability.
    """

    tree: TokenTree
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.shares) != len(self.tree):
            raise ValueError(f"a tree of {len(self.tree)} nodes needs as many shares, got {len(self.shares)}")
        if not all(0 <= share <= 1 for share in self.shares):
            raise ValueError(f"shares lie between 0 and 1, got {min(self.shares)} to {max(self.shares)}")

    @classmethod
    def unscored(cls, tree: TokenTree) -> ScoredTree:
        return cls(tree, (1.0, *[UNKNOWN_SHARE] * (len(tree) - 1)))

    @classmethod
    def root(cls, token: int) -> ScoredTree:
        """No guesses."""
        return cls.unscored(TokenTree((token,), (-1,)))

    @cached_property
    def survival(self) -> tuple[float, ...]:
        """For each node the estimated probability that the walk comes that far: the product of shares on its path."""
        survival = [1.0]
        for parent, share in zip(self.tree.parents[1:], self.shares[1:], strict=True):
            survival.append(survival[parent] * share)
        return tuple(survival)

    @cached_property
    def ranking(self) -> tuple[int, ...]:
        """All nodes, the likeliest to be reached first. Any beginning of it is closed under parents."""
        depths = self.tree.depths
        return tuple(sorted(range(len(self.tree)), key=lambda node: (-self.survival[node], depths[node], node)))

    def best(self, num_guesses: int) -> ScoredTree:
        """The root and the ``num_guesses`` guesses likeliest to be reached, in their order here."""
        if num_guesses >= len(self.tree) - 1:
            return self
        return self._of(sorted(self.ranking[: num_guesses + 1]))

    def likeliest(self, num_guesses: int, branching: int) -> ScoredTree:
        """As `best`, but the likeliest comes first, and of siblings the ``branching`` likeliest stay at most."""
        kept = [0]
        num_children = {0: 0}  # of the nodes kept
        for node in self.ranking[1:]:
            parent = self.tree.parents[node]
            if num_children.get(parent, branching) < branching and len(kept) <= num_guesses:
                num_children[parent] += 1
                num_children[node] = 0
                kept.append(node)
        return self._of(kept)

    def _of(self, nodes: Sequence[int]) -> ScoredTree:
        """The tree of these nodes, every one after its parent."""
        place = {node: index for index, node in enumerate(nodes)}
        tree = TokenTree(
            tokens=tuple(self.tree.tokens[node] for node in nodes),
            parents=(-1, *(place[self.tree.parents[node]] for node in nodes[1:])),
        )
        return ScoredTree(tree, tuple(self.shares[node] for node in nodes))
