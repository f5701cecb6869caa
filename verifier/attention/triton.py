"""Tree attention on GPUs, in Triton. ``reference.py`` is the definition, ``layout.py`` says where a row's keys lie.

A program takes one row, and the query heads of one kv head, through at most `SPLIT` of the row's keys, block by block
in order of position; a second kernel adds up what a row's splits gave, in order of position, too. Blocks and splits
begin at fixed positions and no program sees another row, so a row's result is bitwise the same whatever else is in the
batch. The price is that the rows of a tree do not share what they read. Sums are fp32, whatever the cache's type.

Compiled for the GPU at the first call with new sizes. On CPU tensors only with ``TRITON_INTERPRET=1``, which runs the
kernels line by line in numpy, for tests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verifier.attention.layout import RowLayout
from verifier.attention.reference import BLOCK

SPLIT = 1024  # keys, a multiple of BLOCK
_VARYING = ("query_stride", "num_splits", "window")  # a kernel of its own for round ones could round differently


class TritonAttention:
    """Like `verifier.attention.reference.attend`, for fp32 queries and keys and values of any float type."""

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, layout: RowLayout, window: int | None, scale: float
    ) -> Tensor:
        num_rows, num_heads, head_dim = queries.shape
        kv_heads = keys.shape[1]
        assert queries.dtype == torch.float32
        assert queries.stride()[1:] == (head_dim, 1)  # rows may lie apart, as when they are split off a merged matrix
        assert keys.is_contiguous()
        assert values.is_contiguous()
        assert num_rows == layout.num_rows
        out = queries.new_empty(num_rows, num_heads, head_dim)
        if num_rows == 0:
            return out
        num_splits = triton.cdiv(layout.longest, SPLIT)
        mixed = queries.new_empty(num_rows, num_splits, num_heads, head_dim)
        largest, total = queries.new_empty(2, num_rows, num_splits, num_heads).unbind()
        sizes = {
            "KV_HEADS": kv_heads,
            "GROUP": num_heads // kv_heads,
            "GROUP_LANES": triton.next_power_of_2(num_heads // kv_heads),
            "HEAD_DIM": head_dim,
            "DIM_LANES": max(16, triton.next_power_of_2(head_dim)),  # tl.dot takes no fewer
            "SPLIT": SPLIT,
        }
        attend_split[(num_rows, kv_heads, num_splits)](
            mixed,
            largest,
            total,
            queries,
            keys,
            values,
            layout.positions,
            layout.starts,
            layout.page_offsets,
            layout.path_offsets,
            layout.pages,
            layout.paths,
            queries.stride(0),
            num_splits,
            window or 0,
            scale,
            PAGE_SIZE=layout.page_size,
            BLOCK=BLOCK,
            **sizes,
        )
        add_splits[(num_rows, kv_heads)](out, mixed, largest, total, layout.positions, num_splits, window or 0, **sizes)
        return out


@triton.jit
def seen_keys(positions: tl.tensor, row: tl.tensor, window: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The position of the first key that a row sees, and the one after the last, its own."""
    end = tl.load(positions + row).to(tl.int32) + 1
    return tl.where(window > 0, tl.maximum(end - window, 0), 0), end


