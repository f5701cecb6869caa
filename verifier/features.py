"""What a draft head reads of the target: hidden states of a few layers, fused into one vector for each position.

Knows how the vectors are made and where they lie, which is beside the KV: same slots, same pages, moved and copied with
them. So whoever knows a sequence's pages can read the feature of any committed position again, whether it was computed
in this step, found in the prefix cache, or is asked for by a drafter that has lost its own state. Knows no drafter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verifier.layers import RMSNorm
from verifier.linear import Linear
from verifier.pool import copy_rows


@dataclass(frozen=True)
class Fusion:
    """From tapped hidden states ``[rows, hidden]`` to one vector ``[rows, width]``, row by row, fp32.

    A norm for each tap, concatenation in the order of ``taps``, a norm over the whole, a projection: all but the
    concatenation may be absent.
    """

    key: str  # names the projection and its weights: vectors of different keys must not meet
    taps: tuple[int, ...]  # boundary ids: n is the residual stream after n layers
    width: int
    each_norm: tuple[RMSNorm, ...] = ()  # one per tap, or none
    joint_norm: RMSNorm | None = None
    projection: Linear | None = None

    def __call__(self, tapped: Sequence[Tensor]) -> Tensor:
        if self.each_norm:
            tapped = [norm(states) for norm, states in zip(self.each_norm, tapped, strict=True)]
        joined = torch.cat(list(tapped), dim=-1)
        if self.joint_norm is not None:
            joined = self.joint_norm(joined)
        return joined if self.projection is None else self.projection(joined)


class FeaturePool:
    """One fused vector for each slot of a KV pool. Takes ``4 * width`` bytes a slot."""

    def __init__(self, fusion: Fusion, num_pages: int, page_size: int, device: torch.device | str = "cpu") -> None:
        self.fusion = fusion
        self._page_size = page_size
        self._rows = torch.zeros(1, num_pages * page_size, fusion.width, device=device)

    def write(self, slots: Tensor, tapped: Sequence[Tensor]) -> None:
        """Fuses ``tapped``, each ``[rows, hidden]``, into the rows' physical ``slots``."""
        self._rows[0].index_copy_(0, slots, self.fusion(tapped))

    def read(self, slots: Sequence[int]) -> Tensor:
        """``[len(slots), width]`` fp32, a copy."""
        return self._rows[0, torch.tensor(slots, dtype=torch.int64, device=self._rows.device)]

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """As `verifier.pool.PagePool.move`."""
        copy_rows(self._rows, dict(zip(targets, sources, strict=True)))

    def copy_pages(self, pairs: Iterable[tuple[int, int]]) -> None:
        """As `verifier.pool.PagePool.copy_pages`."""
        by_page = self._rows.view(1, -1, self._page_size * self.fusion.width)
        copy_rows(by_page, {target: source for source, target in pairs})
