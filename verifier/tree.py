"""A tree of token guesses below the last committed token.

Knows tokens and parents, and derives everything else from them. Knows nothing of pages, probabilities or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class TokenTree:
    """Node 0 is the root, the last committed token; every other node comes after its parent.

    A tree of one node is plain decoding. A chain is a prompt chunk, or a draft without alternatives.

    Raises:
        ValueError: no nodes, lengths that differ, a parent that does not come before its child, or two siblings
            that carry the same token (the walk could not tell them apart).
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.parents):
            raise ValueError(f"a tree needs as many parents as tokens, got {len(self.parents)} and {len(self.tokens)}")
        if self.parents[0] != -1:
            raise ValueError(f"node 0 is the root and has parent -1, got {self.parents[0]}")
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(f"node {node} must come after its parent, got parent {parent}")
        if len(set(zip(self.parents, self.tokens, strict=True))) != len(self.tokens):
            raise ValueError("two siblings carry the same token")

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> TokenTree:
        """Each token is the child of the one before."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Steps below the root; a node's absolute position is the root's position plus its depth."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the nodes from the root down to itself: what it may attend to besides committed context."""
        paths: list[tuple[int, ...]] = [(0,)]
        for node, parent in enumerate(self.parents[1:], start=1):
            paths.append((*paths[parent], node))
        return tuple(paths)

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        return {
            (parent, token): node for node, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True))
        }

    def child(self, node: int, token: int) -> int | None:
        """The child of ``node`` that carries ``token``."""
        return self._children.get((node, token))
