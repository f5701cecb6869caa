"""Drafting with an EAGLE-3 head in this process: sessions, their paged cache, trees grown best first.

    slot       0    1    2        c-1 │  c …
    feature   g_0  g_1  g_2  …  g_c-1 │  the parent's own output       slot i holds feature g_i beside token x_(i+1),
    token     x_1  x_2  x_3  …  x_c   │  guesses                       stands at position i and predicts x_(i+2)
               context                   expansion

The context is made of committed tokens and the target's features of them alone, so a session is a pure function of the
text and is rebuilt from it whenever the two do not fit. The expansion is dropped after each round. Knows its own pages;
those of the target it reads through the requests. Never decides a token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from drafter.base import DraftLimits, DraftRequest, InstantDraft
from drafter.checkpoints import HeadCheckpoint
from drafter.growth import BestFirstGrowth, Guesses
from drafter.head import Eagle3Head
from drafter.scored import ScoredTree
from verifier.attention import create_attention
from verifier.attention.layout import RowLayout
from verifier.batch import Segment
from verifier.features import Fusion
from verifier.pages import PageLease, PageTable
from verifier.pool import PagePool
from verifier.sampling import SamplingParams, gumbel_noise, process
from verifier.tree import TokenTree
from verifier.verifier import Verifier

CATCH_UP_ROWS = 1024  # context slots computed in one round; longer texts take several, without guesses meanwhile


@dataclass(slots=True)
class Session:
    """One sequence's context in the draft cache."""

    lease: PageLease
    ids: list[int]  # the text that its slots stand for: one token more than slots
    state: Tensor | None = None  # [width] of the last slot, before the final norm


