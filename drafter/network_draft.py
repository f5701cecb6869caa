"""The drafter round any draft network: catch up with the texts, then grow trees, level by level.

One forward pass of the network serves a level of all trees of a batch. Knows sessions and trees; the network's kind is
its own affair. Never decides a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from drafter.base import DraftLimits, DraftRequest, InstantDraft
from drafter.growth import Growth, GrowthNode, Guesses, create_growth
from drafter.network import DraftNetwork
from drafter.options import DraftOptions
from drafter.scored import ScoredTree
from drafter.sessions import Session, Sessions
from verifier.attention.layout import RowLayout
from verifier.features import Fusion
from verifier.sampling import SamplingParams, gumbel_noise, process

DEFAULTS = DraftOptions()


class NetworkDraft(InstantDraft):
    """Proposes a network's trees, all sequences of a batch in one forward pass for each level.

    Args:
        num_pages, page_size: of the draft cache.
        options: how trees grow, and whether guesses at temperatures above 0 are ranked with the acceptance noise, so
            that where network and target agree on a distribution they agree on the draw.
    """

    def __init__(
        self, network: DraftNetwork, *, num_pages: int, page_size: int, options: DraftOptions = DEFAULTS
    ) -> None:
        super().__init__()
        self.network = network
        self.fusion: Fusion | None = network.fusion
        self.sessions = Sessions(network, num_pages, page_size)
        self.options = options

    def propose(self, request: DraftRequest) -> ScoredTree:
        return self.propose_all([request]).get(request.sequence, ScoredTree.root(request.ids[-1]))

    @torch.inference_mode()
    def propose_all(self, batch: Sequence[DraftRequest]) -> Mapping[int, ScoredTree]:
        trees = [(request, create_growth(request.ids[-1], self._limits(request), self.options)) for request in batch]
        wanted = [(request, growth) for request, growth in trees if growth.frontier]
        try:
            ready = self.sessions.catch_up([(request, growth.max_expanded) for request, growth in wanted])
            return self._grow([self._draft(*each) for each in wanted if each[0].sequence in ready])
        finally:
            self.sessions.drop_expansions(request.sequence for request in batch)

    def close(self, sequence: int) -> None:
        self.sessions.close(sequence)

    def _limits(self, request: DraftRequest) -> DraftLimits:
        """The request's, cut to the network's positions: the deepest nodes are never expanded, so need no slots."""
        left = self.sessions.positions_left(request.ids)
        return replace(request.limits, max_draft=min(request.limits.max_draft, left + 1) if left >= 0 else 0)

    def _draft(self, request: DraftRequest, growth: Growth) -> _Draft:
        return _Draft(request, growth, self.sessions.by_sequence[request.sequence])

    def _grow(self, drafts: Sequence[_Draft]) -> dict[int, ScoredTree]:
        if drafts:
            self._extend(drafts, torch.stack([draft.states[0] for draft in drafts]))
        while growing := [draft for draft in drafts if draft.growth.frontier]:
            self._extend(growing, self._expand(growing))
        return {draft.request.sequence: draft.growth.build() for draft in drafts}

    def _expand(self, drafts: Sequence[_Draft]) -> Tensor:
        """States ``[rows, width]`` of all frontiers, one draft after the other."""
        nodes = [(draft, node) for draft in drafts for node in draft.growth.frontier]
        parents = torch.stack([draft.states[node.parent] for draft, node in nodes])
        states = self.network.forward(self._layout(drafts), self.network.feedback(parents), self.sessions.pool)
        for (draft, node), state in zip(nodes, states.unbind(), strict=True):
            draft.states[node.number] = state
        return states

    def _layout(self, drafts: Sequence[_Draft]) -> RowLayout:
        """The rows of all frontiers. A row's keys are the context and the slots of its path below it."""
        rows: list[tuple[int, int, int]] = []  # token, position, slot
        offsets: list[tuple[int, int, int]] = []  # start, and where pages and path begin
        pages: list[int] = []
        paths: list[int] = []
        table, page_size, device = self.sessions.pages, self.sessions.pool.page_size, self.sessions.pool.device
        for draft in drafts:
            lease = draft.session.lease
            start = lease.num_committed
            for node in draft.growth.frontier:
                path = draft.add(node, table.slot(lease, start + draft.num_expanded))
                rows.append((node.token, start + node.depth - 1, path[-1]))
                offsets.append((start, len(pages), len(paths)))
                paths += path
            pages += lease.pages[: -(-start // page_size)]
        token_ids, positions, slots = torch.tensor(rows, device=device).T.contiguous()
        starts, page_offsets, path_offsets = torch.tensor(offsets, dtype=torch.int32, device=device).T.contiguous()
        return RowLayout(
            page_size=page_size,
            longest=max(position for _, position, _ in rows) + 1,
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            starts=starts,
            page_offsets=page_offsets,
            path_offsets=path_offsets,
            pages=torch.tensor(pages, dtype=torch.int32, device=device),
            paths=torch.tensor(paths, dtype=torch.int32, device=device),
        )

    def _extend(self, drafts: Sequence[_Draft], states: Tensor) -> None:
        """Lets the drafts grow by what follows from their frontiers' ``states``."""
        logits = self.network.logits(states)
        if self.options.noise_ranking and not all(draft.request.sampling.is_greedy for draft in drafts):
            logits = self._with_noise(drafts, logits)
        num_guesses = max(draft.growth.num_guesses for draft in drafts)
        guesses = iter(best_guesses(logits, self.network.target_ids, num_guesses))
        for draft in drafts:
            draft.growth.extend([next(guesses) for _ in draft.growth.frontier])

    def _with_noise(self, drafts: Sequence[_Draft], logits: Tensor) -> Tensor:
        ids = self.network.target_ids.numpy()
        rows = logits.split([len(draft.growth.frontier) for draft in drafts])
        noisy: list[Tensor] = []
        for draft, own in zip(drafts, rows, strict=True):
            # A frontier is a level of the tree, so the noise of one position is that of all its nodes.
            position = len(draft.request.ids) + draft.growth.frontier[0].depth
            noisy.append(add_noise(own, ids, draft.request.sampling, position))
        return torch.cat(noisy)


class _Draft:
    """One sequence's tree in the making. Nodes that are expanded take the slots after the context, one by one."""

    def __init__(self, request: DraftRequest, growth: Growth, session: Session) -> None:
        self.request, self.growth, self.session = request, growth, session
        assert session.state is not None
        self.states = {0: session.state}  # by node, [width] each; the root's is that of the context's last slot
        self._paths: dict[int, tuple[int, ...]] = {0: ()}  # by node: physical slots, the root's child first

    @property
    def num_expanded(self) -> int:
        return len(self._paths) - 1

    def add(self, node: GrowthNode, slot: int) -> tuple[int, ...]:
        """Gives the node a physical slot and returns the slots of its path."""
        path = self._paths[node.number] = (*self._paths[node.parent], slot)
        return path


def best_guesses(logits: Tensor, target_ids: Tensor, num_guesses: int) -> list[Guesses]:
    """For each row of ``logits [rows, draft vocabulary]`` the best target ids with their log-probabilities."""
    log_probs, draft_ids = logits.log_softmax(dim=-1).topk(min(num_guesses, logits.shape[1]))
    rows = zip(target_ids[draft_ids.cpu()].tolist(), log_probs.tolist(), strict=True)
    return [list(zip(*row, strict=True)) for row in rows]


def add_noise(logits: Tensor, ids: np.ndarray, sampling: SamplingParams, position: int) -> Tensor:
    """log q plus the noise with which the target will draw the token at ``position``, ``[rows, len(ids)]``.

    A row's greatest entry is the target's choice wherever the two agree, so it ranks; and its softmax, which is all but
    one where that choice is clear, passes for the probability of being accepted. Greedy requests have no noise.
    """
    if sampling.is_greedy:
        return logits
    noise = gumbel_noise(sampling.seed, sampling.choice, position, ids).astype(np.float32)
    scores = [process(row, sampling) for row in logits.cpu().numpy()]
    return torch.from_numpy(np.stack(scores) + noise).to(logits.device)
