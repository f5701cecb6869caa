"""Prompt lookup: what followed the last few tokens when they stood in the text before.

Knows ids alone, no model and no probabilities. In the literature: prompt lookup decoding, n-gram speculation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import cycle, islice

from drafter.base import DraftRequest, InstantDraft
from drafter.growth import TreeBuilder
from drafter.scored import ScoredTree
from verifier.errors import BadSetting

MAX_OCCURRENCES = 32  # looked at for one tree; bounds the time a step takes in repetitive text
MAX_INDEXED_TOKENS = 32_768  # of one sequence; when it is longer, the older half is forgotten
MAX_SEQUENCES = 1_024  # the one used longest ago is forgotten
_CHECKED_TOKENS = 16


class NgramDraft(InstantDraft):
    """Proposes what followed the longest suffix, of ``max_n`` down to ``min_n`` tokens, that occurred before.

    The most recent occurrence comes first and gives a chain; other continuations branch off as far as the limits allow.

    Raises:
        BadSetting: not 1 <= min_n <= max_n.
    """

    def __init__(self, min_n: int = 2, max_n: int = 4) -> None:
        super().__init__()
        if min_n < 1:
            raise BadSetting("min_n", min_n, "1 or more")
        if max_n < min_n:
            raise BadSetting("max_n", max_n, f"at least min_n, which is {min_n}")
        self._min_n = min_n
        self._max_n = max_n
        self._indexes: OrderedDict[int, _Index] = OrderedDict()

    def propose(self, request: DraftRequest) -> ScoredTree:
        index = self._index(request.sequence, request.ids)
        builder = TreeBuilder(request.ids[-1], request.limits)
        for end in islice(index.occurrences(), MAX_OCCURRENCES):
            builder.add_path(index.continuation(end, request.limits.max_draft))
            if builder.is_full:
                break
        return builder.build()

    def close(self, sequence: int) -> None:
        self._indexes.pop(sequence, None)

    def _index(self, sequence: int, ids: Sequence[int]) -> _Index:
        """The sequence's index, brought up to date with ``ids``: a matter of the new tokens alone."""
        index = self._indexes.get(sequence)
        if index is None or not index.is_start_of(ids):
            index = _Index(self._min_n, self._max_n)
        new_ids = ids[index.num_seen :]
        if len(index.ids) + len(new_ids) > MAX_INDEXED_TOKENS:
            start = max(0, len(ids) - MAX_INDEXED_TOKENS // 2)
            index = _Index(self._min_n, self._max_n, num_skipped=start)
            new_ids = ids[start:]
        index.extend(new_ids)
        self._indexes[sequence] = index
        self._indexes.move_to_end(sequence)
        if len(self._indexes) > MAX_SEQUENCES:
            self._indexes.popitem(last=False)
        return index


class _Index:
    """Where each n-gram of a sequence ended, the latest first: a dict to the last end, and from each end to the one
    before it.
    """

    def __init__(self, min_n: int, max_n: int, num_skipped: int = 0) -> None:
        self.ids: list[int] = []
        self._num_skipped = num_skipped  # tokens of the sequence before ``ids``
        self._last_end: dict[tuple[int, ...], int] = {}  # n-grams of all lengths; an end is a number of tokens
        self._previous_ends: dict[int, list[int]] = {n: [0] for n in range(min_n, max_n + 1)}  # by n, then by end

    @property
    def num_seen(self) -> int:
        return self._num_skipped + len(self.ids)

    def is_start_of(self, ids: Sequence[int]) -> bool:
        """Looks at the newest tokens only. A mistake makes bad guesses for a while, and nothing worse."""
        tail = self.ids[-_CHECKED_TOKENS:]
        return self.num_seen <= len(ids) and list(ids[self.num_seen - len(tail) : self.num_seen]) == tail

    def extend(self, new_ids: Sequence[int]) -> None:
        for token in new_ids:
            self.ids.append(token)
            end = len(self.ids)
            for n, previous_ends in self._previous_ends.items():
                previous = 0  # no n-gram ends there
                if n <= end:
                    ngram = tuple(self.ids[end - n :])
                    previous = self._last_end.get(ngram, 0)
                    self._last_end[ngram] = end
                previous_ends.append(previous)

    def occurrences(self) -> Iterator[int]:
        """Ends of the longest suffix that occurred before, where it did, the latest first."""
        for n in sorted(self._previous_ends, reverse=True):
            previous_ends = self._previous_ends[n]
            end = previous_ends[-1]
            if end:
                while end:
                    yield end
                    end = previous_ends[end]
                return

    def continuation(self, end: int, num_tokens: int) -> list[int]:
        """What follows ``end``. Where the text itself ends, what followed once is taken to follow again."""
        return list(islice(cycle(self.ids[end : end + num_tokens]), num_tokens))
