"""Where every row of a step finds its keys: a flat batch of prompt chunks and trees as index tensors.

Knows pages, slots and trees. Knows nothing of heads, layers or models: one layout serves all layers of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verifier.batch import Segment


@dataclass(frozen=True, eq=False, slots=True)
class RowLayout:
    """The rows of one step, segment after segment and node after node, then rows of padding.

    A row's keys in order of absolute position are the committed tokens ``0..start-1``, found through the page table,
    and then its path in the tree, root to self. A key's position is its index in that list, so that a row at position
    ``p`` has ``p + 1`` keys:

        position   0 ................. start-1 | start ............. p
        slot       pages[page_offset + ...]    | paths[path_offset + ...]

    ``pages`` and ``paths`` are flat and shared. A tree keeps one path for each leaf, and every node points at a path
    that runs through it, so that a chain of n rows costs n slots, not n².
    """

    page_size: int
    longest: int  # the most keys that a row has
    token_ids: Tensor  # [R] int64
    positions: Tensor  # [R] int64, absolute
    slots: Tensor  # [R] int64, physical: where the row's own key and value are written before attention
    starts: Tensor  # [R] int32, committed tokens before the root
    page_offsets: Tensor  # [R] int32, where in `pages` the row's page table begins
    path_offsets: Tensor  # [R] int32, where in `paths` the row's path begins
    pages: Tensor  # int32, page ids of the committed tokens
    paths: Tensor  # int32, physical slots

    @classmethod
    def of(
        cls,
        segments: Sequence[Segment],
        page_size: int,
        *,
        num_rows: int | None = None,
        scratch_slot: int = 0,
        device: torch.device | str = "cpu",
    ) -> RowLayout:
        """The layout of ``segments``, padded to ``num_rows`` rows where given.

        Padding rows belong to no sequence: token 0 at position 0, written to the physical slot ``scratch_slot``, which
        no sequence may own, and attending to that slot alone.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts: list[int] = []
        page_offsets: list[int] = []
        path_offsets: list[int] = []
        pages: list[int] = []
        paths: list[int] = []
        for segment in segments:
            start, tree = segment.start, segment.tree
            own = [_slot(segment.pages, start + node, page_size) for node in range(len(tree))]
            token_ids += tree.tokens
            positions += [start + depth for depth in tree.depths]
            slots += own
            starts += [start] * len(tree)
            page_offsets += [len(pages)] * len(tree)
            path_offsets += _add_paths(tree.parents, own, paths)
            pages += segment.pages[: -(-start // page_size)]
        padding = 0 if num_rows is None else num_rows - len(slots)
        assert padding >= 0, f"{len(slots)} rows do not fit into {num_rows}"
        if padding:
            token_ids += [0] * padding
            positions += [0] * padding
            slots += [scratch_slot] * padding
            starts += [0] * padding
            page_offsets += [0] * padding
            path_offsets += [len(paths)] * padding
            paths.append(scratch_slot)

        def tensor(numbers: list[int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(numbers, dtype=dtype, device=device)

        return cls(
            page_size=page_size,
            longest=max(positions, default=-1) + 1,
            token_ids=tensor(token_ids, torch.int64),
            positions=tensor(positions, torch.int64),
            slots=tensor(slots, torch.int64),
            starts=tensor(starts, torch.int32),
            page_offsets=tensor(page_offsets, torch.int32),
            path_offsets=tensor(path_offsets, torch.int32),
            pages=tensor(pages, torch.int32),
            paths=tensor(paths, torch.int32),
        )

    @property
    def num_rows(self) -> int:
        return self.slots.shape[0]

    def key_slots(self, row: int) -> Tensor:
        """The physical slots of the keys of ``row`` in order of position, its own last: [position + 1] int64."""
        start = int(self.starts[row])
        path_offset = int(self.path_offsets[row])
        path_length = int(self.positions[row]) - start + 1
        committed = torch.arange(start, device=self.slots.device)
        page_ids = self.pages[int(self.page_offsets[row]) + committed // self.page_size]
        path = self.paths[path_offset : path_offset + path_length]
        return torch.cat((page_ids.long() * self.page_size + committed % self.page_size, path.long()))


def _slot(pages: Sequence[int], logical: int, page_size: int) -> int:
    return pages[logical // page_size] * page_size + logical % page_size


def _add_paths(parents: Sequence[int], own: Sequence[int], paths: list[int]) -> list[int]:
    """Appends the slots of every root-to-leaf path to ``paths``; for each node, the offset of one that it lies on."""
    offsets = [-1] * len(parents)
    for leaf in reversed(range(len(parents))):
        if offsets[leaf] >= 0:
            continue  # children come after parents, so a node that no path has reached by now has no children
        offset, path, node = len(paths), [], leaf
        while node >= 0:
            offsets[node] = offset  # whichever path it is, it begins with this node's own
            path.append(own[node])
            node = parents[node]
        paths += reversed(path)
    return offsets
