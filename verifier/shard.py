"""One rank's part of a model: which rows or columns of every tensor, and the sizes that are left.

Heads and feed-forward columns are shared out, so that a layer's first matrices are cut along their outputs, its last
ones along their inputs, and two sums over ranks make a layer whole (Megatron-LM, https://arxiv.org/abs/1909.08053).
With more ranks than KV heads, neighbours hold the same one. The vocabulary's rows are shared out too. Norms are
everybody's. Knows names and numbers; reads through `verifier.weights.Checkpoint`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from verifier.config import ModelConfig
from verifier.weights import Checkpoint

if TYPE_CHECKING:
    from torch import Tensor

BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_INPUTS = ("o_proj", "down_proj")
VOCABULARY = ("embed_tokens", "lm_head")


class Cut(NamedTuple):
    """``first .. end - 1`` along dimension ``dim``, and zeros up to ``length``."""

    dim: int
    first: int
    end: int
    length: int


def local_config(config: ModelConfig, size: int) -> ModelConfig:
    """The sizes of what each of ``size`` ranks computes; the vocabulary stays that of the model."""
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=max(1, config.num_kv_heads // size),
        intermediate_size=config.intermediate_size // size,
    )


def find_cut(name: str, shape: tuple[int, ...], num_kv_heads: int, rank: int, size: int) -> Cut | None:
    """What ``rank`` of ``size`` holds of a tensor; None for all of it. ``num_kv_heads`` is the whole model's."""
    *_, linear, kind = name.split(".")
    if linear in VOCABULARY:
        length = -(-shape[0] // size)
        return Cut(0, min(rank * length, shape[0]), min((rank + 1) * length, shape[0]), length)
    if linear in BY_OUTPUTS:
        parts = min(size, num_kv_heads) if linear in ("k_proj", "v_proj") else size
        length, place = shape[0] // parts, rank * parts // size
        return Cut(0, place * length, (place + 1) * length, length)
    if linear in BY_INPUTS and kind == "weight":
        length = shape[1] // size
        return Cut(1, rank * length, (rank + 1) * length, length)
    if linear in BY_INPUTS:  # a bias, to be added once: the first rank does
        return Cut(0, 0, 0 if rank else shape[0], shape[0])
    return None


class Shard:
    """A rank's tensors under the names of the whole ones. The only rank of one has them whole."""

    def __init__(self, checkpoint: Checkpoint, rank: int = 0, size: int = 1) -> None:
        self.config = local_config(checkpoint.config, size)
        self._shapes = checkpoint.config.tensor_shapes()
        self._num_kv_heads = checkpoint.config.num_kv_heads
        self._checkpoint, self._rank, self._size = checkpoint, rank, size

    def tensor(self, name: str) -> Tensor:
        cut = find_cut(name, self._shapes[name], self._num_kv_heads, self._rank, self._size)
        if cut is None or self._size == 1:
            return self._checkpoint.tensor(name)
        part = self._checkpoint.part(name, cut.dim, cut.first, cut.end)
        missing = cut.length - (cut.end - cut.first)
        if missing == 0:
            return part
        from torch.nn.functional import pad

        return pad(part, (0, 0) * (part.ndim - 1) + (0, missing))
