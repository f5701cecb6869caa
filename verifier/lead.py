"""How rank 0 leads the other ranks of a verifier, and how these follow.

A follower waits for what rank 0 says, does it, and waits again; it decides nothing. Inside a step no rank waits for
another longer than a limit. Between steps a beat now and then shows each side that the other is still there, so that
nobody is given up for being idle. When a rank is lost, all are: their caches are of no use without its part.

Knows commands and collectives. Knows no models, and not where the other ranks run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from threading import Event, Lock, Thread
from typing import Protocol

import torch

from verifier.batch import Moves, PageCopies, StepPlan
from verifier.commands import Command, Signal, decode, encode
from verifier.errors import RankLost
from verifier.ranks import Ranks

STEP_S = 20.0  # a rank that is this late in a collective is lost
BEAT_S = 2.0  # between two beats while there are no steps
IDLE_S = 30.0  # without a word from rank 0 for this long, a follower goes
END_S = 3.0  # for a follower that was lost to leave its reason, and for one that was told to stop to do so

logger = logging.getLogger(__name__)


class Lead(Protocol):
    """Rank 0's hold on the others, as a verifier uses it."""

    def step(self, command: Command) -> AbstractContextManager[None]:
        """To be held while rank 0 does what ``command`` says, collectives included; the others do it meanwhile.

        Raises:
            RankLost: from here on, always.
        """
        ...

    def when_lost(self, tell: Callable[[str], None]) -> None:
        """Calls ``tell`` with the reason as soon as a rank is lost, on whichever thread finds it out."""
        ...

    def close(self) -> None:
        """Lets the others go."""
        ...


class Nobody:
    """No others: of a verifier that has one rank, and of a follower's."""

    def step(self, command: Command) -> AbstractContextManager[None]:
        return nullcontext()

    def when_lost(self, tell: Callable[[str], None]) -> None:
        return None

    def close(self) -> None:
        return None


NOBODY = Nobody()


class Followers(Protocol):
    """The processes of the other ranks, as rank 0 holds them. Thread-safe."""

    def fault(self, within_s: float) -> str | None:
        """Which of them have ended and why; None if none has and none does ``within_s`` seconds."""
        ...

    def stop(self, within_s: float) -> None:
        """Returns when all have ended: by themselves ``within_s`` seconds, or killed."""
        ...


class Leader:
    """See `Lead`. Returns from the constructor when all ranks have loaded; watches over them on a thread of its own.

    Attributes:
        lost: why nothing can be computed any more; None while all ranks are there.
    """

    def __init__(self, ranks: Ranks, followers: Followers, *, limit_s: float = STEP_S, beat_s: float = BEAT_S) -> None:
        self.lost: str | None = None
        self._ranks, self._followers, self._beat_s = ranks, followers, beat_s
        self._tell: Callable[[str], None] = lambda reason: None
        self._stepping = Lock()  # held by the step, or the beat, that has the collectives
        self._losing = Lock()
        self._has_stepped = False  # since the last look
        self._over = Event()
        _everybody_is_there(ranks)
        ranks.limit_s = limit_s
        self._thread = Thread(target=self._watch, name="draftree-ranks", daemon=True)
        self._thread.start()

    def when_lost(self, tell: Callable[[str], None]) -> None:
        with self._losing:
            self._tell = tell
            if self.lost:
                tell(self.lost)

    @contextmanager
    def step(self, command: Command) -> Iterator[None]:
        with self._stepping:
            if self.lost:
                raise RankLost(self.lost)
            self._has_stepped = True
            try:
                self._ranks.broadcast(encode(command))
                yield
            except BaseException as error:  # whatever it was, the others are left waiting in the middle of a step
                lost = self._lose(error)
                if isinstance(error, Exception):
                    raise lost from error
                raise

    def close(self) -> None:
        with self._stepping:
            if not self._over.is_set():
                self._over.set()
                self.lost = "the verifier was closed"
                with suppress(RankLost):
                    self._ranks.broadcast(encode(Signal.STOP))
        self._thread.join()
        self._followers.stop(END_S)

    def _watch(self) -> None:
        while not self._over.wait(self._beat_s):
            if fault := self._followers.fault(0):
                self._lose(RankLost(fault))
            elif self._has_stepped:
                self._has_stepped = False
            else:
                self._beat()

    def _beat(self) -> None:
        with self._stepping:
            if self._over.is_set():
                return
            try:
                self._ranks.broadcast(encode(Signal.BEAT))
                _everybody_is_there(self._ranks)
            except RankLost as error:
                self._lose(error)

    def _lose(self, error: BaseException) -> RankLost:
        """Gives all ranks up. The first reason stays: what follows from it says less."""
        with self._losing:
            if self.lost is None:
                reason = f"rank 0 failed in a step: {type(error).__name__}: {error}"
                if isinstance(error, RankLost):
                    reason = self._followers.fault(END_S) or str(error)
                logger.error("the verifier is lost: %s", reason)
                self.lost = reason
                self._over.set()
                self._followers.stop(0)
                self._tell(self.lost)
            return RankLost(self.lost)


class Executes(Protocol):
    """What a follower does, of a `verifier.verifier.Verifier`."""

    def forward(self, plan: StepPlan) -> object: ...

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None: ...

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None: ...


def follow(ranks: Ranks, verifier: Executes, *, limit_s: float = STEP_S, idle_s: float = IDLE_S) -> None:
    """A follower's whole life after loading: does what rank 0 does, until that says stop.

    Raises:
        RankLost: rank 0 or another rank is gone or silent.
    """
    _everybody_is_there(ranks)
    ranks.limit_s = limit_s
    while (command := decode(ranks.broadcast((), idle_s))) is not Signal.STOP:
        match command:
            case StepPlan():
                verifier.forward(command)
            case Moves(sources, targets):
                verifier.move(sources, targets)
            case PageCopies(pairs):
                verifier.copy_pages(pairs)
            case Signal.BEAT:
                _everybody_is_there(ranks)


def _everybody_is_there(ranks: Ranks) -> None:
    ranks.sum(torch.ones(1))
