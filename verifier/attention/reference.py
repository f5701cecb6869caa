"""What tree attention is: slow, obvious, on any device, and the oracle for every kernel.

Row invariance is part of the definition. A row is computed alone, its keys in order of absolute position, in blocks
aligned to position, by operations whose shapes never vary; so its result is bitwise the same whatever else is in the
batch, and whether a key was committed long ago or belongs to its own draft.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verifier.attention.layout import RowLayout

BLOCK = 64  # keys


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, layout: RowLayout, window: int | None, scale: float
) -> Tensor:
    """Softmax attention of each row over its keys.

    Args:
        queries: [R, heads, head_dim] float32.
        keys: [num_slots, kv_heads, head_dim], any float type. Query head ``h`` reads the kv head
            ``h // (heads // kv_heads)``.
        values: like ``keys``.
        layout: the R rows.
        window: a row at position p sees keys at positions above ``p - window``; None for all.
        scale: what scores are multiplied with.

    Returns:
        [R, heads, head_dim] float32.
    """
    out = torch.empty_like(queries)
    for row in range(layout.num_rows):
        slots = layout.key_slots(row)
        first = 0 if window is None else max(0, len(slots) - window)
        out[row] = _attend_row(queries[row] * scale, keys, values, slots, first)
    return out


def _attend_row(query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, first: int) -> Tensor:
    """Online softmax over the keys at positions ``first`` and later; ``query`` is scaled already."""
    kv_heads, head_dim = keys.shape[1:]
    grouped = query.view(kv_heads, -1, head_dim)  # [K, G, D]
    largest = torch.full_like(grouped[..., :1], -torch.inf)  # [K, G, 1]
    total = torch.zeros_like(largest)
    mixed = torch.zeros_like(grouped)
    for begin in range(first // BLOCK * BLOCK, len(slots), BLOCK):
        seen = slice(max(first - begin, 0), min(len(slots) - begin, BLOCK))  # within the block
        here = slots[begin + seen.start : begin + seen.stop]
        scores = grouped @ _block(keys, here, seen).mT  # [K, G, BLOCK]
        scores[..., : seen.start] = -torch.inf
        scores[..., seen.stop :] = -torch.inf
        new_largest = torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - new_largest)
        shrink = torch.exp(largest - new_largest)
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed * shrink + weights @ _block(values, here, seen)
        largest = new_largest
    return (mixed / total).view(-1, head_dim)


def _block(cache: Tensor, slots: Tensor, seen: slice) -> Tensor:
    """[K, BLOCK, D] float32; zeros where nothing is seen, since a weight of nought does not silence a NaN."""
    block = torch.zeros(BLOCK, *cache.shape[1:], device=cache.device)
    block[seen] = cache[slots].float()
    return block.transpose(0, 1)
