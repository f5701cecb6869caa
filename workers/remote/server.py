"""The drafter's side of remote drafting: letters in, replies out, a desk for each network that verifiers have.

There is one network, but for a while after it was exchanged: then verifiers that still have the last one, and so make
its features, are answered by that. Knows messages and who sent them. Knows no sockets, no trees and no Serve.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from itertools import count

import torch

from drafter.network_draft import NetworkDraft
from workers.remote.channel import Letter, Port
from workers.remote.desk import Desk, Question
from workers.remote.messages import (
    BadMessage,
    Close,
    Hello,
    Refusal,
    Stranger,
    Terms,
    ToVerifier,
    Welcome,
    decode_to_drafter,
    encode,
)

logger = logging.getLogger(__name__)

IDLE_S = 0.5  # between two signs of life of a server without work
RETIRE_S = 60.0  # after so long without a question, a network that was exchanged is let go

Reply = tuple[bytes, bytes]  # route, frame


class DraftServer:
    """Answers letters. Belongs to one thread, but for `take_up`; before the first of these, no verifier is welcome.

    Args:
        epoch: names this server's life.

    Attributes:
        malformed: letters that could not be read.
        asked, hurried: questions, and those of them that there was no time to answer in full.
        busy_s: what `run` has spent on letters, by the clock.
        beat: when `run` last was between two rounds, by the clock.
    """

    def __init__(self, epoch: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self.malformed = self.asked = self.hurried = 0
        self.busy_s = 0.0
        self.beat = clock()
        self._epoch = epoch or uuid.uuid4().hex
        self._clock = clock
        self._numbers = count()
        self._changing = threading.Lock()
        self._desks: list[Desk] = []  # replaced, never changed; the newest last
        self._past_failures = 0  # of desks that are no more

    @property
    def desk(self) -> Desk:
        """The newest network's."""
        return self._desks[-1]

    @property
    def num_sessions(self) -> int:
        return sum(len(desk.texts) for desk in self._desks)

    @property
    def failures(self) -> int:
        """Drafts that raised."""
        return self._past_failures + sum(desk.failures for desk in self._desks)

    def take_up(self, drafter: NetworkDraft, terms: Terms) -> None:
        """Another network, for verifiers that agree with ``terms``, from the next round on. From any thread.

        Args:
            drafter: round the network; nobody else may use it.
        """
        with self._changing:
            same = [desk for desk in self._desks if desk.terms == terms]  # it comes back before it was gone
            desk = same[0] if same else Desk(drafter, terms, f"{self._epoch}-{next(self._numbers)}", self._clock)
            self._desks = [*(each for each in self._desks if each is not desk), desk]

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
        desks = {desk.epoch: desk for desk in self._desks}
        questions: dict[str, list[Question]] = {}
        for letter in letters:
            reply = self._open(letter, desks, questions)
            if reply is not None:
                yield letter.route, encode(reply)
        for epoch, asked in questions.items():
            trees = desks[epoch].draft(asked)
            for question in asked:
                yield question.route, encode(desks[epoch].answer(question, trees))
        for epoch, asked in questions.items():
            desks[epoch].catch_up(asked)
        for desk in desks.values():
            desk.forget_silent()
        if len(desks) > 1:
            self._retire()

    def _open(self, letter: Letter, desks: dict[str, Desk], questions: dict[str, list[Question]]) -> ToVerifier | None:
        """Reads a letter; an answer that can be given at once is returned."""
        try:
            message = decode_to_drafter(letter.frame)
            if isinstance(message, Hello):
                return self._greet(letter.peer, message, desks)
            if isinstance(message, Close):
                for desk in desks.values():
                    for sequence in message.sequences:
                        desk.texts.forget((letter.peer, sequence))
                return None
            asked = desks.get(message.epoch)
            if asked is None or not asked.knows(letter.peer):
                return Stranger()
            question = Question(letter.peer, letter.route, letter.arrived, message)
            asked.take(question)
            self.asked += 1
            self.hurried += question.busy
            questions.setdefault(message.epoch, []).append(question)
        except BadMessage as error:
            self.malformed += 1
            logger.warning("a verifier's message cannot be read: %s", error)
        return None

    def _greet(self, peer: str, hello: Hello, desks: dict[str, Desk]) -> Welcome | Refusal:
        why = "The drafter has no draft network."
        for desk in desks.values():
            difference = hello.terms.difference(desk.terms)
            if difference is None:
                return desk.welcome(peer)
            why = difference  # the newest one's remains
        logger.warning("a verifier was refused: %s", why)
        return Refusal(why)

    def _retire(self) -> None:
        """Lets go of networks that nobody asks any more."""
        with self._changing:
            *old, newest = self._desks
            asked = [desk for desk in old if self._clock() - desk.asked_at < RETIRE_S]
            self._past_failures += sum(desk.failures for desk in old if desk not in asked)
            self._desks = [*asked, newest]
