"""The one rule of acceptance: verification is plain decoding read off a tree.

At each node that the walk reaches, the token is drawn exactly as plain decoding would draw it there, and the walk goes
on to the child that carries it. When no child does, that token is the bonus token and the walk ends.

Any tree is exact, however it was grown, ranked, pruned or united, even by somebody who knows the noise: the tokens
drawn along the walk depend on the committed text, the distribution and the noise, and the tree decides only how many of
them are read off one forward pass. The tree of one node gives one token: that is plain decoding.

Beside it stands one rule that is not exact, for comparison and for those who ask for it by its name: Medusa's typical
acceptance. Nothing of the above holds for it.

Knows neither noise nor pages, and distributions in the lossy rule alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verifier.sampling import Draw, Scores
from verifier.tree import TokenTree

EPSILON, DELTA = 0.09, 0.3  # Medusa's own; delta is the square root of epsilon


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


class Typical(NamedTuple):
    """A distribution, and how likely a token must be there to pass for typical."""

    log_probs: NDArray[np.float64]  # [vocab] in nats, -inf where impossible
    log_threshold: float

    @classmethod
    def of(cls, scores: Scores, epsilon: float = EPSILON, delta: float = DELTA) -> Typical:
        """min(epsilon, delta exp(-H)) with H the entropy: the less certain the model is, the less is asked.

        Args:
            scores: as processed, [vocab]; their softmax is the distribution.
        """
        log_probs = scores.astype(np.float64) - scores.max()
        log_probs -= np.log(np.exp(log_probs).sum())
        possible = log_probs[log_probs > -np.inf]
        entropy = -float((np.exp(possible) * possible).sum())
        return cls(log_probs, min(math.log(epsilon), math.log(delta) - entropy))


def walk_typically(tree: TokenTree, typical: Callable[[int], Typical], choose: Callable[[int], Draw]) -> Verdict:
    """LOSSY: typical acceptance (Cai et al., 2024, https://arxiv.org/abs/2401.10774). It changes what is said.

    A guess passes if its parent has passed and it is typical there, whatever would have been drawn. The deepest path of
    such guesses is kept, of equally deep ones the likeliest; the token that follows is then drawn as ever. So the text
    depends on the trees, and its distribution is not the model's. At temperature 0 there is nothing to relax: use
    `walk`.

    Args:
        typical: asked about nodes that have passed and have children.
        choose: asked about the last kept node alone.
    """
    passed = {0: 0.0}  # nodes, with the log-probability of the path to each
    at: dict[int, Typical] = {}
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        if parent not in passed:
            continue
        if parent not in at:
            at[parent] = typical(parent)
        log_prob = float(at[parent].log_probs[tree.tokens[node]])
        if log_prob > at[parent].log_threshold:
            passed[node] = passed[parent] + log_prob
    last = max(passed, key=lambda node: (tree.depths[node], passed[node], -node))
    nodes = tree.paths[last]
    bonus = choose(last)
    return Verdict(
        tokens=(*(tree.tokens[node] for node in nodes[1:]), bonus.token),
        nodes=nodes,
        margins=(*[math.inf] * (len(nodes) - 1), bonus.margin),
    )
