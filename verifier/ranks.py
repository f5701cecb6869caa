"""The ranks that share a model, as the model sees them: three collectives, which all ranks enter in the same order.

The parallel size changes a sum's last bits, a batch never does: partial sums travel as they are and are added one by
one in rank order, number by number, so that a row's sum depends on that row alone and is the same on every rank.
Rings and trees that reduce on the way split tensors by their size, and would not keep that. Knows no processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Ranks(Protocol):
    """One rank's end of the collectives.

    Attributes:
        limit_s: the longest wait for the others in one collective, in seconds.

    Every method raises `verifier.errors.RankLost` when another rank is gone or takes longer; then all are unusable.
    """

    rank: int
    size: int
    limit_s: float

    def sum(self, part: Tensor) -> Tensor:
        """On every rank, the sum of all ranks' ``part``, equal in shape, dtype and to the last bit everywhere."""
        ...

    def gather(self, part: Tensor) -> Tensor:
        """On rank 0, all ranks' ``part [rows, n]`` side by side: ``[rows, size * n]``; elsewhere the part itself."""
        ...

    def broadcast(self, numbers: Sequence[int], limit_s: float | None = None) -> Sequence[int]:
        """On every rank, rank 0's ``numbers``; those of others are ignored. Instead of their own limit, ``limit_s``."""
        ...


class Alone:
    """The only rank. Costs nothing."""

    rank = 0
    size = 1
    limit_s = 0.0

    def sum(self, part: Tensor) -> Tensor:
        return part

    def gather(self, part: Tensor) -> Tensor:
        return part

    def broadcast(self, numbers: Sequence[int], limit_s: float | None = None) -> Sequence[int]:
        return numbers


ALONE = Alone()


def add_in_order(parts: Sequence[Tensor]) -> Tensor:
    """``((parts[0] + parts[1]) + parts[2]) + …``; the parts stay as they are."""
    first, second, *others = parts
    total = first + second
    for part in others:
        total += part
    return total
