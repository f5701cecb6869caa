"""From what a drafter thinks of its guesses to how often such guesses are accepted, learnt while texts are written.

Knows shares, outcomes, and kinds of guesses that are judged apart. Knows no trees and no texts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

KNOTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 1.0)
MEMORY = 100.0  # outcomes that count at a knot; older ones fade, since drafters and texts change
PRIOR = 2.0  # outcomes at each knot that the drafter's own estimate counts for
NUM_DEPTHS = 3  # depths that are judged apart; all from the last one on are judged together


class Curve:
    """A map from shares to shares that never falls: straight lines between `KNOTS`, at first the identity.

    An outcome counts at the two knots beside its share, at the nearer one for more. Where what they have seen would let
    the curve fall from one knot to the next, the two are taken together (isotonic regression).
    """

    def __init__(self) -> None:
        self.accepted = [0.0] * len(KNOTS)  # outcomes at each knot, as weights
        self.seen = [0.0] * len(KNOTS)
        self._values: Sequence[float] = KNOTS
        self._stale = False

    def __call__(self, share: float) -> float:
        if self._stale:
            self._values, self._stale = self._fit(), False
        right, part = _place(share)
        left_value = self._values[right - 1]
        return left_value + part * (self._values[right] - left_value)

    def observe(self, share: float, accepted: bool) -> None:
        right, part = _place(share)
        for knot, weight in ((right - 1, 1 - part), (right, part)):
            kept = 1 - weight / MEMORY
            self.accepted[knot] = self.accepted[knot] * kept + weight * accepted
            self.seen[knot] = self.seen[knot] * kept + weight
        self._stale = True

    def _fit(self) -> list[float]:
        """Values at the knots, by pooling adjacent violators."""
        pools: list[tuple[float, float, int]] = []  # their value, its weight, and the knots that share it
        for knot, accepted, seen in zip(KNOTS, self.accepted, self.seen, strict=True):
            weight, num_knots = seen + PRIOR, 1
            value = (accepted + PRIOR * knot) / weight
            while pools and pools[-1][0] > value:
                other, other_weight, other_knots = pools.pop()
                value = (value * weight + other * other_weight) / (weight + other_weight)
                weight, num_knots = weight + other_weight, num_knots + other_knots
            pools.append((value, weight, num_knots))
        return [value for value, _, num_knots in pools for _ in range(num_knots)]


def _place(share: float) -> tuple[int, float]:
    """The first knot above ``share``, and which part of the way to it from the knot before has been gone."""
    right = min(bisect_right(KNOTS, share), len(KNOTS) - 1)
    return right, (share - KNOTS[right - 1]) / (KNOTS[right] - KNOTS[right - 1])


class Kind(NamedTuple):
    """Guesses whose shares mean the same."""

    who: str  # the drafter, or drafters, that made them
    sampled: bool  # whether the target draws at a temperature above 0
    depth: int  # of the guess in its tree, from 1; see `NUM_DEPTHS`


class Calibration:
    """A curve for each kind of guesses."""

    def __init__(self) -> None:
        self._curves: dict[Kind, Curve] = {}

    def estimate(self, kind: Kind, share: float) -> float:
        """How likely a guess is to be accepted whose parent is, if its drafter gives it this share."""
        return self._curve(kind)(share)

    def observe(self, kind: Kind, share: float, accepted: bool) -> None:
        """What became of a guess whose parent was accepted; of others nobody knows what would have become of them."""
        self._curve(kind).observe(share, accepted)

    def numbers(self) -> list[dict[str, object]]:
        """All that was learnt, as plain numbers: for each kind what was accepted and seen at each of the `KNOTS`."""
        return [
            {**kind._asdict(), "accepted": list(curve.accepted), "seen": list(curve.seen)}
            for kind, curve in self._curves.items()
        ]

    def _curve(self, kind: Kind) -> Curve:
        if kind.depth > NUM_DEPTHS:
            kind = kind._replace(depth=NUM_DEPTHS)
        if kind not in self._curves:
            self._curves[kind] = Curve()
        return self._curves[kind]
