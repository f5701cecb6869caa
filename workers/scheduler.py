"""Who takes part in the next step, with how many rows and pages.

Continuous batching over two queues, both in order of arrival. Decoding sequences get their row first, prompts share
what is left, guesses get what then remains. Pages are taken back from the latest arrival, which computes them again
later. Knows counts of rows and pages. Knows no logits, no models and no time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from drafter.base import DraftRequest, FeatureReader
from drafter.scored import ScoredTree
from verifier.acceptance import Verdict
from verifier.pages import PageLease, PageTable
from workers.sequence import TokenSequence
from workers.stats import Counters
from workers.step import PageCopies, Step, Turn

if TYPE_CHECKING:
    from torch import Tensor


class Features(Protocol):
    """What the scheduler needs of a `verifier.features.FeaturePool`."""

    def read(self, slots: Sequence[int]) -> Tensor: ...


Prompt = tuple[TokenSequence, PageLease, PageCopies]  # copies to be done before its first rows


def share_rows(wanted: Sequence[int], room: int) -> list[int]:
    """Rows for each prompt, oldest first: half of what is left to each in turn, what others do not want to the oldest.

    So the oldest runs at half speed at least, and a short prompt behind a long one need not wait for its end.
    """
    shares = []
    for i, rows in enumerate(wanted):
        is_last = i == len(wanted) - 1
        shares.append(min(rows, room if is_last else -(-room // 2)))
        room -= shares[-1]
    for i, rows in enumerate(wanted):
        more = min(rows - shares[i], room)
        shares[i] += more
        room -= more
    return shares


class Scheduler:
    """Two queues, and the pages that those in the first one hold.

    Attributes:
        running: sequences that hold pages. The oldest is never preempted, so there is always progress.
        waiting: sequences that hold none; those preempted are older than those never admitted, and stand before them.
        features: what drafters may read of the target, in the same slots as the KV.
    """

    def __init__(
        self,
        pages: PageTable,
        max_running: int,
        max_rows: int,
        counters: Counters,
        features: Features | None = None,
    ) -> None:
        self.pages = pages
        self.features = features
        self.max_running = max_running
        self.max_rows = max_rows
        self.running: list[TokenSequence] = []
        self.waiting: deque[TokenSequence] = deque()
        self.counters = counters
        self._featureless: set[PageLease] = set()  # computed, in part at least, before ``features`` were kept

    @property
    def num_decoding(self) -> int:
        return sum(sequence.num_pending == 1 for sequence in self.running)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def exchange_features(self, features: Features | None, namespace: bytes) -> None:
        """Other features are kept from now on, and no page has them yet.

        Sequences that run are not offered to drafters that read them, unless they are computed anew; and what is cached
        under the old namespace is found no more, or guesses would be wrong, or missing, for as long as it is.
        """
        self.features = features
        self.pages.change_namespace(namespace)
        self._featureless = {sequence.lease for sequence in self.running if sequence.lease}

    def add(self, sequence: TokenSequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: TokenSequence) -> None:
        """Forgets the sequence and gives its pages back; one that is in no queue is fine."""
        if sequence.lease is not None:
            self._give_back(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def schedule(self, lanes: int = 1, under_way: Iterable[Step] = ()) -> Step:
        """Fixes the rows of the next step, all but the guesses, and takes the pages that they write to.

        Whoever has a turn in a step that is under way takes part in no other, and is not admitted again before that is
        complete if it had to give its pages back meanwhile. Of those that decode, each lane gets its share, the oldest
        first; so whoever found no place is in the next step.
        """
        step = Step(self.max_rows, lanes)
        busy = {turn.sequence.number for other in under_way for turn in other.turns}
        free = [sequence for sequence in self.running if sequence.number not in busy]
        for sequence in [s for s in free if s.num_pending == 1][: -(-self.num_decoding // lanes)]:
            if lease := self._make_way_for(sequence):
                step.add(sequence, lease, 1, self.pages.grow(lease, lease.num_committed + 1))
        prompts: list[Prompt] = [(s, s.lease, ()) for s in free if s.lease and s.num_pending > 1]
        while len(prompts) < step.room.bit_length() and (admitted := self._admit(busy)):
            prompts.append(admitted)
        shares = share_rows([sequence.num_pending for sequence, _, _ in prompts], step.room)
        for (sequence, lease, page_copies), num_rows in zip(prompts, shares, strict=True):
            if num_rows:
                step.add(sequence, lease, num_rows, page_copies)
        return step

    def draft_requests(self, step: Step) -> list[DraftRequest]:
        """Those that may guess and how far: as deep as their text may still grow, in equal shares of the room."""
        guessers = [turn for turn in step.turns if turn.decodes and _draft_length(turn.sequence)][: step.room]
        requests = []
        for i, turn in enumerate(guessers):
            sequence = turn.sequence
            share = (step.room + i) // len(guessers)  # they differ by one at most and sum up to the room
            limits = replace(
                sequence.limits,
                max_draft=_draft_length(sequence),
                max_nodes=min(sequence.limits.max_nodes, share),
            )
            reader = self._reader(turn)
            requests.append(DraftRequest(sequence.number, sequence.ids, limits, sequence.request.sampling, reader))
        return requests

    def _reader(self, turn: Turn) -> FeatureReader | None:
        features = self.features
        if features is None or turn.lease in self._featureless:
            return None
        pages, size = turn.lease.pages, self.pages.page_size
        return lambda first, end: features.read([pages[p // size] * size + p % size for p in range(first, end)])

    def graft(self, step: Step, trees: Mapping[int, ScoredTree]) -> None:
        """Puts the trees on their roots, each cut to the pages that can be had without taking them from anybody."""
        for turn in step.turns:
            scored = trees.get(turn.sequence.number)
            if scored is None:
                continue
            size = len(scored.tree)
            while not self.pages.can_grow(turn.lease, turn.start + size):
                size -= 1
            self.pages.grow(turn.lease, turn.start + size)  # nothing to copy: the page of the root is its own already
            turn.tree = scored.best(size - 1).tree
            step.room -= size - 1

    def commit(self, turn: Turn, verdict: Verdict) -> tuple[int, ...]:
        """Writes the verdict's new tokens down, commits those whose KV is in place, and returns the run.

        The last drawn token's KV is not computed yet. What lies beyond the end of the text is dropped.
        """
        sequence = turn.sequence
        run = sequence.extend(verdict.tokens[turn.num_written :])
        self.pages.commit(turn.lease, sequence.ids[turn.start : turn.start + len(verdict.nodes)])
        if turn.decodes:
            self.pages.trim(turn.lease)
        return run

    def _make_way_for(self, sequence: TokenSequence) -> PageLease | None:
        """Preempts the latest arrivals until there is a page for the sequence's next token.

        Returns its lease; None when it was preempted itself, now or for an older one in this step.
        """
        while sequence.lease and not self.pages.can_grow(sequence.lease, len(sequence.ids)):
            latest = self.running[-1]
            self._give_back(latest)
            self.waiting.appendleft(latest)
            latest.preemptions += 1
            self.counters.preemptions += 1
        return sequence.lease

    def _admit(self, busy: Set[int]) -> Prompt | None:
        """Lets the first waiting sequence run, if the pages for all its pending tokens can be had without preemption.

        It takes them at once, so that no prompt stops half-way for want of pages.
        """
        if not self.waiting or len(self.running) == self.max_running:
            return None
        sequence = self.waiting[0]
        if sequence.number in busy:
            return None
        lease = self.pages.open(sequence.ids, sequence.request.salt)
        if not self.pages.can_grow(lease, len(sequence.ids)):
            self.pages.close(lease)
            return None
        if sequence.cached_tokens is None:
            sequence.cached_tokens = lease.num_cached
        self.counters.cached_tokens += lease.num_cached
        sequence.lease = lease
        self.running.append(self.waiting.popleft())
        return sequence, lease, self.pages.grow(lease, len(sequence.ids))

    def _give_back(self, sequence: TokenSequence) -> None:
        assert sequence.lease is not None, "a running sequence holds a lease"
        self._featureless.discard(sequence.lease)
        self.pages.close(sequence.lease)
        sequence.lease = None
        self.running.remove(sequence)


def _draft_length(sequence: TokenSequence) -> int:
    """The deepest guess that could still be followed by a bonus token within the sequence's limits."""
    return 0 if sequence.limits.off else min(sequence.limits.max_draft, sequence.remaining - 1)
