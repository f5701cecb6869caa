"""The processes that train together: one, or as many as torchrun started. Sums are all that passes between them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Self

import torch
from torch import Tensor
from torch import distributed as dist


class Ranks:
    def __init__(self, index: int = 0, size: int = 1) -> None:
        self.index, self.size = index, size

    @classmethod
    def join(cls, device: torch.device) -> Self:
        """Meets the other processes if torchrun started this one."""
        if "RANK" not in os.environ:
            return cls()
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def sum(self, tensors: Iterable[Tensor | None]) -> None:
        """In place, as one message. All ranks must give tensors of the same shapes."""
        given = [each for each in tensors if each is not None]
        if self.size == 1 or not given:
            return
        joined = torch.cat([each.flatten() for each in given])
        dist.all_reduce(joined)
        for each, part in zip(given, joined.split([each.numel() for each in given]), strict=True):
            each.copy_(part.view_as(each))

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()

    def leave(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()