class Eagle3Draft(InstantDraft):
    """Proposes the trees of a head, all sequences of a batch in one forward pass for each level.

    Args:
        num_pages, page_size: of the draft cache. When it is full, the session used longest ago is forgotten.
        noise_ranking: whether guesses at temperatures above 0 are ranked with the acceptance noise, so that where head
            and target agree on a distribution they agree on the draw.
    """

    def __init__(self, head: Eagle3Head, *, num_pages: int, page_size: int, noise_ranking: bool = False) -> None:
        super().__init__()
        decoder = head.config.decoder
        self.head = head
        self.fusion: Fusion | None = head.fusion
        self.pool = PagePool(
            num_pages,
            page_size,
            num_layers=decoder.num_layers,
            num_kv_heads=decoder.num_kv_heads,
            head_dim=decoder.head_dim,
        )
        self.pages = PageTable(num_pages, page_size, prefix_cache=False)
        self.sessions: OrderedDict[int, Session] = OrderedDict()
        self._noise_ranking = noise_ranking

    @classmethod
    @torch.inference_mode()
    def load(cls, checkpoint: HeadCheckpoint, verifier: Verifier, *, noise_ranking: bool = False) -> Eagle3Draft:
        """A drafter for ``verifier``, with as many pages as that has."""
        head = Eagle3Head(checkpoint, verifier.model, create_attention())
        pool = verifier.pool
        return cls(head, num_pages=pool.num_pages, page_size=pool.page_size, noise_ranking=noise_ranking)

    def propose(self, request: DraftRequest) -> ScoredTree:
        return self.propose_all([request]).get(request.sequence, ScoredTree.root(request.ids[-1]))

    @torch.inference_mode()
    def propose_all(self, batch: Sequence[DraftRequest]) -> Mapping[int, ScoredTree]:
        try:
            ready = self._catch_up(batch)
            return self._grow([_Draft(request, self.sessions[request.sequence], limits) for request, limits in ready])
        finally:
            for request in batch:
                if session := self.sessions.get(request.sequence):
                    self.pages.trim(session.lease)

    def close(self, sequence: int) -> None:
        if session := self.sessions.pop(sequence, None):
            self.pages.close(session.lease)

    # ── the context ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _catch_up(self, batch: Sequence[DraftRequest]) -> list[tuple[DraftRequest, DraftLimits]]:
        """Brings sessions up to their texts as far as `CATCH_UP_ROWS` go; returns what can be drafted now."""
        busy = {request.sequence for request in batch}
        room = CATCH_UP_ROWS
        ready: list[tuple[DraftRequest, DraftLimits]] = []
        behind: list[tuple[DraftRequest, Session, int]] = []
        for request in batch:
            limits = self._limits(request)
            session = self._session(request, limits)
            if session is None:
                continue
            missing = len(request.ids) - len(session.ids)
            num_rows = min(missing, room)
            expansion = limits.draft_top_k * (limits.max_draft - 1) if num_rows == missing else 0
            if not self._reserve(session, session.lease.num_committed + num_rows + expansion, busy):
                continue
            room -= num_rows
            if num_rows:
                behind.append((request, session, num_rows))
            if num_rows == missing:
                ready.append((request, limits))
        if behind:
            self._compute_context(behind)
        return ready

    def _compute_context(self, behind: Sequence[tuple[DraftRequest, Session, int]]) -> None:
        segments: list[Segment] = []
        features: list[Tensor] = []
        for request, session, num_rows in behind:
            start = session.lease.num_committed
            assert request.features is not None
            features.append(request.features(start, start + num_rows))
            tokens = TokenTree.chain(request.ids[start + 1 : start + 1 + num_rows])
            segments.append(Segment(start, tokens, tuple(session.lease.pages)))
        states = self.head.forward(RowLayout.of(segments, self.pool.page_size), torch.cat(features), self.pool)
        parts = states.split([len(segment.tree) for segment in segments])
        for (_, session, _), segment, part in zip(behind, segments, parts, strict=True):
            self.pages.commit(session.lease, segment.tree.tokens)
            session.ids += segment.tree.tokens
            session.state = part[-1].clone()  # not a view that keeps the whole batch alive

    def _session(self, request: DraftRequest, limits: DraftLimits) -> Session | None:
        """The session of the request's text; a new one if there is none, or one of another text. None: no guessing."""
        session = self.sessions.get(request.sequence)
        if session and list(request.ids[: len(session.ids)]) != session.ids:
            self.close(request.sequence)
            session = None
        if request.features is None or len(request.ids) < 2 or limits.off:
            return None
        if session is None:
            session = Session(self.pages.open(()), list(request.ids[:1]))
            self.sessions[request.sequence] = session
        self.sessions.move_to_end(request.sequence)
        return session

    def _limits(self, request: DraftRequest) -> DraftLimits:
        """The request's, cut to the head's positions: the deepest node expanded stands ``max_draft - 2`` after them."""
        room = self.head.config.decoder.max_positions - (len(request.ids) - 1)
        return replace(request.limits, max_draft=max(0, min(request.limits.max_draft, room + 1)) if room >= 0 else 0)

    def _reserve(self, session: Session, num_slots: int, busy: Set[int]) -> bool:
        """Makes the session's slots exist, at the cost of sessions that are not ``busy``; False when they cannot."""
        while not self.pages.can_grow(session.lease, num_slots):
            idle = next((sequence for sequence in self.sessions if sequence not in busy), None)
            if idle is None:
                return False
            self.close(idle)
        copies = self.pages.grow(session.lease, num_slots)
        assert not copies, "pages of the draft cache are never shared"
        return True

    # ── the expansion ────────────────────────────────────────────────────────────────────────────────────────────────

    def _grow(self, drafts: Sequence[_Draft]) -> dict[int, ScoredTree]:
        if drafts:
            self._extend(drafts, torch.stack([draft.states[0] for draft in drafts]))
        while growing := [draft for draft in drafts if draft.growth.frontier]:
            self._extend(growing, self._expand(growing))
        return {draft.request.sequence: draft.growth.build() for draft in drafts}

    def _expand(self, drafts: Sequence[_Draft]) -> Tensor:
        """States ``[rows, width]`` of all frontiers, one draft after the other."""
        rows: list[int] = []
        parents: list[Tensor] = []
        first = 0
        for draft in drafts:
            new = draft.add_frontier()
            rows += [first + place for place in new]
            parents += [draft.states[draft.parents[place]] for place in new]
            first += len(draft.tokens)
        layout = RowLayout.of([draft.segment for draft in drafts], self.pool.page_size).select(rows)
        states = self.head.forward(layout, self.head.feedback(torch.stack(parents)), self.pool)
        for draft, part in zip(drafts, _parts(states, drafts), strict=True):
            draft.states += part
        return states

    def _extend(self, drafts: Sequence[_Draft], states: Tensor) -> None:
        """Lets the drafts grow by what follows from their frontiers' ``states``."""
        logits = self.head.logits(states)
        for draft, part in zip(drafts, _parts(logits, drafts), strict=True):
            draft.growth.extend(self._guesses(draft, part))

    def _guesses(self, draft: _Draft, logits: Tensor) -> list[Guesses]:
        """The best target ids at each node of the draft's frontier, with their log-probabilities."""
        sampling = draft.request.sampling
        if self._noise_ranking and not sampling.is_greedy:
            nodes, num_ids = draft.growth.frontier, len(draft.request.ids)
            rows = [
                self._with_noise(row, sampling, num_ids + node.depth) for row, node in zip(logits, nodes, strict=True)
            ]
            logits = torch.stack(rows)
        values, draft_ids = logits.topk(min(draft.growth.num_guesses, logits.shape[1]))
        log_probs = values - logits.logsumexp(dim=-1, keepdim=True)
        ids = self.head.target_ids[draft_ids]
        return [list(zip(*row, strict=True)) for row in zip(ids.tolist(), log_probs.tolist(), strict=True)]

    def _with_noise(self, logits: Tensor, sampling: SamplingParams, position: int) -> Tensor:
        """log q plus the noise with which the target will draw the token at ``position``.

        Its greatest entry is the target's choice wherever the two agree, so it ranks; and its softmax, which is all but
        one where that choice is clear, passes for the probability of being accepted.
        """
        ids = self.head.target_ids.numpy()
        noise = gumbel_noise(sampling.seed, sampling.choice, position, 0, int(ids[-1]) + 1)[ids]
        return torch.from_numpy(process(logits.numpy().copy(), sampling) + noise.astype(np.float32))


