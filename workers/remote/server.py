"""The drafter's side of remote drafting: what many verifiers ask, answered in as few passes as can be.

All questions that are there are answered by one `propose_all` of an ordinary drafter. Its sessions are those of the
verifiers' sequences; what is not in its cache yet lies in a buffer, and what it has forgotten the verifier is asked to
send again. Work that would come too late is not begun, and trees are cut to the time that is left. Knows messages,
texts and seconds. Knows no sockets and no Serve.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import torch
from torch import Tensor

from drafter.base import DraftLimits, DraftRequest
from drafter.network_draft import NetworkDraft
from drafter.scored import ScoredTree
from verifier.sampling import SamplingParams
from workers.remote.channel import Letter, Port
from workers.remote.messages import (
    LONGEST_S,
    Answer,
    Ask,
    BadMessage,
    Close,
    Hello,
    Part,
    Refusal,
    Stranger,
    Terms,
    ToVerifier,
    Turn,
    Welcome,
    decode_to_drafter,
    encode,
    text_check,
)

logger = logging.getLogger(__name__)

MAX_SESSIONS = 4096
MAX_BUFFERED_BYTES = 2**28  # of features that wait to be read by the network
IDLE_S = 0.5  # between two signs of life of a server without work
LEARNING_RATE = 0.2  # of what a level of trees costs
OFF = DraftLimits()

Reply = tuple[bytes, bytes]  # route, frame
Key = tuple[str, int]  # a verifier, and its number of a sequence


@dataclass(slots=True)
class _Session:
    """What is known of one sequence's text."""

    number: int  # the drafter's own for the sequence
    ids: list[int]
    rows: Tensor  # [n, width] fp32, features of positions from ``first`` on
    first: int = 0
    check: int = 0  # `text_check` of ``ids``

    def add(self, tokens: Sequence[int], rows: Tensor) -> None:
        self.ids += tokens
        self.check = text_check(tokens, self.check)
        self.rows = torch.cat((self.rows, rows)) if len(self.rows) else rows

    def read(self, first: int, end: int) -> Tensor:
        assert self.first <= first, "the network reads what it had read and lost"
        return self.rows[first - self.first : end - self.first]

    def drop_before(self, position: int) -> None:
        """What the network has read is not needed again."""
        if position > self.first:
            self.rows = self.rows[position - self.first :].clone()
            self.first = position

    def request(self, limits: DraftLimits, sampling: SamplingParams) -> DraftRequest:
        return DraftRequest(self.number, self.ids, limits, sampling, self.read)


@dataclass(slots=True)
class _Question:
    """One `Ask` of this round."""

    letter: Letter
    ask: Ask
    known: list[int] = field(default_factory=list)  # for each of its turns, tokens of the text that are here
    wanted: dict[int, DraftRequest] = field(default_factory=dict)  # by place among the turns
    busy: bool = False


