"""Drafters that are right or wrong on purpose, for tests and benchmarks.

They stand where a network would and force the case that is wanted: everything accepted, nothing accepted, or a known
share. All answer at once and respect the limits exactly.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import islice
from random import Random

from drafter.base import DraftLimits, DraftRequest, InstantDraft
from drafter.growth import TreeBuilder
from drafter.scored import ScoredTree
from verifier.tree import TokenTree

# From the ids so far to what plain decoding says next, in full or as much as is known.
Continuation = Callable[[Sequence[int]], Sequence[int]]


class ChainDraft(InstantDraft):
    """The base of those that propose one chain."""

    def propose(self, request: DraftRequest) -> ScoredTree:
        builder = TreeBuilder(request.ids[-1], request.limits)
        builder.add_path(islice(self.chain(request.ids), request.limits.max_draft))
        return builder.build()

    @abstractmethod
    def chain(self, ids: Sequence[int]) -> Sequence[int]: ...


class Oracle(ChainDraft):
    """Proposes the true continuation: everything is accepted."""

    def __init__(self, continuation: Continuation) -> None:
        super().__init__()
        self._continuation = continuation

    def chain(self, ids: Sequence[int]) -> Sequence[int]:
        return self._continuation(ids)


class Mixed(ChainDraft):
    """Each token is the true one with probability ``p``, and surely a wrong one otherwise.

    Which of the two depends on ``seed`` and the token's position alone, so that batches and retries see the same.
    """

    def __init__(self, continuation: Continuation, p: float, *, vocab_size: int, seed: int = 0) -> None:
        super().__init__()
        self._continuation = continuation
        self._p = p
        self._vocab_size = vocab_size
        self._seed = seed

    def chain(self, ids: Sequence[int]) -> Sequence[int]:
        return [
            token if Random(f"{self._seed} {position}").random() < self._p else (token + 1) % self._vocab_size
            for position, token in enumerate(self._continuation(ids), start=len(ids))
        ]


class Anti(Mixed):
    """Proposes a wrong token at every node: nothing is accepted. It must know the truth in order to miss it."""

    def __init__(self, continuation: Continuation, *, vocab_size: int) -> None:
        super().__init__(continuation, 0.0, vocab_size=vocab_size)


class FixedIds(ChainDraft):
    """Proposes the same ids whatever the text."""

    def __init__(self, ids: Sequence[int]) -> None:
        super().__init__()
        self._ids = tuple(ids)

    def chain(self, ids: Sequence[int]) -> Sequence[int]:
        return self._ids


class Bushy(InstantDraft):
    """Widens another drafter's trees with siblings of the tokens proposed, up to all the limits.

    A sibling carries the proposed token plus 1, 2, …: next to a right token and next to `Anti`'s it is wrong. Siblings
    get the child that the proposed token has, so that the right continuation also stands below wrong tokens. Nodes come
    level by level with the siblings on both sides, so that the nodes a walk keeps are no prefix of the tree.
    """

    def __init__(self, drafter: InstantDraft, *, vocab_size: int) -> None:
        super().__init__()
        self.fusion = drafter.fusion
        self._drafter = drafter
        self._vocab_size = vocab_size

    def propose(self, request: DraftRequest) -> ScoredTree:
        return ScoredTree.unscored(widen(self._drafter.propose(request).tree, request.limits, self._vocab_size))

    def close(self, sequence: int) -> None:
        self._drafter.close(sequence)


def widen(tree: TokenTree, limits: DraftLimits, vocab_size: int) -> TokenTree:
    """What `Bushy` makes of a tree that lies within the limits."""
    builder = TreeBuilder(tree.tokens[0], limits)
    for node in range(1, len(tree)):
        builder.add(tree.parents[node], tree.tokens[node])
    twins: list[tuple[int, int]] = []  # a node that was added, and the node of ``tree`` whose children it shall have
    for step in range(1, limits.draft_top_k):
        for node in range(1, len(tree)):
            sibling = builder.add(tree.parents[node], (tree.tokens[node] + step) % vocab_size)
            if sibling is not None:
                twins.append((sibling, node))
    for sibling, node in twins:  # grows while it is walked through
        for child in range(node + 1, len(tree)):
            if tree.parents[child] == node:
                twin = builder.add(sibling, tree.tokens[child])
                if twin is not None:
                    twins.append((twin, child))
    return _middle_first_nodes(builder.build().tree, len(tree))


def _middle_first_nodes(tree: TokenTree, num_first: int) -> TokenTree:
    """The same tree level by level, in each level the nodes below ``num_first`` between the others."""
    order: list[int] = []
    for depth in range(max(tree.depths) + 1):
        level = [node for node in range(len(tree)) if tree.depths[node] == depth]
        first = [node for node in level if node < num_first]
        others = [node for node in level if node >= num_first]
        half = (len(others) + 1) // 2
        order += others[:half] + first + others[half:]
    place = {node: index for index, node in enumerate(order)}
    return TokenTree(
        tokens=tuple(tree.tokens[node] for node in order),
        parents=(-1, *(place[tree.parents[node]] for node in order[1:])),
    )
