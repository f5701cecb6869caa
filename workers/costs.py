"""What a step costs, in seconds, as measured on this machine at this load.

Three prices: of a forward pass by its rows and keys, of drafting by depth and batch, and of the text that has to be
read for it. Knows counts and seconds. Knows no trees, no tokens and no clock.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

LEARNING_RATE = 0.1  # of a price towards what was measured last, in logarithms
MOST_DOUBT = 0.4  # about a row count's price, in logarithms
WELL_KNOWN = 32  # passes with a row count, after which its price is not doubted
MEMORY = 300  # passes with others, after which a third of them still count
LEAST = 1e-9  # seconds; nothing is quite free, and clocks have ticks
UNCERTAIN = 0.1  # of what drafts took: they vary by so much, which tells nothing about what was read before
MOST_SLOWER = 0.2  # of a surprise, that is put down to the row count: much slows a pass down, nothing makes it quicker
MAX_SURPRISE = 0.7  # one measurement counts as at most twice or half the estimate: a hiccup is no price


class Work(NamedTuple):
    """What a forward pass has to do."""

    rows: int
    unscored: int = 0  # of these, prompt tokens that nothing is drawn after
    read: int = 0  # keys; a sequence's are read once for all of its rows
    pairs: int = 0  # of a row and a key that it attends to

    @classmethod
    def of_roots(cls, count: int, context: int) -> Work:
        """For as many sequences one row each, which attends to ``context`` keys."""
        return cls(count, 0, count * context, count * context)

    def with_roots(self, count: int, context: int) -> Work:
        more = count * context
        return Work(self.rows + count, self.unscored, self.read + more, self.pairs + more)

    def with_guesses(self, count: int, context: int) -> Work:
        """As many more rows, which attend to keys that are read anyway."""
        return Work(self.rows + count, self.unscored, self.read, self.pairs + count * context)


@dataclass(frozen=True)
class Prices:
    """What was measured, for others to look at; seconds."""

    verifying: Mapping[int, float]  # by padded rows, without keys
    drafting: Mapping[int, Mapping[int, float]]  # by batch, rounded up to a power of two, and depth

    def verifying_s(self, rows: int) -> float:
        """As `Costs.verifying`."""
        return _between(self.verifying, rows)


class Costs:
    """Estimates that follow the measurements.

    A forward pass is priced by the row count that it is padded to, which makes the price a staircase, less a price for
    each row that no token is drawn after, plus one for each key that is read and each pair of a row and a key. What all
    passes have become dearer by, say by a neighbour on the machine, is kept apart, so that counts which have not been
    seen for a while stay comparable.

    Args:
        pad: the row count that a pass over so many rows really has.
        max_rows: the most that it takes.
    """

    def __init__(self, pad: Callable[[int], int], max_rows: int) -> None:
        self._pad, self._max_rows = pad, max_rows
        self._by_rows: dict[int, float] = {}  # by padded rows, without keys, at load 1
        self._passes = 0
        self._seen: dict[int, tuple[float, int]] = {}  # by padded rows: passes that count, and when the last one was
        self._per_unscored = self._per_key = self._per_pair = 0.0
        self._load = 1.0
        self._drafting: dict[int, dict[int, float]] = {}  # by batch, rounded up to a power of two, and depth, at load 1
        self._drafting_load = 1.0
        self._per_unread = 0.0
        self._reading_is_guess = False

    def prices(self) -> Prices:
        """A copy."""
        verifying = {rows: seconds * self._load for rows, seconds in self._by_rows.items()}
        drafting = {
            batch: {depth: seconds * self._drafting_load for depth, seconds in by_depth.items()}
            for batch, by_depth in self._drafting.items()
        }
        return Prices(verifying, drafting)

    def padded(self, rows: int) -> int:
        return self._pad(min(rows, self._max_rows))

    def verifying(self, work: Work) -> float:
        """Of one pass; 0 before anything was measured.

        Between measured counts a straight line; beyond them the nearest, so that what is unknown looks worth a try.
        """
        return self._load * max(0.0, _between(self._by_rows, self.padded(work.rows)) + self._rest(work))

    def verifying_at_best(self, work: Work) -> float:
        """As little as it may take: what is known of row counts from few passes, or from long ago, may be wrong."""
        known = self._known_from(self.padded(work.rows)) / WELL_KNOWN
        return math.exp(-MOST_DOUBT * (1 - known)) * self.verifying(work)

    def _known_from(self, count: int) -> float:
        """How many passes over so many padded rows its price comes from, of which old ones count for less."""
        number, last = self._seen.get(count, (0.0, 0))
        return number * math.exp((last - self._passes) / MEMORY)

    def _rest(self, work: Work) -> float:
        """What the pass takes beside what its row count does, at load 1."""
        return work.read * self._per_key + work.pairs * self._per_pair - work.unscored * self._per_unscored

    def observe_verifying(self, work: Work, seconds: float) -> None:
        """A row count's price is the average of what passes took by the load of their time; the load follows at once.

        A count that was not seen yet is taken to be like its neighbours, as if that had been one pass.
        """
        count = self.padded(work.rows)
        known_from = self._known_from(count)
        if count not in self._by_rows:
            inside = min(self._by_rows, default=count) < count < max(self._by_rows, default=count)
            known_from = float(inside)
            without_rest = max(seconds / self._load - self._rest(work), seconds * 0.1, LEAST)
            self._by_rows[count] = _between(self._by_rows, count) if inside else without_rest
        self._passes += 1
        self._seen[count] = min(known_from + 1, WELL_KNOWN), self._passes
        surprise = _surprise(seconds, self.verifying(work))
        self._by_rows[count] *= math.exp(min(surprise, MOST_SLOWER) / (1 + known_from))
        self._load *= math.exp(LEARNING_RATE * surprise)

    def learn_unscored(self, rows: int, seconds: float) -> None:
        """From a pass without keys that one token is drawn after, and what is known about those with one each."""
        self._per_unscored = max(0.0, self.verifying(Work(rows)) - seconds) / self._load / max(1, rows - 1)

    def learn_keys(self, context: int, one_s: float, rows: int, all_s: float) -> None:
        """The prices of keys, from passes over one sequence, and what is known about those without a context.

        Args:
            context: keys that each row attends to.
            one_s, all_s: seconds with one row and with ``rows``.
        """
        of_one, of_all = one_s - self.verifying(Work(1)), all_s - self.verifying(Work(rows))
        self._per_pair = max(0.0, of_all - of_one) / self._load / context / max(1, rows - 1)
        self._per_key = max(0.0, of_one / self._load / context - self._per_pair)

    def drafting(self, depth: int, batch: int) -> float:
        """Of trees so deep for so many sequences; 0 before anything was measured.

        An unmeasured depth is taken to cost in proportion to a measured one, an unmeasured batch its part of a larger
        one, but no less than a smaller one: what is unknown looks worth a try. And no depth costs more than a deeper
        one, or than its levels in proportion to a shallower one: or else one that was slow by chance when it was first
        measured would never be measured again.
        """
        if not depth or not batch:
            return 0.0
        size = _power_of_two(batch)
        if size in self._drafting:
            return self._drafting_load * self._measured(depth, size)
        smaller = max((known for known in self._drafting if known <= size), default=size)
        larger = min((known for known in self._drafting if known >= size), default=size)
        return self._drafting_load * max(self._measured(depth, smaller), self._measured(depth, larger) * size / larger)

    def knows(self, batch: int) -> bool:
        """Whether drafts for about so many sequences were measured."""
        return _power_of_two(batch) in self._drafting

    def forget_drafting(self) -> None:
        """As if no draft had been measured, nor the reading before it."""
        self._drafting.clear()
        self._per_unread = 0.0

    def observe_drafting(self, depth: int, batch: int, seconds: float) -> None:
        """Here too, what all depths and batches have become dearer by is kept apart."""
        size = _power_of_two(batch)
        by_depth = self._drafting.setdefault(size, {})
        if depth not in by_depth:
            by_depth[depth] = max(seconds, LEAST) / self._drafting_load
            return
        change = math.exp(LEARNING_RATE * _surprise(seconds, self._drafting_load * self._measured(depth, size)))
        price = self._measured(depth, size) * change
        for known in by_depth:  # what was measured just now counts for more than a bound that others set
            by_depth[known] = max(by_depth[known], price / max(1.0, depth / known))
        by_depth[depth] = price
        self._drafting_load *= change

    def _measured(self, depth: int, size: int) -> float:
        by_depth = self._drafting.get(size)
        if not by_depth:
            return 0.0
        nearest = min(by_depth, key=lambda known: abs(known - depth))
        bounds = (price * max(1.0, depth / known) for known, price in by_depth.items())
        return min(by_depth[nearest] * depth / nearest, *bounds)

    def reading(self, tokens: float) -> float:
        """Of so much text that a drafter has not seen yet; 0 before it was measured."""
        return self._per_unread * tokens

    def observe_reading(self, depth: int, batch: int, tokens: int, seconds: float) -> None:
        """Of drafts before which so many tokens were read, and reading is what drafts alone do not take.

        What these take may not be known yet for so many sequences: then the price is a guess, which the next
        measurement replaces; but no hiccup makes it more than twice as high.
        """
        price = max(seconds - self.drafting(depth, batch), UNCERTAIN * seconds, LEAST) / tokens
        if self._per_unread and not self._reading_is_guess:
            self._per_unread *= math.exp(LEARNING_RATE * _surprise(price, self._per_unread))
            return
        self._per_unread = min(price, 2 * self._per_unread) if self._per_unread else price
        self._reading_is_guess = self._per_unread < price or not self.knows(batch)


def _surprise(seconds: float, estimate: float) -> float:
    ratio = math.log(max(seconds, LEAST) / max(estimate, LEAST))
    return min(MAX_SURPRISE, max(-MAX_SURPRISE, ratio))


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _between(known: Mapping[int, float], at: int) -> float:
    """Piecewise linear through the known points, and level outside of them."""
    if at in known:
        return known[at]
    counts = sorted(known)
    if not counts:
        return 0.0
    place = bisect_left(counts, at)
    if place == len(counts):
        return known[counts[-1]]
    if place == 0 or counts[place] == at:
        return known[counts[place]]
    low, high = counts[place - 1], counts[place]
    return known[low] + (known[high] - known[low]) * (at - low) / (high - low)
