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

BACKENDS = ("auto", "reference", "cpu", "triton")

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
    kind = torch.device(device).type
    try:
        if backend == "triton" or (backend == "auto" and kind == "cuda"):
            return _triton(kind)
        if kind != "cpu":
            raise KernelUnavailable(f"there is no kernel for {device}")
        return CpuAttention()
    except KernelUnavailable as reason:
        if backend != "auto":
            raise BadSetting("attention backend", backend, f"auto or reference here, since {reason}") from reason
        logger.warning("Attention falls back on the slow plain-torch definition: %s.", reason)
        return reference.attend


def _triton(kind: str) -> Attention:
    """Imported only where it is wanted: it comes with torch's CUDA builds, and not for every system."""
    try:
        import triton
    except ImportError as error:
        raise KernelUnavailable("the package triton is not installed") from error
    if kind != "cuda" and not (kind == "cpu" and triton.knobs.runtime.interpret):
        raise KernelUnavailable(f"Triton's kernels are for cuda, and for cpu with TRITON_INTERPRET=1, not for {kind}")
    from verifier.attention.triton import TritonAttention

    return TritonAttention()
