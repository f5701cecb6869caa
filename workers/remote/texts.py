"""What a remote drafter knows of the texts that verifiers write, and what its network has not read of them yet.

A text is a cache: one that does not go on where it ended, contradicts its check or was forgotten by the network is
forgotten here as well, and the verifier is asked to send it again. Knows turns, positions and rows. Knows no time and
no trees.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from drafter.base import DraftLimits, DraftRequest
from verifier.sampling import SamplingParams
from workers.remote.messages import BadMessage, Terms, Turn, text_check

MAX_TEXTS = 4096
MAX_BUFFERED_BYTES = 2**28  # of features that wait to be read by the network

Key = tuple[str, int]  # a verifier, and its number of a sequence


@dataclass(slots=True)
class Text:
    """One sequence's, as far as it was sent."""

    number: int  # the drafter's own for the sequence
    ids: list[int]
    rows: Tensor  # [n, width] fp32, features of positions from ``first`` on
    first: int = 0
    check: int = 0  # `text_check` of ``ids``

    def add(self, tokens: Sequence[int], rows: Tensor) -> None:
        self.ids += tokens
        self.check = text_check(tokens, self.check)
        self.rows = torch.cat((self.rows, rows)) if len(self.rows) else rows

    def read(self, first: int, end: int) -> Tensor:
        assert self.first <= first, "the network reads what it had read and lost"
        return self.rows[first - self.first : end - self.first]

    def drop_before(self, position: int) -> None:
        """What the network has read is not needed again."""
        if position > self.first:
            self.rows = self.rows[position - self.first :].clone()
            self.first = position

    def request(self, limits: DraftLimits, sampling: SamplingParams) -> DraftRequest:
        return DraftRequest(self.number, self.ids, limits, sampling, self.read)

    def agrees(self, turn: Turn) -> bool:
        """Whether the turn's tokens are these, where both have them."""
        there = self.ids[turn.start : turn.end]
        return there == turn.tokens[: len(there)]


class Texts:
    """The texts that one network drafts for, the one used longest ago first.

    Args:
        num_read: positions that the network has read of a text and has not forgotten, by the text's number.
        close: tells the network that a text was forgotten, by its number.
    """

    def __init__(self, terms: Terms, num_read: Callable[[int], int], close: Callable[[int], None]) -> None:
        self._terms, self._num_read, self._close = terms, num_read, close
        self._numbers = count()
        self._by_key: OrderedDict[Key, Text] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def numbers(self) -> set[int]:
        return {text.number for text in self._by_key.values()}

    def absorb(self, peer: str, turn: Turn) -> Text | None:
        """The text with what the turn adds to it; None if the turn does not begin where it ends, or before.

        Raises:
            BadMessage: the turn contradicts itself.
        """
        rows = self._rows(turn)
        key = peer, turn.sequence
        text = self._by_key.get(key)
        if text and (self._has_lost(text) or not text.agrees(turn)):
            self.forget(key)
            text = None
        if text is None and turn.start == 0:
            text = self._by_key[key] = Text(next(self._numbers), [], torch.empty(0, self._terms.width))
        if text is None or turn.start > len(text.ids):
            return text
        self._by_key.move_to_end(key)
        have = len(text.ids)
        if turn.end > have:
            text.add(turn.tokens[have - turn.start :], rows[max(have - 1, 0) - turn.first_feature :])
        if len(text.ids) == turn.end and text.check != turn.check:
            self.forget(key)
            return None
        return text

    def readable(self, keys: Iterable[Key]) -> list[Text]:
        """Those that are here and can be read on in."""
        return [text for key in keys if (text := self._by_key.get(key)) and not self._has_lost(text)]

    def drop_read(self, texts: Iterable[Text]) -> None:
        """Forgets the rows that the network has read."""
        for text in texts:
            text.drop_before(self._num_read(text.number))

    def bound(self) -> None:
        """Forgets those used longest ago until the rest is no more than may be."""
        buffered = sum(text.rows.nbytes for text in self._by_key.values())
        while self._by_key and (len(self._by_key) > MAX_TEXTS or buffered > MAX_BUFFERED_BYTES):
            key, text = next(iter(self._by_key.items()))
            buffered -= text.rows.nbytes
            self.forget(key)

    def forget(self, key: Key) -> None:
        """Unknown ones are fine."""
        if text := self._by_key.pop(key, None):
            self._close(text.number)

    def forget_peer(self, peer: str) -> None:
        """All of a verifier's."""
        for key in [key for key in self._by_key if key[0] == peer]:
            self.forget(key)

    def forget_numbers(self, numbers: Iterable[int]) -> None:
        gone = set(numbers)
        for key in [key for key, text in self._by_key.items() if text.number in gone]:
            self.forget(key)

    def _rows(self, turn: Turn) -> Tensor:
        """The turn's features, ``[rows, width]``."""
        vocab_size, width = self._terms.vocab_size, self._terms.width
        if any(token >= vocab_size for token in turn.tokens):
            raise BadMessage(f"token ids must lie below {vocab_size}")
        expected = max(0, turn.end - 1 - turn.first_feature) if width else 0
        if turn.features.count != expected:
            raise BadMessage(f"{turn.features.count} rows of features came where {expected} belong")
        return turn.features.tensor(width)

    def _has_lost(self, text: Text) -> bool:
        """Whether the network's cache has forgotten rows that are in the buffer no more."""
        return self._terms.width > 0 and text.first > self._num_read(text.number)