class _Draft:
    """One sequence's tree in the making. Nodes that were expanded stand in the cache after the root, by place."""

    def __init__(self, request: DraftRequest, session: Session, limits: DraftLimits) -> None:
        self.request = request
        self.growth = BestFirstGrowth(request.ids[-1], limits)
        self.tokens = [request.ids[-1]]
        self.parents = [-1]  # places
        self._session = session
        self._places = {0: 0}  # by the growth's numbers
        assert session.state is not None
        self.states = [session.state]  # [width] each, by place; the root's is that of the context's last slot

    @property
    def segment(self) -> Segment:
        """The root in the context's last slot, and below it all that is expanded."""
        lease = self._session.lease
        return Segment(lease.num_committed - 1, TokenTree(tuple(self.tokens), tuple(self.parents)), tuple(lease.pages))

    def add_frontier(self) -> range:
        """Gives the growth's frontier the next places and returns them."""
        first = len(self.tokens)
        for node in self.growth.frontier:
            self._places[node.number] = len(self.tokens)
            self.tokens.append(node.token)
            self.parents.append(self._places[node.parent])
        return range(first, len(self.tokens))


def _parts(rows: Tensor, drafts: Sequence[_Draft]) -> Sequence[Tensor]:
    """``rows`` of all frontiers by draft."""
    return rows.split([len(draft.growth.frontier) for draft in drafts])  # type: ignore[no-any-return]
