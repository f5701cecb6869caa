"""The tensors of the paged KV cache. Knows slots and pages, but not whose they are (see ``pages.py``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from verifier.config import ModelConfig
from verifier.device import cache_type


class PagePool:
    """Keys and values of all layers. Slot ``page * page_size + offset`` is one row in each of them.

    Attributes:
        keys, values: ``[num_layers, num_pages * page_size, num_kv_heads, head_dim]``. Zeros at first: attention may
            read slots that it gives no weight, and in memory never written it could meet NaN, which 0 does not cancel.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (num_layers, num_pages * page_size, num_kv_heads, head_dim)
        self.num_pages = num_pages
        self.page_size = page_size
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @classmethod
    def of(cls, config: ModelConfig, num_pages: int, page_size: int, device: torch.device) -> PagePool:
        """For a model, or a rank's part of one."""
        return cls(
            num_pages,
            page_size,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=cache_type(config, device),
            device=device,
        )

    @property
    def device(self) -> torch.device:
        return self.keys.device

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies slots. All sources are read before any target is written, so the two may overlap.

        The targets must differ from one another.
        """
        changed = {target: source for source, target in zip(sources, targets, strict=True) if source != target}
        copy_rows(self.keys, changed)
        copy_rows(self.values, changed)

    def copy_pages(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copies whole pages, as (source, target). All sources are read before any target is written.

        Where a target comes twice, the later pair counts: it may have been lent, returned and lent again meanwhile.
        """
        changed = {target: source for source, target in pairs}
        by_page = (-1, self.num_pages, self.page_size * self.keys[0, 0].numel())
        copy_rows(self.keys.view(by_page), changed)
        copy_rows(self.values.view(by_page), changed)


def copy_rows(rows: Tensor, changed: Mapping[int, int]) -> None:
    """``rows[:, target] = rows[:, source]`` for every target and its source; all are read before any is written."""
    if changed:
        targets = torch.tensor(list(changed), device=rows.device)
        sources = torch.tensor(list(changed.values()), device=rows.device)
        rows.index_copy_(1, targets, rows.index_select(1, sources))