class DraftServer:
    """Answers letters. Belongs to one thread.

    Args:
        drafter: round the network; nobody else may use it.
        terms: that verifiers must agree with.
        epoch: names this server's life.

    Attributes:
        failures: drafts that raised.
        malformed: letters that could not be read.
        asked, hurried: questions, and those of them that there was no time to answer in full.
        busy_s: what `run` has spent on letters, by the clock.
        beat: when `run` last was between two rounds, by the clock.
    """

    def __init__(
        self,
        drafter: NetworkDraft,
        terms: Terms,
        *,
        epoch: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.drafter, self.terms = drafter, terms
        self.epoch = epoch or uuid.uuid4().hex
        self.failures = self.malformed = self.asked = self.hurried = 0
        self.busy_s = 0.0
        self.beat = clock()
        self._clock = clock
        self._welcomed: set[str] = set()
        self._numbers = count()
        self._sessions: OrderedDict[Key, _Session] = OrderedDict()
        self._level_s = 0.0  # what one level of all trees of a round takes

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def run(self, port: Port, stop: threading.Event) -> None:
        """Answers until told to stop."""
        while not stop.is_set():
            self.beat = self._clock()
            letters = port.receive(IDLE_S)
            began = self._clock()
            for route, frame in self.handle(letters):
                port.send(route, frame)
            self.busy_s += self._clock() - began

    @torch.inference_mode()
    def handle(self, letters: Iterable[Letter]) -> Iterator[Reply]:
        """Replies, each as soon as it is ready. Texts that want no trees yet are read last, when nobody waits."""
        questions: list[_Question] = []
        for letter in letters:
            reply = self._open(letter, questions)
            if reply is not None:
                yield letter.route, encode(reply)
        trees = self._draft(questions)
        for question in questions:
            yield question.letter.route, encode(self._answer(question, trees))
        self._catch_up(questions)
        self._bound()

    def _open(self, letter: Letter, questions: list[_Question]) -> ToVerifier | None:
        """Reads a letter; an answer that can be given at once is returned."""
        try:
            message = decode_to_drafter(letter.frame)
            if isinstance(message, Hello):
                return self._greet(letter.peer, message)
            if isinstance(message, Close):
                for sequence in message.sequences:
                    self._forget((letter.peer, sequence))
                return None
            if letter.peer not in self._welcomed or message.epoch != self.epoch:
                return Stranger()
            questions.append(self._take(letter, message))
        except BadMessage as error:
            self.malformed += 1
            logger.warning("a verifier's message cannot be read: %s", error)
        return None

    def _greet(self, peer: str, hello: Hello) -> Welcome | Refusal:
        if why := hello.terms.difference(self.terms):
            logger.warning("a verifier was refused: %s", why)
            self._welcomed.discard(peer)
            return Refusal(why)
        self._welcomed.add(peer)
        decoder = self.drafter.network.decoder
        return Welcome(self.epoch, decoder.max_positions + bool(self.terms.width))

    def _take(self, letter: Letter, ask: Ask) -> _Question:
        """Notes what the texts have more; what trees are wanted, as deep as there is time for."""
        question = _Question(letter, ask)
        left = ask.deadline_s - (self._clock() - letter.arrived)
        levels = int(left / self._level_s) if self._level_s and left > 0 else 64 if left > 0 else 0
        for place, turn in enumerate(ask.turns):
            session = self._absorb(letter.peer, turn)
            question.known.append(len(session.ids) if session else 0)
            if session is None or turn.wish is None or len(session.ids) != turn.end:
                continue
            limits = turn.wish.limits
            question.busy |= levels < limits.max_draft
            if levels:
                limits = replace(limits, max_draft=min(levels, limits.max_draft))
                question.wanted[place] = session.request(limits, turn.wish.sampling)
        self.asked += 1
        self.hurried += question.busy
        if not levels:
            self._level_s *= 1 - LEARNING_RATE  # or a server that was slow once would never find out that it no more is
        return question

    def _absorb(self, peer: str, turn: Turn) -> _Session | None:
        """The session with what the turn adds to it; None if the turn does not begin where it ends, or before.

        Raises:
            BadMessage: the turn contradicts itself.
        """
        rows = self._check(turn)
        key = peer, turn.sequence
        session = self._sessions.get(key)
        if session and (self._has_lost(session) or not _agrees(session, turn)):
            self._forget(key)
            session = None
        if session is None and turn.start == 0:
            session = self._sessions[key] = _Session(next(self._numbers), [], torch.empty(0, self.terms.width))
        if session is None or turn.start > len(session.ids):
            return session
        self._sessions.move_to_end(key)
        have = len(session.ids)
        if turn.end > have:
            session.add(turn.tokens[have - turn.start :], rows[max(have - 1, 0) - turn.first_feature :])
        if len(session.ids) == turn.end and session.check != turn.check:
            self._forget(key)
            return None
        return session

    def _check(self, turn: Turn) -> Tensor:
        """The turn's features, ``[rows, width]``."""
        if any(token >= self.terms.vocab_size for token in turn.tokens):
            raise BadMessage(f"token ids must lie below {self.terms.vocab_size}")
        expected = max(0, turn.end - 1 - turn.first_feature) if self.terms.width else 0
        if turn.features.count != expected:
            raise BadMessage(f"{turn.features.count} rows of features came where {expected} belong")
        return turn.features.tensor(self.terms.width)

    def _has_lost(self, session: _Session) -> bool:
        """Whether the network's cache has forgotten rows that are in the buffer no more."""
        return self.terms.width > 0 and session.first > self._num_read(session)

    def _num_read(self, session: _Session) -> int:
        cached = self.drafter.sessions.by_sequence.get(session.number)
        return cached.lease.num_committed if cached else 0

    def _draft(self, questions: Sequence[_Question]) -> Mapping[int, ScoredTree]:
        """Trees by the sessions' numbers."""
        alive = {session.number for session in self._sessions.values()}
        requests = {
            request.sequence: request
            for question in questions
            for request in question.wanted.values()
            if request.sequence in alive
        }
        if not requests:
            return {}
        began = self._clock()
        try:
            trees = self.drafter.propose_all(list(requests.values()))
        except Exception:
            logger.exception("a draft failed")
            self.failures += 1
            self._forget_numbers(requests)
            return {}
        depth = max(request.limits.max_draft for request in requests.values())
        measured = (self._clock() - began) / depth
        self._level_s += (LEARNING_RATE if self._level_s else 1.0) * (measured - self._level_s)
        return trees

    def _answer(self, question: _Question, trees: Mapping[int, ScoredTree]) -> Answer:
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
        spent_s = min(self._clock() - question.letter.arrived, LONGEST_S)
        return Answer(question.ask.number, self.epoch, parts, question.busy, spent_s)

    def _catch_up(self, questions: Sequence[_Question]) -> None:
        """Lets the network read on in the texts of this round, and forgets what it has read."""
        keys = {(question.letter.peer, turn.sequence) for question in questions for turn in question.ask.turns}
        sessions = [session for key in keys if (session := self._sessions.get(key)) and not self._has_lost(session)]
        behind = [
            session.request(OFF, SamplingParams())
            for session in sessions
            if len(session.ids) > 1 and self.drafter.sessions.positions_left(session.ids) >= 0
        ]
        try:
            self.drafter.sessions.catch_up([(request, 0) for request in behind])
        except Exception:
            logger.exception("reading a text failed")
            self.failures += 1
            self._forget_numbers(request.sequence for request in behind)
        for session in sessions:
            session.drop_before(self._num_read(session))

    def _bound(self) -> None:
        """Forgets those used longest ago until the rest is no more than may be."""
        buffered = sum(session.rows.nbytes for session in self._sessions.values())
        while self._sessions and (len(self._sessions) > MAX_SESSIONS or buffered > MAX_BUFFERED_BYTES):
            key, session = next(iter(self._sessions.items()))
            buffered -= session.rows.nbytes
            self._forget(key)

    def _forget(self, key: Key) -> None:
        if session := self._sessions.pop(key, None):
            self.drafter.close(session.number)

    def _forget_numbers(self, numbers: Iterable[int]) -> None:
        gone = set(numbers)
        for key in [key for key, session in self._sessions.items() if session.number in gone]:
            self._forget(key)


def _agrees(session: _Session, turn: Turn) -> bool:
    """Whether the turn's tokens are the session's, where both have them."""
    there = session.ids[turn.start : turn.end]
    return there == turn.tokens[: len(there)]
