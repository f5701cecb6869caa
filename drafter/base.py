"""What every drafter offers the engine, and the drafter that never guesses.

A drafter may be slow, late, wrong or dead: that costs speed and nothing else. It never decides a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Protocol

from drafter.scored import ScoredTree
from verifier.sampling import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from verifier.features import Fusion

CATCH_UP_ROWS = 1024  # tokens that a drafter reads in one round; longer texts take several, without guesses meanwhile


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """How far a tree may grow. ``max_draft`` 0 is plain decoding."""

    max_draft: int = 0  # depth: the longest path below the root, in tokens
    draft_top_k: int = 1  # branching: children per node
    max_nodes: int = 0  # nodes besides the root

    @property
    def off(self) -> bool:
        return self.max_draft == 0 or self.draft_top_k == 0 or self.max_nodes == 0


# From positions a, b to the target's fused features [b - a, width] fp32 of positions a .. b-1.
FeatureReader = Callable[[int, int], "Tensor"]


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One sequence that may guess in this step."""

    sequence: int  # names the draft session; a session is only a cache and can be rebuilt from ``ids``
    ids: Sequence[int]  # prompt and output so far, the last one the root of the tree wanted. Not to be kept or changed
    limits: DraftLimits
    sampling: SamplingParams  # seed included, so that candidates may be ranked with the acceptance noise
    # For drafters with a fusion: of all ``ids`` but the last, to be read before ``start`` returns.
    features: FeatureReader | None = None


Ticket = int


class Drafter(Protocol):
    """``start`` asks, ``collect`` gets; between the two the engine may do other work.

    ``fusion`` says which hidden states of the target this drafter reads and how they are made one vector; None for
    drafters that only read text.
    """

    @property
    def fusion(self) -> Fusion | None: ...

    def start(self, batch: Sequence[DraftRequest]) -> Ticket:
        """A ticket that no other question has; several may be open at a time, a sequence is in one of them at most."""
        ...

    def collect(self, ticket: Ticket, deadline_s: float) -> Mapping[int, ScoredTree]:
        """Trees by sequence, whatever is ready within ``deadline_s`` seconds; sequences left out are decoded plainly.

        To be called once for each ticket.
        """
        ...

    def close(self, sequence: int) -> None:
        """The sequence ended; unknown sequences are fine."""
        ...


class InstantDraft(ABC):
    """The base of drafters that answer at once: they say how to `propose`, the rest is here."""

    fusion: Fusion | None = None

    def __init__(self) -> None:
        self._tickets = count()
        self._ready: dict[Ticket, Mapping[int, ScoredTree]] = {}

    @abstractmethod
    def propose(self, request: DraftRequest) -> ScoredTree:
        """A tree within the request's limits; the root alone when there is nothing to propose."""

    def propose_all(self, batch: Sequence[DraftRequest]) -> Mapping[int, ScoredTree]:
        """Trees by sequence; sequences may be left out."""
        return {request.sequence: self.propose(request) for request in batch}

    def start(self, batch: Sequence[DraftRequest]) -> Ticket:
        trees = self.propose_all([request for request in batch if not request.limits.off])
        ticket = next(self._tickets)
        self._ready[ticket] = {sequence: tree for sequence, tree in trees.items() if len(tree.tree) > 1}
        return ticket

    def collect(self, ticket: Ticket, deadline_s: float) -> Mapping[int, ScoredTree]:
        return self._ready.pop(ticket)

    def close(self, sequence: int) -> None:
        return None


class QuickDraft(InstantDraft):
    """The base of those that read text alone and answer in far less time than a forward pass takes.

    So they are asked first, and what they say tells whether to ask the others.
    """


class NoDraft(InstantDraft):
    """Never guesses: plain decoding."""

    def propose(self, request: DraftRequest) -> ScoredTree:
        return ScoredTree.root(request.ids[-1])
