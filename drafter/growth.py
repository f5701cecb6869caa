"""Growing trees within limits: path by path, by a static shape, or best first over a source of scores.

Knows tokens, log-probabilities and limits. Knows no network: hidden states stay with the source, which finds them by
the numbers of the nodes it is asked about.
"""

from __future__ import annotations

from collections.abc import Iterable

from drafter.base import DraftLimits
from verifier.tree import TokenTree


class TreeBuilder:
    """A tree that grows child by child and never beyond its limits."""

    def __init__(self, root: int, limits: DraftLimits) -> None:
        self._limits = limits
        self._tokens = [root]
        self._parents = [-1]
        self._depths = [0]
        self._children: list[dict[int, int]] = [{}]  # of each node: token -> child

    @property
    def is_full(self) -> bool:
        return len(self._tokens) > self._limits.max_nodes

    def add(self, parent: int, token: int) -> int | None:
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

    def build(self) -> TokenTree:
        return TokenTree(tuple(self._tokens), tuple(self._parents))
