"""The seam between the engine and what computes. Knows plans and their outputs; a fake stands here in most tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from verifier.batch import StepPlan
from verifier.config import ModelConfig
from verifier.features import Fusion
from verifier.verifier import StepOutput
from workers.scheduler import Features


class StepRunner(Protocol):
    """What the engine needs of a `verifier.verifier.Verifier`."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def max_rows(self) -> int: ...

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None: ...

    def forward(self, plan: StepPlan) -> StepOutput: ...

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None: ...

    def keep_features(self, fusion: Fusion) -> Features: ...

    def drop_features(self, fusion: Fusion) -> None: ...

    def padded(self, num_rows: int) -> int: ...

    def close(self) -> None: ...
