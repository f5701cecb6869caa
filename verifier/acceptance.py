"""The one rule of acceptance: verification is plain decoding read off a tree.

At each node that the walk reaches, the token is drawn exactly as plain decoding would draw it there, and the walk goes
on to the child that carries it. When no child does, that token is the bonus token and the walk ends.

Any tree is exact, however it was grown, ranked, pruned or united, even by somebody who knows the noise: the tokens
drawn along the walk depend on the committed text, the distribution and the noise, and the tree decides only how many of
them are read off one forward pass. The tree of one node gives one token: that is plain decoding.

Knows neither distributions nor noise nor pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from verifier.sampling import Draw
from verifier.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a step made of a tree; the three run in parallel, and each has at least one entry."""

    tokens: tuple[int, ...]  # the accepted tokens, then the bonus token
    nodes: tuple[int, ...]  # the kept nodes, root first; tokens[i] was drawn at nodes[i]
    margins: tuple[float, ...]  # of each draw

    @property
    def num_accepted(self) -> int:
        """Drafted tokens that were right; the bonus token is not one of them."""
        return len(self.tokens) - 1


def walk(tree: TokenTree, choose: Callable[[int], Draw]) -> Verdict:
    """Follows the tokens that ``choose`` draws at each node it is asked about: those on the walk and no others."""
    nodes: list[int] = []
    draws: list[Draw] = []
    node: int | None = 0
    while node is not None:
        nodes.append(node)
        draws.append(choose(node))
        node = tree.child(node, draws[-1].token)
    return Verdict(
        tokens=tuple(draw.token for draw in draws),
        nodes=tuple(nodes),
        margins=tuple(draw.margin for draw in draws),
    )
