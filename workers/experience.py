"""What is known about sequences: how guesses about them fare, what drafters have read of them, how long they last.

Quick drafters are those that are asked before it is decided about others, which take time (`workers.glances`). Knows
ids, trees and outcomes. Knows no prices and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from drafter.base import DraftRequest
from drafter.scored import ScoredTree
from verifier.tree import TokenTree
from workers.glances import NOTHING, SLOWLY, Outlook
from workers.hazards import Hazards

USUAL = 8  # tokens that a step leaves to be read: a part of every draft
LENGTH = 100.0  # tokens of an answer, before any has ended


@dataclass
class Known:
    """About one sequence."""

    hazards: Hazards  # of others than quick drafters, where these do not hold the next token
    quick: ScoredTree | None = None  # what quick drafters have said in this step
    outlook: Outlook = NOTHING  # of that
    asked: int = 0  # how deep others guess in this step
    prompt: int = 0  # tokens that were there when it began to decode
    length: int = 0  # tokens that are there now
    read: int = 0  # of these, how many others have seen
    reading: int = 0  # that they had to read when they were asked last, beyond the usual
    idle: int = 0  # steps since they were asked

    @property
    def unread(self) -> int:
        """Tokens, beyond those that are read before any draft."""
        return max(0, self.length - self.read - USUAL)

    def see(self, length: int) -> None:
        """A step has come in which it may draft."""
        self.prompt, self.length, self.idle = self.prompt or length, length, self.idle + 1

    def glance(self, quick: ScoredTree | None) -> None:
        """Quick drafters were asked."""
        self.quick, self.outlook = quick, Outlook.of(quick) if quick else NOTHING

    def look_away(self) -> None:
        """Quick drafters are not asked in this step, or not yet."""
        self.quick, self.outlook = None, NOTHING

    def expected(self, depth: int) -> list[float]:
        """Accepted tokens to expect if others guess to depth 0, 1, … ``depth``, beside the quick ones."""
        return self.outlook.tokens_with(self.hazards.rates(depth))

    def read_on(self, most: int) -> int:
        """Others are asked. Returns how many tokens they read first."""
        num_read = min(self.length - self.read, most)
        self.reading = max(0, num_read - USUAL)
        self.read, self.idle = self.read + num_read, 0
        return num_read


class Experience:
    """All that is known; about a sequence that is new, what holds for all of them."""

    def __init__(self) -> None:
        self._all = Hazards()
        self._known: dict[int, Known] = {}
        self._length = LENGTH  # tokens of an answer to expect
        self._ended = 0  # answers that this is known from

    def of(self, sequence: int) -> Known:
        if sequence not in self._known:
            self._known[sequence] = Known(Hazards(self._all))
        return self._known[sequence]

    def get(self, sequence: int) -> Known | None:
        """None for one that has ended, or never was."""
        return self._known.get(sequence)

    def learn(self, sequence: int, guessed: TokenTree, run: Sequence[int]) -> None:
        """What was guessed by all, and what was said: it tells about others where the quick guesses were wrong."""
        known = self.of(sequence)
        node, quick = 0, 0 if known.quick else None
        outcomes: list[bool | None] = []
        for _, token in zip(range(min(known.asked, max(guessed.depths))), run, strict=False):
            if known.quick and quick is not None:
                quick = known.quick.tree.child(quick, token)
            child = guessed.child(node, token)
            outcomes.append(child is not None if quick is None else None)
            if child is None:
                break
            node = child
        self._all.learn(outcomes)
        known.hazards.learn(outcomes)

    def unread(self, requests: Iterable[DraftRequest]) -> int:
        """Tokens that others had to read before they could guess about these, beyond the usual."""
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
        self._all = Hazards()
        self._known.clear()
