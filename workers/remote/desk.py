"""One network at work for remote verifiers: their questions about its texts, answered in as few passes as can be.

All questions of a round are answered by one `propose_all` of an ordinary drafter. Work that would come too late is not
begun, and trees are cut to the time that is left. Knows questions, texts and seconds. Knows no letters and no frames.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from drafter.base import DraftLimits, DraftRequest
from drafter.network_draft import NetworkDraft
from drafter.scored import ScoredTree
from verifier.sampling import SamplingParams
from workers.remote.messages import LONGEST_S, Answer, Ask, Part, Terms, Welcome
from workers.remote.texts import Key, Texts

logger = logging.getLogger(__name__)

LEARNING_RATE = 0.2  # of what a level of trees costs
DEEPEST = 64
SILENT_S = 30.0  # after so long without a question, a verifier's texts are forgotten; it may be no more
OFF = DraftLimits()


@dataclass(slots=True)
class Question:
    """One `Ask` of this round."""

    peer: str
    route: bytes
    arrived: float
    ask: Ask
    known: list[int] = field(default_factory=list)  # for each of its turns, tokens of the text that are here
    wanted: dict[int, DraftRequest] = field(default_factory=dict)  # by place among the turns
    busy: bool = False

    @property
    def keys(self) -> set[Key]:
        return {(self.peer, turn.sequence) for turn in self.ask.turns}


class Desk:
    """
    Args:
        drafter: round the network; nobody else may use it.
        terms: that verifiers must agree with.
        epoch: names this desk's life.

    Attributes:
        texts: that it drafts for.
        failures: drafts that raised.
        level_s: what one level of all trees of a round takes; 0 before the first.
        asked_at: when it was last asked, by the clock.
    """

    def __init__(
        self, drafter: NetworkDraft, terms: Terms, epoch: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.drafter, self.terms, self.epoch = drafter, terms, epoch
        self.texts = Texts(terms, self._num_read, drafter.close)
        self.failures = 0
        self.level_s = 0.0
        self.asked_at = clock()
        self._clock = clock
        self._welcomed: set[str] = set()
        self._heard: dict[str, float] = {}  # when verifiers that may have texts here last asked

    def welcome(self, peer: str) -> Welcome:
        """Of a verifier that agrees with the terms."""
        self._welcomed.add(peer)
        return Welcome(self.epoch, self.drafter.network.decoder.max_positions + bool(self.terms.width))

    def knows(self, peer: str) -> bool:
        return peer in self._welcomed

    def take(self, question: Question) -> None:
        """Notes what the texts have more; what trees are wanted, as deep as there is time for.

        Raises:
            BadMessage: a turn contradicts itself.
        """
        self.asked_at = self._heard[question.peer] = self._clock()
        levels = self._levels(question.ask.deadline_s - (self.asked_at - question.arrived))
        for place, turn in enumerate(question.ask.turns):
            text = self.texts.absorb(question.peer, turn)
            question.known.append(len(text.ids) if text else 0)
            if text is None or turn.wish is None or len(text.ids) != turn.end:
                continue
            limits = turn.wish.limits
            question.busy |= levels < limits.max_draft
            if levels:
                limits = replace(limits, max_draft=min(levels, limits.max_draft))
                question.wanted[place] = text.request(limits, turn.wish.sampling)
        if not levels:
            self.level_s *= 1 - LEARNING_RATE  # or a desk that was slow once would never find out that it no more is

    def forget_silent(self) -> None:
        """Verifiers that were lost do not say so. One that was only silent sends again what it still wants."""
        now = self._clock()
        for peer in [peer for peer, heard in self._heard.items() if now - heard > SILENT_S]:
            del self._heard[peer]
            self.texts.forget_peer(peer)

    def draft(self, questions: Sequence[Question]) -> Mapping[int, ScoredTree]:
        """Trees by the texts' numbers."""
        alive = self.texts.numbers
        requests = {
            request.sequence: request
            for question in questions
            for request in question.wanted.values()
            if request.sequence in alive
        }
        if not requests:
            return {}
        try:
            # First of all, since what takes long to read says nothing about what a level takes.
            ready = self.drafter.sessions.catch_up([(request, 0) for request in requests.values()])
            batch = [request for number, request in requests.items() if number in ready]
            began = self._clock()
            trees = self.drafter.propose_all(batch)
        except Exception:
            logger.exception("a draft failed")
            self.failures += 1
            self.texts.forget_numbers(requests)
            return {}
        if batch:
            measured = (self._clock() - began) / max(request.limits.max_draft for request in batch)
            self.level_s += (LEARNING_RATE if self.level_s else 1.0) * (measured - self.level_s)
        return trees

    def answer(self, question: Question, trees: Mapping[int, ScoredTree]) -> Answer:
        parts: list[Part] = []
        for place, (turn, known) in enumerate(zip(question.ask.turns, question.known, strict=True)):
            request = question.wanted.get(place)
            scored = trees.get(request.sequence) if request else None
            part = Part(turn.sequence, max(turn.end - 1, 0), known)
            if request and scored and len(request.ids) == turn.end and len(scored.tree) > 1:
                tree = scored.tree
                part = Part(
                    turn.sequence, turn.end - 1, known, list(tree.tokens), list(tree.parents), list(scored.shares)
                )
            parts.append(part)
        spent_s = min(self._clock() - question.arrived, LONGEST_S)
        return Answer(question.ask.number, self.epoch, parts, question.busy, spent_s)

    def catch_up(self, questions: Sequence[Question]) -> None:
        """Lets the network read on in the texts of this round, and forgets what it has read, and what is too much."""
        texts = self.texts.readable({key for question in questions for key in question.keys})
        behind = [
            text.request(OFF, SamplingParams())
            for text in texts
            if len(text.ids) > 1 and self.drafter.sessions.positions_left(text.ids) >= 0
        ]
        try:
            self.drafter.sessions.catch_up([(request, 0) for request in behind])
        except Exception:
            logger.exception("reading a text failed")
            self.failures += 1
            self.texts.forget_numbers(request.sequence for request in behind)
        self.texts.drop_read(texts)
        self.texts.bound()

    def _levels(self, left_s: float) -> int:
        """Of trees, that there is time for."""
        if left_s <= 0:
            return 0
        return int(left_s / self.level_s) if self.level_s else DEEPEST

    def _num_read(self, number: int) -> int:
        cached = self.drafter.sessions.by_sequence.get(number)
        return cached.lease.num_committed if cached else 0
