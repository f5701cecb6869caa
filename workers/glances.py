"""Whom quick drafters are asked about, and what their guesses promise before anybody else has guessed.

What they say costs microseconds, but for each sequence; where passes are short and sequences many, that is too much for
guesses that hardly ever come. Knows trees, counts and seconds. Knows no drafters and no clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from drafter.scored import ScoredTree

KINDS = (0.3, 0.6, 0.85)  # chances of the first guess at which an outlook becomes one of another kind
LIKELY = KINDS[0]  # depths that are reached less often than this are not counted on
SLOWLY = 0.1  # of an expectation towards what came last
PROBE_SHARE = 0.01  # of the time may go into finding out whether glances have become worth theirs


@dataclass(frozen=True)
class Outlook:
    """What a quick tree promises.

    Attributes:
        reach: chances that the walk comes to depth 1, 2, …, as far as that is likely.
    """

    reach: tuple[float, ...] = ()

    @classmethod
    def of(cls, scored: ScoredTree) -> Outlook:
        by_depth = [0.0] * max(scored.tree.depths)
        for depth, survival in zip(scored.tree.depths[1:], scored.survival[1:], strict=True):
            by_depth[depth - 1] += survival
        return cls(tuple(min(1.0, chance) for chance in by_depth if chance >= LIKELY))

    @property
    def kind(self) -> int:
        """Outlooks of a kind leave about as much to others; 0 promises nothing."""
        return bisect_right(KINDS, self.reach[0]) if self.reach else 0

    @property
    def tokens(self) -> float:
        """To be expected of it alone."""
        return sum(self.reach)

    def tokens_with(self, rates: Iterable[float]) -> list[float]:
        """To be expected together with another's tree of depth 0, 1, …

        Args:
            rates: how often the two together hold the next token at depth 1, 2, …, given that they held all before it.
        """
        tokens, reached = [self.tokens], 1.0
        for depth, rate in enumerate(rates):
            own = self.reach[depth] if depth < len(self.reach) else 0.0
            reached = max(reached * rate, own)
            tokens.append(tokens[-1] + reached - own)
        return tokens


NOTHING = Outlook()


class Glances:
    """Decides whom to glance at: sequences for which that has been worth its time, and the others now and then."""

    def __init__(self) -> None:
        self._price = 0.0  # seconds for each sequence
        self._tokens: dict[int, float] = {}  # by sequence, to be expected of the next glance
        self._usual = 1.0  # of a sequence that is new
        self._unseen: dict[int, int] = {}  # by sequence, steps since the last glance

    def choose(self, sequences: Sequence[int], token_s: float) -> set[int]:
        """
        Args:
            token_s: what a token more is worth, in seconds; 0: not known.
        """
        for sequence in sequences:
            self._unseen[sequence] = self._unseen.get(sequence, 0) + 1
        rest = self._price / (PROBE_SHARE * token_s) if token_s else 0.0
        return {
            sequence
            for sequence in sequences
            if self._tokens.get(sequence, self._usual) * token_s >= self._price or self._unseen[sequence] > rest
        }

    def learn(self, sequence: int, tokens: float) -> None:
        """What a glance promised."""
        self._unseen[sequence] = 0
        self._usual += SLOWLY * (tokens - self._usual)
        known = self._tokens.get(sequence, self._usual)
        self._tokens[sequence] = known + SLOWLY * (tokens - known)

    def observe(self, count: int, seconds: float) -> None:
        """So many glances took so long."""
        if count:
            self._price += (SLOWLY if self._price else 1.0) * (seconds / count - self._price)

    def forget(self, sequence: int) -> None:
        self._tokens.pop(sequence, None)
        self._unseen.pop(sequence, None)
