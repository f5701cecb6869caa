"""A drafter that cannot hurt: whatever it raises or returns costs its guesses and nothing else.

Knows what a usable tree looks like. Knows no pages and no sequences; and since any tree is exact, a stale one needs no
detecting beyond its root.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import count

from drafter.base import Drafter, DraftRequest, Ticket
from drafter.scored import ScoredTree
from verifier.tree import TokenTree

logger = logging.getLogger(__name__)


class DrafterGuard:
    """Offers what a `Drafter` offers, and never raises. Each kind of failure is logged when it is first seen.

    Attributes:
        failures: exceptions, and trees that could not be used.
    """

    def __init__(self, name: str, drafter: Drafter, vocab_size: int) -> None:
        self.name = name
        self.drafter = drafter
        self.vocab_size = vocab_size
        self.failures = 0
        self._tickets = count()  # the guard's own: those of a drafter may be anything
        self._asked: dict[Ticket, tuple[Ticket, dict[int, DraftRequest]]] = {}
        self._logged: set[str] = set()

    def start(self, batch: Sequence[DraftRequest]) -> Ticket | None:
        """None when the drafter failed to take the question."""
        try:
            ticket = self.drafter.start(batch)
        except Exception as error:
            self._failed("start", error)
            return None
        own = next(self._tickets)
        self._asked[own] = ticket, {request.sequence: request for request in batch}
        return own

    def collect(self, ticket: Ticket | None, deadline_s: float) -> dict[int, ScoredTree]:
        """The usable trees by sequence."""
        if ticket is None:
            return {}
        theirs, asked = self._asked.pop(ticket)
        try:
            answers = dict(self.drafter.collect(theirs, deadline_s))
        except Exception as error:
            self._failed("collect", error)
            return {}
        return {sequence: tree for sequence, tree in answers.items() if self._is_usable(tree, asked.get(sequence))}

    def close(self, sequence: int) -> None:
        try:
            self.drafter.close(sequence)
        except Exception as error:
            self._failed("close", error)

    def _is_usable(self, scored: ScoredTree, request: DraftRequest | None) -> bool:
        if isinstance(scored, ScoredTree):
            fault = find_fault(scored.tree, request, self.vocab_size)
        else:
            fault = f"no tree but a {type(scored).__name__}"
        if fault:
            self._failed("collect", ValueError(fault))
        return fault is None

    def _failed(self, call: str, error: Exception) -> None:
        self.failures += 1
        kind = f"{call}: {type(error).__name__}"
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning(
                "drafter %s failed in %s, further failures of this kind are only counted",
                self.name,
                call,
                exc_info=error,
            )


def find_fault(tree: TokenTree, request: DraftRequest | None, vocab_size: int) -> str | None:
    """Why a drafter's tree cannot be used, in words; None for one that can."""
    if request is None:
        return "a tree for a sequence that was not asked about"
    if tree.tokens[0] != request.ids[-1]:
        return f"the tree's root is {tree.tokens[0]}, but the last token is {request.ids[-1]}"
    if not all(isinstance(token, int) and 0 <= token < vocab_size for token in tree.tokens):
        return f"the tree has ids outside the vocabulary of {vocab_size}"
    if len(tree) - 1 > request.limits.max_nodes:
        return f"the tree has {len(tree) - 1} nodes below its root, {request.limits.max_nodes} were allowed"
    if max(tree.depths) > request.limits.max_draft:
        return f"the tree is {max(tree.depths)} deep, {request.limits.max_draft} were allowed"
    return None
