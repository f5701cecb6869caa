"""How often guesses were right, depth by depth: of one sequence, leaning on all of them while it is new.

Knows outcomes. Knows no prices and no trees.
"""

from __future__ import annotations

from collections.abc import Sequence

PRIOR_WEIGHT = 16.0  # observations that a new sequence is taken to have seen, of what all sequences see on average
MEMORY = 0.98  # of an observation's weight that is left after the next one: about fifty count
UNLIKELY = 0.001  # chance of a run of hits that is not put down to chance


class Hazards:
    """How often trees hold the next token at each depth, given that they held all before it.

    What is beyond the end of a run was not put to the test and teaches nothing. Bad guesses are seldom asked for, so a
    few that hit one after another do away with what was seen before; of good ones there are so many that misses add up.
    """

    def __init__(self, prior: Hazards | None = None) -> None:
        self._prior = prior
        self._hits: list[float] = []
        self._tries: list[float] = []
        self._streak: list[int] = []  # hits since the last miss

    def rates(self, depth: int) -> list[float]:
        """At depth 1, 2, … ``depth``. Before anything is known of one: what holds at the depth before."""
        priors = self._prior.rates(depth) if self._prior else None
        rates: list[float] = []
        for level in range(depth):
            rate, weight = (priors[level], PRIOR_WEIGHT) if priors else (rates[-1] if rates else 0.5, 1.0)
            if level < len(self._tries):
                rate = (self._hits[level] + weight * rate) / (self._tries[level] + weight)
            rates.append(rate)
        return rates

    def rate(self, depth: int) -> float:
        """At ``depth`` of 1 and more."""
        return self.rates(depth)[-1]

    def learn(self, outcomes: Sequence[bool | None]) -> None:
        """Whether the tree held the next token, depth by depth; None where that was not put to the test."""
        for depth, hit in enumerate(outcomes):
            if depth == len(self._tries):
                self._hits.append(0.0)
                self._tries.append(0.0)
                self._streak.append(0)
            if hit is not None:
                streak = self._streak[depth] = self._streak[depth] + 1 if hit else 0
                if streak > 1 and (rate := self.rate(depth + 1)) < 0.5 and rate**streak < UNLIKELY:
                    self._hits[depth] = self._tries[depth] = streak
                    continue
                self._hits[depth] = MEMORY * self._hits[depth] + hit
                self._tries[depth] = MEMORY * self._tries[depth] + 1
