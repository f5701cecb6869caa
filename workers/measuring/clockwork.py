"""A target without a model and a drafter elsewhere, on a clock that only they move: every price is known, no noise.

What the text says depends on positions alone, so that plain decoding is known beforehand. Knows prices. Knows no
engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from drafter.base import DraftRequest, InstantDraft, Ticket
from drafter.scored import ScoredTree
from verifier.batch import Segment, StepPlan
from verifier.config import ModelConfig
from verifier.features import FeaturePool, Fusion
from verifier.verifier import StepOutput

VOCAB_SIZE = 97
MODEL = ModelConfig(
    architecture="llama",
    vocab_size=VOCAB_SIZE,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    rms_norm_eps=1e-5,
    max_positions=2**20,
    rope_theta=1e4,
    rope_scaling=None,
    tie_word_embeddings=False,
    attention_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    layer_windows=(None,),
    eos_token_ids=(),
    bos_token_id=None,
    dtype="float32",
)
_LOGITS = torch.eye(VOCAB_SIZE)


def token_at(position: int) -> int:
    """What plain decoding says there."""
    return (31 * position + 7) % VOCAB_SIZE


class ManualClock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ClockworkVerifier:
    """Offers what an engine needs of a `verifier.verifier.Verifier`; a pass takes ``price(rows)`` seconds."""

    config = MODEL
    fingerprint = "clockwork"

    def __init__(self, clock: ManualClock, price: Callable[[int], float], max_rows: int) -> None:
        self.max_rows = max_rows
        self._clock, self._price = clock, price

    def forward(self, plan: StepPlan) -> StepOutput:
        self._clock.now += self._price(plan.num_rows)
        return StepOutput([_logits(segment) for segment in plan.segments], [None for _ in plan.segments])

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        pass

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        pass

    def keep_features(self, fusion: Fusion) -> FeaturePool:
        raise NotImplementedError("there is nothing to read")

    def drop_features(self, fusion: Fusion) -> None:
        raise NotImplementedError("there is nothing to read")

    def padded(self, num_rows: int) -> int:
        return num_rows

    def close(self) -> None:
        pass


def _logits(segment: Segment) -> torch.Tensor:
    depths = segment.tree.depths[segment.scored_from :]
    return _LOGITS[[token_at(segment.start + depth + 1) for depth in depths]]


class MovingClock(Protocol):
    now: float


class ClockworkDraft(InstantDraft):
    """Another drafter's guesses from elsewhere: while others work, one question after the other.

    Args:
        price: from depth and batch to seconds.
    """

    def __init__(self, drafter: InstantDraft, clock: MovingClock, price: Callable[[int, int], float]) -> None:
        super().__init__()
        self._drafter, self._clock, self._price = drafter, clock, price
        self._free_at = 0.0
        self._due: dict[Ticket, float] = {}

    def propose(self, request: DraftRequest) -> ScoredTree:
        return self._drafter.propose(request)

    def start(self, batch: Sequence[DraftRequest]) -> Ticket:
        ticket = super().start(batch)
        depth = max((request.limits.max_draft for request in batch), default=0)
        self._free_at = max(self._free_at, self._clock.now) + self._price(depth, len(batch))
        self._due[ticket] = self._free_at
        return ticket

    def collect(self, ticket: Ticket, deadline_s: float) -> Mapping[int, ScoredTree]:
        trees, due, ends = super().collect(ticket, deadline_s), self._due.pop(ticket), self._clock.now + deadline_s
        self._clock.now = max(self._clock.now, min(due, ends))
        return trees if due <= ends else {}
