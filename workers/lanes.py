"""One lane or two: whether one half of the sequences should draft while the other is verified.

Prices say what each would make of a second; what two lanes really take shows only while there are two, since drafter
and verifier may stand in one another's way. So two are tried where prices speak for them, and given up when they do not
keep the promise; after each such failure it takes twice as many steps until they are tried again. Knows tokens a second
and steps. Knows no sequences and no clock.
"""

from __future__ import annotations

import math

ENTRY = 1.03  # times as many tokens a second are to be expected of two lanes before there are two
LEARNING_RATE = 0.2  # of the drag towards what was measured last, in logarithms
MAX_SURPRISE = 0.7  # one measurement counts as at most twice or half of what was expected
FIRST_REST, LONGEST_REST = 64, 8192  # steps in one lane after a failure


class LaneChoice:
    """
    Attributes:
        number: of lanes, at most ``most``.
    """

    def __init__(self, most: int) -> None:
        self.number = 1
        self._most = most
        self._drag = 1.0  # how many times longer two lanes take than prices say
        self._stay = 0  # steps since two were chosen
        self._rest = 0  # steps until two may be tried
        self._next_rest = FIRST_REST

    @property
    def open(self) -> bool:
        """Whether there is anything to choose."""
        return self._most > 1

    def weigh(self, one: float, two: float) -> None:
        """The tokens a second that prices promise of each, once a step."""
        if self.number == 1:
            self._rest -= 1
            if self._rest < 0 and two > ENTRY * one:
                self.number, self._drag, self._stay = 2, 1.0, 0
            return
        self._stay += 1
        if self._stay > self._next_rest:
            self._next_rest = FIRST_REST
        if two < one * self._drag:
            self.number = 1
            if two > one:  # by their prices they should have been faster
                self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)

    def observe(self, expected: float, seconds: float) -> None:
        """What prices said of a step in two lanes, and what it took."""
        surprise = math.log(max(seconds, 1e-9) / max(expected * self._drag, 1e-9))
        self._drag *= math.exp(LEARNING_RATE * min(MAX_SURPRISE, max(-MAX_SURPRISE, surprise)))
