"""Tree attention over pages: one signature, several backends, one factory."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from verifier.attention import reference
from verifier.attention.layout import RowLayout


class Attention(Protocol):
    """See `verifier.attention.reference.attend`, which every backend agrees with."""

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, layout: RowLayout, window: int | None, scale: float
    ) -> Tensor: ...


def create_attention(backend: str = "auto") -> Attention:
    """The attention that ``backend`` names."""
    return reference.attend
