"""One lane or two: whether one half of the sequences should draft while the other is verified.

Prices say what each would make of a second; what two lanes really take shows only while there are two, since drafter
and verifier may stand in one another's way. So two are tried where prices speak for them, and given up when they do not
keep the promise; after each such failure it takes twice as many steps until they are tried again. One step may be
faster in one lane and the next in two, as where a text copies itself for a while; it is their average that counts.
Knows tokens, seconds and steps. Knows no sequences and no clock.
"""

from __future__ import annotations

import math
from typing import NamedTuple

MARGIN = 1.03  # times as many tokens a second are to be expected of other lanes before they are chosen
LEARNING_RATE = 0.2  # of the drag towards what was measured last, in logarithms
MAX_SURPRISE = 0.7  # one measurement counts as at most twice or half of what was expected
FIRST_REST, LONGEST_REST = 64, 8192  # steps in one lane after a failure
MEMORY = 32  # steps that an average goes over


class Pace(NamedTuple):
    """Tokens that come in so many seconds."""

    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def towards(self, other: Pace, part: float) -> Pace:
        """What lies ``part`` of the way to the other one."""
        tokens, seconds = (own + part * (theirs - own) for own, theirs in zip(self, other, strict=True))
        return Pace(tokens, seconds)


class LaneChoice:
    """
    Attributes:
        number: of lanes, at most ``most``.
    """

    def __init__(self, most: int) -> None:
        self.number = 1
        self._most = most
        self._steps = 0  # weighed so far
        self._one = self._two = Pace(0.0, 0.0)  # on average
        self._drag = 1.0  # how many times longer two lanes take than prices say
        self._stay = 0  # steps since two were chosen
        self._rest = 0  # steps until two may be tried
        self._next_rest = FIRST_REST

    @property
    def open(self) -> bool:
        """Whether there is anything to choose."""
        return self._most > 1

    def weigh(self, one: Pace, two: Pace) -> None:
        """What prices promise of each for the step that is to come."""
        self._steps += 1
        part = max(1 / MEMORY, 1 / self._steps)
        self._one, self._two = self._one.towards(one, part), self._two.towards(two, part)
        gain = self._two.rate / self._one.rate
        if self.number == 1:
            self._rest -= 1
            if self._rest < 0 and gain > MARGIN:
                self.number, self._drag, self._stay = 2, 1.0, 0
            return
        self._stay += 1
        if self._stay > self._next_rest:
            self._next_rest = FIRST_REST
        if gain < self._drag / MARGIN:
            self.number = 1
            if gain > 1:  # by their prices they should have been faster
                self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)

    def start_over(self) -> None:
        """What was weighed so far was weighed by prices that are known to be wrong."""
        self._steps = 0

    def leave(self) -> None:
        """There is nobody for a second one."""
        self.number = 1

    def observe(self, expected: float, seconds: float) -> None:
        """What prices said of a step in two lanes, and what it took."""
        surprise = math.log(max(seconds, 1e-9) / max(expected * self._drag, 1e-9))
        self._drag *= math.exp(LEARNING_RATE * min(MAX_SURPRISE, max(-MAX_SURPRISE, surprise)))
