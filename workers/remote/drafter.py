"""The drafter that runs elsewhere, seen from the engine: one message out and one back, for each batch that is asked.

What the other end has read of a text is a cache: this end knows how far it was acknowledged and sends the rest, read
from the verifier's pages, however it comes that it is missing: a new sequence, a prefix hit, a message lost, a session
evicted, a drafter that died or moved or was not asked for a while. Whatever fails costs guesses. Knows texts,
positions and trees. Knows no sockets and no network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from drafter.base import CATCH_UP_ROWS, DraftRequest, Ticket
from drafter.scored import ScoredTree
from verifier.features import Fusion
from workers.remote.channel import Finder
from workers.remote.link import Link
from workers.remote.messages import (
    BYTES,
    Answer,
    Ask,
    BadMessage,
    Close,
    FeatureType,
    Part,
    Rows,
    Terms,
    Turn,
    Welcome,
    Wish,
    text_check,
)
from workers.stats import RemoteFigures

CATCH_UP_BYTES = 2**22  # of features in one message; longer texts take several, without guesses meanwhile
_CHECKED_TOKENS = 16


@dataclass(slots=True)
class _Session:
    """What was sent of a text, and how much of it is known to have arrived."""

    known: int = 0  # tokens that the drafter has
    asked: Ticket | None = None  # the question that it is part of
    sent: int = 0  # tokens sent so far
    check: int = 0  # `text_check` of these
    tail: tuple[int, ...] = ()  # the last of these

    def fits(self, ids: Sequence[int]) -> bool:
        """Whether ``ids`` go on where this text ended, as far as its end tells."""
        return tuple(ids[self.sent - len(self.tail) : self.sent]) == self.tail

    def send(self, ids: Sequence[int], end: int) -> int:
        """Notes that the text is sent up to ``end``; returns the check of it."""
        before = (self.sent, self.check) if end >= self.sent else (0, 0)
        self.check = text_check(ids[before[0] : end], before[1])
        self.sent, self.tail = end, tuple(ids[max(0, end - _CHECKED_TOKENS) : end])
        return self.check


@dataclass(slots=True)
class _Question:
    """One message out, and what came back."""

    asked_at: float
    wanted: dict[int, int] = field(default_factory=dict)  # by sequence, the position of the root of the tree wanted
    trees: dict[int, ScoredTree] | None = None  # None: no answer yet
    missed: bool = False  # nobody waits for the trees any more


class RemoteDraft:
    """A `drafter.base.Drafter` that asks one elsewhere. Never raises, and never waits longer than it may.

    Args:
        fusion: of the features that the network reads; its projection runs on this end.
        deadline_s: what drafters are told of the time they have.
        dtype: of features on their way.
        figures: where the account is kept.
    """

    def __init__(
        self,
        finder: Finder,
        terms: Terms,
        fusion: Fusion | None,
        *,
        deadline_s: float,
        dtype: FeatureType = "fp16",
        clock: Callable[[], float] = time.monotonic,
        figures: RemoteFigures | None = None,
    ) -> None:
        self.fusion = fusion
        self.figures = figures or RemoteFigures()
        self._link = Link(finder, terms, clock, self.figures)
        self._deadline_s, self._dtype, self._clock = deadline_s, dtype, clock
        self._rows_at_once = CATCH_UP_ROWS
        if fusion:
            self._rows_at_once = max(1, min(CATCH_UP_ROWS, CATCH_UP_BYTES // (fusion.width * BYTES[dtype])))
        self._tickets = count()
        self._epoch = ""  # in which the sessions are known
        self._sessions: dict[int, _Session] = {}
        self._collectable: dict[Ticket, _Question] = {}
        self._unanswered: dict[Ticket, _Question] = {}

    def start(self, batch: Sequence[DraftRequest]) -> Ticket:
        while (message := self._link.take(0.0)) is not None:
            self._hear(message)
        ticket = next(self._tickets)
        overdue = any(self._clock() - each.asked_at > self._deadline_s for each in self._unanswered.values())
        if overdue and not self._link.in_trouble:
            self._link.missed()
        self._link.tend()
        if self._link.ready:
            self._ask(ticket, [request for request in batch if not request.limits.off])
        return ticket

    def collect(self, ticket: Ticket, deadline_s: float) -> Mapping[int, ScoredTree]:
        question = self._collectable.pop(ticket, None)
        if question is None or not question.wanted:
            return {}
        ends = self._clock() + deadline_s
        while question.trees is None and (left := ends - self._clock()) > 0 and not self._link.in_trouble:
            if (message := self._link.take(left)) is not None:
                self._hear(message)
        if question.trees is None:
            question.missed = True
            self.figures.missed += 1
            self._link.missed()
            return {}
        return question.trees

    def close(self, sequence: int) -> None:
        session = self._sessions.pop(sequence, None)
        if session and session.sent and self._link.ready:
            self._link.send(Close([sequence]))

    def _ask(self, ticket: Ticket, batch: Sequence[DraftRequest]) -> None:
        question = _Question(self._clock())
        turns: list[Turn] = []
        room = self._rows_at_once
        free = [(self._session(request), request) for request in batch if self._takes(request)]
        # A long text to catch up with must not keep out those that have little to say.
        for session, request in sorted(free, key=lambda each: len(each[1].ids) - each[0].known):
            num_tokens = min(room, len(request.ids) - session.known)
            if num_tokens or session.known == len(request.ids):
                turns.append(self._turn(session, request, session.known + num_tokens))
                room -= num_tokens
                session.asked = ticket
                if turns[-1].wish:
                    question.wanted[request.sequence] = len(request.ids) - 1
        if turns and self._link.send(Ask(ticket, self._link.epoch, self._deadline_s, turns)):
            self._collectable[ticket] = self._unanswered[ticket] = question
            self.figures.asked += 1
            self.figures.rows_sent += sum(turn.features.count for turn in turns)

    def _takes(self, request: DraftRequest) -> bool:
        """Whether the drafter can do anything with it now: one question at a time for each sequence."""
        readable = request.features is not None or self.fusion is None
        fits = 1 < len(request.ids) <= self._link.max_positions
        return readable and fits and self._session(request).asked not in self._unanswered

    def _session(self, request: DraftRequest) -> _Session:
        session = self._sessions.get(request.sequence)
        if session is None or not session.fits(request.ids):
            session = self._sessions[request.sequence] = _Session()
        return session

    def _turn(self, session: _Session, request: DraftRequest, end: int) -> Turn:
        start, ids = session.known, request.ids
        rows = Rows()
        first, last = max(start - 1, 0), end - 1
        if request.features is not None and self.fusion and last > first:
            rows = Rows.of(request.features(first, last), self._dtype)
        wish = Wish.of(request.limits, request.sampling) if end == len(ids) else None
        return Turn(request.sequence, start, list(ids[start:end]), session.send(ids, end), rows, wish)

    def _hear(self, message: Answer | Welcome) -> None:
        if isinstance(message, Welcome):
            for overdue in self._unanswered.values():  # whatever has not been answered by now will not be
                overdue.trees = {}
            self._unanswered.clear()
            if message.epoch != self._epoch:
                self._sessions.clear()
            self._epoch = message.epoch
            return
        question = self._unanswered.pop(message.number, None) if message.epoch == self._epoch else None
        if question is None:
            self.figures.stale += 1
            return
        self._link.heard(not question.missed, message.busy)
        self.figures.answered += 1
        self.figures.busy += message.busy
        self.figures.late += question.missed
        self.figures.waited_s += self._clock() - question.asked_at
        self.figures.drafted_s += message.spent_s
        question.trees = {}
        for part in message.parts:
            self._hear_part(message.number, question, part)

    def _hear_part(self, number: int, question: _Question, part: Part) -> None:
        session = self._sessions.get(part.sequence)
        if session is None or session.asked != number:  # ended, or another text by now
            return
        session.known = min(part.known, session.sent)
        try:
            tree = part.tree
        except BadMessage:
            self.figures.malformed += 1
            return
        if tree and question.trees is not None and question.wanted.get(part.sequence) == part.base:
            question.trees[part.sequence] = tree
