"""A verifier's connection to one drafter at a time: finding it, greeting it, telling whether it lives, moving on.

Nothing here waits unless it is asked to, and nothing queues: what cannot be sent now is not sent. A drafter that does
not answer is left alone but for a greeting now and then; after a while another is looked for. Knows messages and
seconds. Knows no texts and no trees.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from workers.remote.channel import Channel, Finder
from workers.remote.messages import (
    Answer,
    Ask,
    BadMessage,
    Close,
    Hello,
    Refusal,
    Stranger,
    Terms,
    Welcome,
    decode_to_verifier,
    encode,
)
from workers.stats import RemoteFigures

logger = logging.getLogger(__name__)

CONNECT_S = 0.02  # between two looks at whether a connection stands
FIND_S = 0.25  # between two attempts to find a drafter
REFUSED_S = 10.0  # after one that does not fit
MOVE_AFTER_S = 3.0  # without a sign of life another drafter is looked for
CROWDED_S = 10.0  # of nothing but answers of one that has too much to do, and another one is looked for, too
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0  # between greetings, and after answers that were late; it doubles


class Pause:
    """Doubles from one failure to the next, up to a bound."""

    def __init__(self) -> None:
        self._next = FIRST_PAUSE_S

    def take(self) -> float:
        pause, self._next = self._next, min(2 * self._next, LONGEST_PAUSE_S)
        return pause

    def reset(self) -> None:
        self._next = FIRST_PAUSE_S


class Link:
    """
    Attributes:
        epoch: the life of the drafter that has welcomed us; "" before any has.
        max_positions: the longest text that it takes.
    """

    def __init__(self, finder: Finder, terms: Terms, clock: Callable[[], float], figures: RemoteFigures) -> None:
        self.epoch = ""
        self.max_positions = 0
        self.figures = figures
        self._finder, self._hello, self._clock = finder, encode(Hello(terms)), clock
        self._channel: Channel | None = None
        self._find_at = self._hello_at = self._ask_at = clock()
        self._silent_since: float | None = None  # nothing was heard since then, although something was due
        self._crowded_since: float | None = None
        self._hello_pause, self._late_pause = Pause(), Pause()

    @property
    def ready(self) -> bool:
        """Whether there is somebody to ask, who is likely to answer."""
        return self.epoch != "" and not self.in_trouble and self._clock() >= self._ask_at

    @property
    def in_trouble(self) -> bool:
        """Whether there is nobody, or nobody who answers."""
        return self._channel is None or self._silent_since is not None

    def tend(self) -> None:
        """Does what is due to have a drafter."""
        now = self._clock()
        if self._channel is None:
            if now < self._find_at:
                return
            self._find_at = now + FIND_S
            self._channel = self._finder.channel()
            if self._channel is None:
                return
            self._silent_since = self._hello_at = now
            self._hello_pause.reset()
        if self._silent_since is None:
            return
        if now - self._silent_since > MOVE_AFTER_S:
            self.drop("the drafter does not answer")
        elif now >= self._hello_at:
            self._hello_at = now + (self._hello_pause.take() if self._channel.send(self._hello) else CONNECT_S)

    def send(self, message: Ask | Close) -> bool:
        """False when it could not be sent at once."""
        frame = encode(message)
        if self._channel is None or not self._channel.send(frame):
            self._suspect()
            return False
        self.figures.bytes_sent += len(frame)
        return True

    def take(self, timeout_s: float) -> Answer | Welcome | None:
        """The next message; None when none came in time, or one that says nothing."""
        frame = self._channel.receive(timeout_s) if self._channel else None
        if frame is None:
            return None
        self.figures.bytes_received += len(frame)
        try:
            message = decode_to_verifier(frame)
        except BadMessage:
            self.figures.malformed += 1
            return None
        if isinstance(message, Answer):
            return message
        if isinstance(message, Welcome):
            self._welcomed(message)
            return message
        if isinstance(message, Refusal):
            self.drop(message.why)
            self._find_at = self._clock() + REFUSED_S
        else:
            assert isinstance(message, Stranger)
            self.epoch = ""
            self._suspect()
        return None

    def heard(self, in_time: bool, busy: bool) -> None:
        """An answer came."""
        self._silent_since = None
        if not busy:
            self._crowded_since = None
        elif self._crowded_since is None:
            self._crowded_since = self._clock()
        elif self._clock() - self._crowded_since > CROWDED_S:
            self.drop("the drafter has more to do than it can")  # perhaps there are more of them by now
            return
        if in_time:
            self._late_pause.reset()

    def missed(self) -> None:
        """No answer came in time: nothing is asked until one comes, and then only after a pause."""
        self._suspect()
        self._ask_at = self._clock() + self._late_pause.take()

    def drop(self, why: str) -> None:
        """Leaves this drafter, and looks for one."""
        if why != self.figures.reason:
            logger.warning("no remote drafting: %s", why)
        self.figures.connected, self.figures.reason = False, why
        if self._channel is not None:
            self._channel.close()
        self._channel, self._silent_since, self._crowded_since, self.epoch = None, None, None, ""

    def _welcomed(self, welcome: Welcome) -> None:
        self.epoch, self.max_positions = welcome.epoch, welcome.max_positions
        self._silent_since = None
        self._hello_pause.reset()
        if not self.figures.connected:
            logger.info("a remote drafter is there")
        self.figures.connected, self.figures.reason = True, ""
        self.figures.welcomes += 1

    def _suspect(self) -> None:
        if self._silent_since is None and self._channel is not None:
            self._silent_since = self._hello_at = self._clock()
            self._hello_pause.reset()
