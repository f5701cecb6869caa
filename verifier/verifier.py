"""A model and its paged cache as one thing that executes step plans.

Of several ranks, rank 0's is the one that an engine has: it tells the others each plan, move and copy before it does
the same. They run the very same code; logits and features come out on rank 0 alone. Knows rows, pages and logits. Knows
nothing of requests, tokens' meaning, drafters or time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from verifier.attention import create_attention
from verifier.attention.layout import RowLayout
from verifier.batch import Moves, PageCopies, StepPlan
from verifier.config import ModelConfig
from verifier.device import kind_of, wait_for
from verifier.features import FeaturePool, Fusion
from verifier.lead import NOBODY, Lead
from verifier.model import Model
from verifier.pool import PagePool
from verifier.ranks import ALONE, Ranks
from verifier.rows import RowCounts, find_row_counts
from verifier.weights import Checkpoint


@dataclass(frozen=True)
class StepOutput:
    """What one forward pass gives back, one entry per segment of its plan."""

    logits: list[Tensor]  # [num_scored, vocab] fp32; row j belongs to node scored_from + j
    features: list[Tensor | None]  # [nodes, taps, hidden] fp32 for tapped segments


class Verifier:
    """Executes `StepPlan`s. Not thread-safe: one engine owns it.

    In exact mode a row's logits are bitwise the same in whatever batch it is computed (`verifier.rows`).

    Attributes:
        fingerprint: equal for verifiers that give the same logits: same model, weights, precision and parallel size.
        lead: of several ranks, rank 0's hold on the others.
    """

    def __init__(self, model: Model, pool: PagePool, row_counts: RowCounts, fingerprint: str) -> None:
        self.model, self.pool, self.row_counts, self.fingerprint = model, pool, row_counts, fingerprint
        self.taps: tuple[int, ...] = ()
        self.lead: Lead = NOBODY
        self._features: dict[str, FeaturePool] = {}

    @classmethod
    @torch.inference_mode()
    def load(
        cls,
        path: Path,
        *,
        num_pages: int,
        page_size: int,
        exact: bool = True,
        max_rows: int = 192,
        backend: str = "auto",
        device: torch.device | str = "cpu",
        ranks: Ranks = ALONE,
    ) -> Verifier:
        """Loads the checkpoint at ``path`` (a Hugging Face folder or a GGUF file) and allocates ``num_pages`` pages.

        Of several ranks each loads its part of the weights, and of every page its KV heads' part.
        """
        checkpoint = Checkpoint.open(path).on(torch.device(device))
        config = checkpoint.config
        model = Model(config, checkpoint, create_attention(backend, device), ranks)
        # One page more than the books know of: rows that only pad the batch write there.
        pool = PagePool.of(model.local_config, num_pages + 1, page_size, model.device)
        row_counts = RowCounts.any_up_to(max_rows)
        if exact:
            row_counts = find_row_counts(model.row_by_row, config.hidden_size, max_rows, ranks, model.device)
        if ranks.size > 1:
            ranks.sum(torch.ones(1))  # all have loaded, which may take one of them long
            ranks.sum(torch.ones(1, device=model.device))  # so GPUs find one another now and not in a step
        # Sums over other numbers of ranks round otherwise.
        parallel = f"-tp{ranks.size}" if ranks.size > 1 else ""
        return cls(model, pool, row_counts, checkpoint.fingerprint + parallel + kind_of(model.device))

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def padded(self, num_rows: int) -> int:
        """The rows that a forward pass over ``num_rows`` rows really computes."""
        return self.row_counts.pad(num_rows)

    @property
    def max_rows(self) -> int:
        """The most rows one forward pass takes."""
        return self.row_counts.largest

    @property
    def _pools(self) -> list[PagePool | FeaturePool]:
        return [self.pool, *self._features.values()]

    def keep_features(self, fusion: Fusion) -> FeaturePool:
        """The pool in which every row's fused features lie from now on; equal keys share one."""
        if fusion.key not in self._features:
            pool = self.pool
            self._features[fusion.key] = FeaturePool(fusion, pool.num_pages, pool.page_size, pool.device)
        return self._features[fusion.key]

    def drop_features(self, fusion: Fusion) -> None:
        """Keeps these no longer."""
        self._features.pop(fusion.key, None)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> StepOutput:
        """One pass over all rows of ``plan``; every row's KV is in its slot afterwards."""
        layout = RowLayout.of(  # before others hear of the plan: one that cannot be laid out is nobody's fault
            plan.segments,
            page_size=self.pool.page_size,
            num_rows=self.padded(plan.num_rows),
            scratch_slot=(self.pool.num_pages - 1) * self.pool.page_size,
            device=self.pool.device,
        )
        with self.lead.step(plan):
            fused_taps = {tap for pool in self._features.values() for tap in pool.fusion.taps}
            hidden, states = self.model.forward(layout, self.pool, tuple(fused_taps.union(self.taps)))
            for pool in self._features.values():
                pool.write(layout.slots, [states[tap] for tap in pool.fusion.taps])
            output = StepOutput(self._logits(plan, hidden), self._tapped(plan, [states[tap] for tap in self.taps]))
            wait_for(self.pool.device)
            return output

    @torch.inference_mode()
    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole pages of KV and features, (source, target) each: copy-on-write."""
        with self.lead.step(PageCopies(tuple(pairs))):
            for pool in self._pools:
                pool.copy_pages(pairs)

    @torch.inference_mode()
    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Moves KV and features between physical slots: the kept nodes' into place."""
        with self.lead.step(Moves(tuple(sources), tuple(targets))):
            for pool in self._pools:
                pool.move(sources, targets)

    def close(self) -> None:
        """Lets the other ranks go, if there are any; nothing can be computed afterwards."""
        self.lead.close()

    def _logits(self, plan: StepPlan, hidden: Tensor) -> list[Tensor]:
        rows: list[int] = []
        first = 0
        for segment in plan.segments:
            rows.extend(range(first + segment.scored_from, first + len(segment.tree)))
            first += len(segment.tree)
        if not rows:
            return [hidden.new_empty(0, self.config.vocab_size) for _ in plan.segments]
        padding = [rows[0]] * (self.row_counts.pad(len(rows)) - len(rows))
        logits = self.model.logits(hidden[rows + padding])[: len(rows)]
        return list(logits.split([segment.num_scored for segment in plan.segments]))

    def _tapped(self, plan: StepPlan, tapped: list[Tensor]) -> list[Tensor | None]:
        if not tapped:
            return [None for _ in plan.segments]
        stacked = torch.stack(tapped, dim=1)[: plan.num_rows]
        parts = stacked.split([len(segment.tree) for segment in plan.segments])
        return [part if segment.tapped else None for part, segment in zip(parts, plan.segments, strict=True)]
