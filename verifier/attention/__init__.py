"""Tree attention over pages: one signature, several backends, one factory."""

from __future__ import annotations

import logging
from typing import Protocol

import torch
from torch import Tensor

from verifier.attention import reference
from verifier.attention.cpu import CpuAttention, KernelUnavailable
from verifier.attention.layout import RowLayout
from verifier.errors import BadSetting

__all__ = ["BACKENDS", "Attention", "create_attention"]

BACKENDS = ("auto", "reference", "cpu")

logger = logging.getLogger(__name__)


class Attention(Protocol):
    """See `verifier.attention.reference.attend`: every backend means the same and is as row-invariant."""

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, layout: RowLayout, window: int | None, scale: float
    ) -> Tensor: ...


def create_attention(backend: str = "auto", device: torch.device | str = "cpu") -> Attention:
    """The attention for tensors on ``device``. ``auto`` takes the fastest there is and warns when that is slow.

    Raises:
        BadSetting: no such backend, or it does not work here.
    """
    if backend not in BACKENDS:
        raise BadSetting("attention backend", backend, "one of " + ", ".join(BACKENDS))
    if backend == "reference":
        return reference.attend
    try:
        if torch.device(device).type != "cpu":
            raise KernelUnavailable(f"there is no kernel for {device}")
        return CpuAttention()
    except KernelUnavailable as reason:
        if backend == "cpu":
            raise BadSetting("attention backend", backend, f"auto or reference here, since {reason}") from reason
        logger.warning("Attention falls back on the slow plain-torch definition: %s.", reason)
        return reference.attend
