"""Whom quick drafters are asked about, and what their guesses promise before anybody else has guessed.

What they say costs a fraction of a millisecond, but for each sequence; where passes are short and sequences many, that
is too much for guesses that hardly ever come or are never bought. Knows trees, counts and seconds. Knows no drafters
and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from drafter.scored import ScoredTree
from verifier.tree import TokenTree

LIKELY = 0.3  # depths that are reached less often than this are not counted as rows
SLOWLY = 0.1  # of an expectation towards what came last
SHARE = 0.01  # of the time may go into looks at sequences for which they have not been worth their time


@dataclass(frozen=True)
class Outlook:
    """What a quick tree promises.

    Attributes:
        reach: chances that the walk comes to depth 1, 2, …
    """

    reach: tuple[float, ...] = ()

    @classmethod
    def of(cls, scored: ScoredTree) -> Outlook:
        by_depth = [0.0] * max(scored.tree.depths)
        for depth, survival in zip(scored.tree.depths[1:], scored.survival[1:], strict=True):
            by_depth[depth - 1] += survival
        return cls(tuple(min(1.0, chance) for chance in by_depth))

    @property
    def rows(self) -> int:
        """That it will take, more or less."""
        return sum(chance >= LIKELY for chance in self.reach)

    @property
    def tokens(self) -> float:
        """To be expected of it alone."""
        return sum(self.reach)

    def tokens_with(self, rates: Iterable[float]) -> list[float]:
        """To be expected together with another's tree of depth 0, 1, …

        Args:
            rates: how often the other holds the next token at depth 1, 2, … where the quick tree does not.
        """
        tokens, reached = [self.tokens], 1.0
        for depth, rate in enumerate(rates):
            own = self.reach[depth] if depth < len(self.reach) else 0.0
            reached = own + (reached - own) * rate
            tokens.append(tokens[-1] + reached - own)
        return tokens


NOTHING = Outlook()


def bought(quick: TokenTree, chosen: ScoredTree) -> float:
    """Tokens to expect of those nodes of ``chosen`` that the quick tree has, too."""
    places = {0: 0}  # in the quick tree, by node
    for node, (token, parent) in enumerate(zip(chosen.tree.tokens, chosen.tree.parents, strict=True)):
        if parent in places and (place := quick.child(places[parent], token)) is not None:
            places[node] = place
    return sum(chosen.survival[node] for node in places if node)


class Glances:
    """Decides whom to glance at: sequences for which that has been worth its time, and now and then the others.

    What looks at the others take is saved for, step by step, as for probes (`workers.adaptive`).
    """

    def __init__(self) -> None:
        self._price = 0.0  # seconds for each sequence; 0: not known
        self._saved = 0.0  # seconds
        self._usual = 1.0  # tokens that a glance at a new sequence is expected to bring
        self._tokens: dict[int, float] = {}  # the same by sequence that was glanced at
        self._unseen: dict[int, int] = {}  # by sequence, steps since the last glance

    def choose(self, sequences: Sequence[int], token_s: float, step_s: float) -> set[int]:
        """
        Args:
            token_s: what a token more is worth, in seconds.
            step_s: that the step takes without guesses.
        """
        for sequence in sequences:
            self._unseen[sequence] = self._unseen.get(sequence, 0) + 1
        worth = {sequence for sequence in sequences if self._tokens.get(sequence, self._usual) * token_s >= self._price}
        others = sorted((each for each in sequences if each not in worth), key=lambda each: -self._unseen[each])
        if not others:
            return worth
        self._saved = min(self._saved + SHARE * step_s, self._price * len(others))
        affordable = int(self._saved / self._price)
        self._saved -= affordable * self._price
        return worth.union(others[:affordable])

    def observe(self, sequences: Sequence[int], seconds: float) -> None:
        """These were glanced at, and it took so long. Where a whole text was read first, that is no price."""
        if not sequences:
            return
        price, new = seconds / len(sequences), any(sequence not in self._tokens for sequence in sequences)
        if new and (not self._price or price > self._price):
            return
        if self._price:
            self._price += SLOWLY * (min(price, 2 * self._price) - self._price)  # a hiccup is no price either
        else:
            self._price = price

    def learn(self, sequence: int, tokens: float) -> None:
        """What a glance has brought: tokens to expect of those of its guesses that are verified."""
        self._unseen[sequence] = 0
        self._usual += SLOWLY * (tokens - self._usual)
        known = self._tokens.get(sequence, self._usual)
        self._tokens[sequence] = known + SLOWLY * (tokens - known)

    def forget(self, sequence: int) -> None:
        self._tokens.pop(sequence, None)
        self._unseen.pop(sequence, None)
