"""Where other threads leave requests, aborts and drafters, and the engine's thread finds them as a step begins.

The only thing in the engine that is locked. Knows which requests are live. Knows nothing of steps.
"""

from __future__ import annotations

from itertools import count
from threading import Condition

from drafter.base import DraftLimits
from drafter.united import UnitedDraft
from verifier.errors import BadRequest, DraftreeError
from workers.sequence import Listener, Request, TokenSequence


class EngineDead(DraftreeError):
    """The engine was stopped, or its verifier is broken."""


class Inbox:
    """Thread-safe.

    Attributes:
        closed: why nothing is taken in any more; None while it is.
    """

    def __init__(self) -> None:
        self.closed: str | None = None
        self._changed = Condition()
        self._numbers = count()
        self._arrivals: list[TokenSequence] = []
        self._aborts: list[TokenSequence] = []
        self._live: dict[str, TokenSequence] = {}
        self._drafter: UnitedDraft | None = None

    @property
    def arrivals(self) -> tuple[TokenSequence, ...]:
        """Those not yet taken."""
        return tuple(self._arrivals)

    @property
    def live(self) -> tuple[TokenSequence, ...]:
        """Those that have not ended."""
        return tuple(self._live.values())

    def submit(self, request: Request, listener: Listener, limits: DraftLimits, end: int) -> None:
        """Makes the sequence and numbers it in order of arrival.

        Raises:
            BadRequest: a live request has the same id.
            EngineDead: the inbox is closed.
        """
        with self._changed:
            if self.closed:
                raise EngineDead(self.closed)
            if request.id in self._live:
                raise BadRequest("id", request.id, "one that no live request has")
            sequence = TokenSequence(next(self._numbers), request, listener, limits, end)
            self._live[request.id] = sequence
            self._arrivals.append(sequence)
            self._changed.notify()

    def abort(self, request_id: str) -> None:
        with self._changed:
            if request_id in self._live:
                self._aborts.append(self._live[request_id])
                self._changed.notify()

    def exchange(self, drafter: UnitedDraft) -> None:
        """One that was left before and not taken yet is forgotten."""
        with self._changed:
            self._drafter = drafter
            self._changed.notify()

    def take_drafter(self) -> UnitedDraft | None:
        with self._changed:
            drafter, self._drafter = self._drafter, None
        return drafter

    def take(self) -> tuple[list[TokenSequence], list[TokenSequence]]:
        """New sequences in order of arrival, and those to be aborted; a sequence may be both."""
        with self._changed:
            arrivals, self._arrivals = self._arrivals, []
            aborts, self._aborts = self._aborts, []
        return arrivals, aborts

    def wait(self) -> None:
        """Sleeps until there is something to take, or the inbox is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrivals or self._aborts or self._drafter or self.closed)

    def forget(self, sequence: TokenSequence) -> None:
        """The sequence has ended, its request's id is free again."""
        with self._changed:
            del self._live[sequence.request.id]

    def close(self, reason: str) -> None:
        """Takes nothing in any more; the first reason stays."""
        with self._changed:
            self.closed = self.closed or reason
            self._changed.notify()
