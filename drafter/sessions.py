"""Draft sessions: what a network has read of each sequence, in one paged cache.

    slot       0    1    2        c-1 │  c …
    feature   g_0  g_1  g_2  …  g_c-1 │  the parent's own output       a network with features: slot i holds g_i beside
    token     x_1  x_2  x_3  …  x_c   │  guesses                       token x_(i+1)
    token     x_0  x_1  x_2  …  x_c-1 │  guesses                       one without: token x_i alone
               context                   expansion

The context is made of committed tokens and the target's features of them alone, so a session is a pure function of the
text and is rebuilt from it whenever the two do not fit. The expansion is dropped after each round. Knows its own pages;
those of the target it reads through the requests. Knows no trees of guesses, only how many slots they may take.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.base import CATCH_UP_ROWS, DraftRequest
from drafter.network import DraftNetwork
from verifier.attention.layout import RowLayout
from verifier.batch import Segment
from verifier.pages import PageLease, PageTable
from verifier.pool import PagePool
from verifier.tree import TokenTree


@dataclass(slots=True)
class Session:
    """One sequence's context in the draft cache."""

    lease: PageLease
    ids: list[int]  # the text that its slots stand for; with features it has one token more than slots
    state: Tensor | None = None  # [width] of the last slot


@dataclass(frozen=True, slots=True)
class _Behind:
    """A session that lacks slots for its text, and how many it gets now."""

    request: DraftRequest
    session: Session
    num_rows: int


class Sessions:
    """The sessions of one network by sequence, the one used longest ago first.

    Args:
        num_pages, page_size: of the draft cache. When it is full, the session used longest ago is forgotten.
    """

    def __init__(self, network: DraftNetwork, num_pages: int, page_size: int) -> None:
        self.network = network
        self.pool = PagePool.of(network.decoder, num_pages, page_size, network.device)
        self.pages = PageTable(num_pages, page_size, prefix_cache=False)
        self.by_sequence: OrderedDict[int, Session] = OrderedDict()
        self._first_token = 1 if network.fusion else 0  # of the text, that has a slot

    def positions_left(self, ids: Sequence[int]) -> int:
        """Slots that can follow the context of ``ids``; below zero when the text itself is too long."""
        return self.network.decoder.max_positions - (len(ids) - self._first_token)

    def catch_up(self, wanted: Sequence[tuple[DraftRequest, int]]) -> set[int]:
        """Brings sessions up to their texts, as far as `CATCH_UP_ROWS` and the pages go.

        Args:
            wanted: requests, and how many slots the guesses of each may take after the context.

        Returns:
            The sequences that are there, with those slots.
        """
        busy = {request.sequence for request, _ in wanted}
        room = CATCH_UP_ROWS
        ready: set[int] = set()
        behind: list[_Behind] = []
        for request, num_slots in wanted:
            session = self._session(request)
            if session is None:
                continue
            missing = len(request.ids) - len(session.ids)
            num_rows = min(missing, room)
            expansion = num_slots if num_rows == missing else 0
            if not self._reserve(session, session.lease.num_committed + num_rows + expansion, busy):
                continue
            room -= num_rows
            if num_rows:
                behind.append(_Behind(request, session, num_rows))
            if num_rows == missing:
                ready.add(request.sequence)
        if behind:
            self._compute(behind)
        return ready

    def drop_expansions(self, sequences: Iterable[int]) -> None:
        for sequence in sequences:
            if session := self.by_sequence.get(sequence):
                self.pages.trim(session.lease)

    def close(self, sequence: int) -> None:
        """Forgets the sequence; unknown ones are fine."""
        if session := self.by_sequence.pop(sequence, None):
            self.pages.close(session.lease)

    def _compute(self, behind: Sequence[_Behind]) -> None:
        segments: list[Segment] = []
        features: list[Tensor] = []
        for each in behind:
            start = each.session.lease.num_committed
            first = len(each.session.ids)
            tokens = TokenTree.chain(each.request.ids[first : first + each.num_rows])
            segments.append(Segment(start, tokens, tuple(each.session.lease.pages)))
            if self.network.fusion:
                assert each.request.features is not None
                features.append(each.request.features(start, start + each.num_rows))
        layout = RowLayout.of(segments, self.pool.page_size, device=self.pool.device)
        read = torch.cat(features).to(self.pool.device) if features else None
        states = self.network.forward(layout, read, self.pool)
        parts = states.split([each.num_rows for each in behind])
        for each, segment, part in zip(behind, segments, parts, strict=True):
            self.pages.commit(each.session.lease, segment.tree.tokens)
            each.session.ids += segment.tree.tokens
            each.session.state = part[-1].clone()  # not a view that keeps the whole batch alive

    def _session(self, request: DraftRequest) -> Session | None:
        """The session of the request's text; a new one if there is none, or one of another text. None: no guessing."""
        session = self.by_sequence.get(request.sequence)
        if session and list(request.ids[: len(session.ids)]) != session.ids:
            self.close(request.sequence)
            session = None
        if len(request.ids) <= self._first_token or (self.network.fusion and request.features is None):
            return None
        if session is None:
            session = Session(self.pages.open(()), list(request.ids[: self._first_token]))
            self.by_sequence[request.sequence] = session
        self.by_sequence.move_to_end(request.sequence)
        return session

    def _reserve(self, session: Session, num_slots: int, busy: Set[int]) -> bool:
        """Makes the session's slots exist, at the cost of sessions that are not ``busy``; False when they cannot."""
        while not self.pages.can_grow(session.lease, num_slots):
            idle = next((sequence for sequence in self.by_sequence if sequence not in busy), None)
            if idle is None:
                return False
            self.close(idle)
        copies = self.pages.grow(session.lease, num_slots)
        assert not copies, "pages of the draft cache are never shared"
        return True
