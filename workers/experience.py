"""What is known about sequences: how guesses about them fare, what drafters have read of them, how long they last.

Knows ids, trees and outcomes. Knows no prices and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from drafter.base import DraftRequest
from verifier.tree import TokenTree
from workers.glances import KINDS, NOTHING, Outlook
from workers.hazards import Hazards

LENGTH = 100.0  # tokens of an answer, before any has ended
SLOWLY = 0.1  # of an expectation towards what came last


@dataclass
class Known:
    """About one sequence."""

    hazards: Sequence[Hazards]  # by kind of outlook
    outlook: Outlook = NOTHING  # of what quick drafters have said in this step
    asked: int = 0  # how deep others guess in this step
    prompt: int = 0  # tokens that were there when it began to decode
    length: int = 0  # tokens that are there now
    read: int = 0  # of these, how many its drafters have seen
    reading: int = 0  # of these, how many they saw when it drafted last
    idle: int = 0  # steps since it drafted

    @property
    def unread(self) -> int:
        return self.length - self.read

    def see(self, length: int) -> None:
        """A step has come in which it may draft."""
        self.prompt, self.length, self.idle = self.prompt or length, length, self.idle + 1

    def expected(self, depth: int) -> list[float]:
        """Accepted tokens to expect if other than quick drafters guess to depth 0, 1, … ``depth``."""
        rates = (self.hazards[self.outlook.kind].rate(level) for level in range(1, depth + 1))
        return self.outlook.tokens_with(rates)

    def read_on(self, most: int) -> int:
        """It drafts. Returns how many tokens its drafters read first."""
        self.reading = min(self.unread, most)
        self.read, self.idle = self.read + self.reading, 0
        return self.reading


class Experience:
    """All that is known; about a sequence that is new, what holds for all of them."""

    def __init__(self) -> None:
        self._all = _hazards()
        self._known: dict[int, Known] = {}
        self._length = LENGTH  # tokens of an answer to expect
        self._ended = 0  # answers that this is known from

    def of(self, sequence: int) -> Known:
        if sequence not in self._known:
            self._known[sequence] = Known([Hazards(prior) for prior in self._all])
        return self._known[sequence]

    def learn(self, sequence: int, guessed: TokenTree, run: Sequence[int]) -> None:
        """What was guessed, as far as others than quick drafters were asked, and what was said."""
        known = self.of(sequence)
        node = 0
        outcomes: list[bool] = []
        for _, token in zip(range(min(known.asked, max(guessed.depths))), run, strict=False):
            child = guessed.child(node, token)
            outcomes.append(child is not None)
            if child is None:
                break
            node = child
        for hazards in (self._all, known.hazards):
            hazards[known.outlook.kind].learn(outcomes)

    def unread(self, requests: Iterable[DraftRequest]) -> int:
        """Tokens that drafters had to read before they could guess about these."""
        return sum(self._known[request.sequence].reading for request in requests if request.sequence in self._known)

    def length_of(self, known: Known) -> float:
        """Of the answer, in tokens: as long as answers are on average, or goes on for as long as it has been."""
        return max(1.0, self._length, known.length - known.prompt)

    def forget(self, sequence: int) -> None:
        """It has ended."""
        if known := self._known.pop(sequence, None):
            self._ended += 1
            self._length += max(SLOWLY, 1 / self._ended) * (known.length - known.prompt - self._length)

    def start_over(self) -> None:
        """Others guess."""
        self._all = _hazards()
        self._known.clear()


def _hazards() -> list[Hazards]:
    """By kind of outlook. Of what quick drafters leave open others are taken to know half."""
    return [Hazards(first=(1 + sure) / 2) for sure in (0.0, *KINDS)]