@triton.jit(do_not_specialize=_VARYING)
def attend_split(
    mixed: tl.tensor,  # [rows, splits, heads, head_dim] fp32: the values' sum by weights that are relative to `largest`
    largest: tl.tensor,  # [rows, splits, heads] fp32: score
    total: tl.tensor,  # [rows, splits, heads] fp32: of the weights
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    positions: tl.tensor,
    starts: tl.tensor,
    page_offsets: tl.tensor,
    path_offsets: tl.tensor,
    pages: tl.tensor,
    paths: tl.tensor,
    query_stride: tl.tensor,
    num_splits: tl.tensor,
    window: tl.tensor,  # 0: none
    scale: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_LANES: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """The online softmax of one row, for the heads of one kv head, over the keys of one split that it sees."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end = seen_keys(positions, row, window)
    begin = tl.maximum(split * SPLIT, first // BLOCK * BLOCK)
    stop = tl.minimum((split + 1) * SPLIT, end)
    if begin < stop:
        start = tl.load(starts + row)
        page_table = pages + tl.load(page_offsets + row)
        path = paths + tl.load(path_offsets + row)
        heads = kv_head * GROUP + tl.arange(0, GROUP_LANES)
        is_head = tl.arange(0, GROUP_LANES) < GROUP
        dims = tl.arange(0, DIM_LANES)
        is_dim = dims < HEAD_DIM
        own = row.to(tl.int64) * query_stride + heads[:, None] * HEAD_DIM + dims[None, :]
        query = tl.load(queries + own, mask=is_head[:, None] & is_dim[None, :], other=0.0) * scale
        most = tl.full([GROUP_LANES], float("-inf"), tl.float32)
        weight = tl.full([GROUP_LANES], 0.0, tl.float32)
        sums = tl.full([GROUP_LANES, DIM_LANES], 0.0, tl.float32)
        for block in range(begin, stop, BLOCK):
            at = block + tl.arange(0, BLOCK)
            seen = (at >= first) & (at < end)
            committed = at < start
            page = tl.load(page_table + at // PAGE_SIZE, mask=seen & committed, other=0)
            in_path = tl.load(path + at - start, mask=seen & (at >= start), other=0)
            slots = tl.where(committed, page * PAGE_SIZE + at % PAGE_SIZE, in_path).to(tl.int64)
            there = (slots * KV_HEADS + kv_head)[:, None] * HEAD_DIM + dims[None, :]
            readable = seen[:, None] & is_dim[None, :]  # what is not reads as 0, since no weight silences a NaN
            key = tl.load(keys + there, mask=readable, other=0.0).to(tl.float32)
            value = tl.load(values + there, mask=readable, other=0.0).to(tl.float32)
            scores = tl.where(seen[None, :], tl.dot(query, tl.trans(key), input_precision="ieee"), float("-inf"))
            new_most = tl.maximum(most, tl.max(scores, 1))
            weights = tl.exp(scores - new_most[:, None])
            shrink = tl.exp(most - new_most)
            weight = weight * shrink + tl.sum(weights, 1)
            sums = sums * shrink[:, None] + tl.dot(weights, value, input_precision="ieee")
            most = new_most
        to = (row.to(tl.int64) * num_splits + split) * KV_HEADS * GROUP + heads
        tl.store(largest + to, most, mask=is_head)
        tl.store(total + to, weight, mask=is_head)
        tl.store(mixed + to[:, None] * HEAD_DIM + dims[None, :], sums, mask=is_head[:, None] & is_dim[None, :])


@triton.jit(do_not_specialize=_VARYING)
def add_splits(
    out: tl.tensor,  # [rows, heads, head_dim] fp32
    mixed: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    positions: tl.tensor,
    num_splits: tl.tensor,
    window: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_LANES: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """What `attend_split` made of the splits that one row sees, one after the other, as one softmax."""
    row, kv_head = tl.program_id(0), tl.program_id(1)
    first, end = seen_keys(positions, row, window)
    heads = kv_head * GROUP + tl.arange(0, GROUP_LANES)
    is_head = tl.arange(0, GROUP_LANES) < GROUP
    dims = tl.arange(0, DIM_LANES)
    is_number = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    most = tl.full([GROUP_LANES], float("-inf"), tl.float32)
    weight = tl.full([GROUP_LANES], 0.0, tl.float32)
    sums = tl.full([GROUP_LANES, DIM_LANES], 0.0, tl.float32)
    for split in range(first // SPLIT, (end + SPLIT - 1) // SPLIT):
        here = (row.to(tl.int64) * num_splits + split) * KV_HEADS * GROUP + heads
        its_most = tl.load(largest + here, mask=is_head, other=0.0)
        new_most = tl.maximum(most, its_most)
        shrink = tl.exp(most - new_most)
        its_shrink = tl.exp(its_most - new_most)
        weight = weight * shrink + tl.load(total + here, mask=is_head, other=1.0) * its_shrink
        its_sums = tl.load(mixed + here[:, None] * HEAD_DIM + dims[None, :], mask=is_number, other=0.0)
        sums = sums * shrink[:, None] + its_sums * its_shrink[:, None]
        most = new_most
    to = (row.to(tl.int64) * KV_HEADS * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out + to, sums / weight[:, None], mask=is_number)
