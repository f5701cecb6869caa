"""The Llama family by flags: Llama 2 and 3, Mistral, Qwen2, Qwen3, SmolLM2.

Knows how rows become hidden states and logits, alone or with other ranks: each computes its heads, its feed-forward
columns and its part of the vocabulary, and the residual stream is the same on all. Knows nothing of requests, sampling,
processes, or where pages come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor

from verifier.attention import Attention
from verifier.attention.layout import RowLayout
from verifier.config import ModelConfig
from verifier.device import as_held
from verifier.layers import GatedMLP, NoNorm, RMSNorm, Rotary
from verifier.linear import Linear
from verifier.pool import PagePool
from verifier.ranks import ALONE, Ranks
from verifier.shard import Shard
from verifier.weights import EMBEDDING, Checkpoint

HEAD = "lm_head.weight"

Rotation = Callable[[Tensor], Tensor]  # heads [rows, any, head_dim] turned by their rows' positions


class Tensors(Protocol):
    """Weights by Hugging Face's names."""

    def tensor(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class DecoderLayer:
    """Pre-norm attention and MLP. Heads of q, k and v come out of one merged matrix, in that order."""

    config: ModelConfig  # of what this rank computes
    window: int | None
    attention_norm: RMSNorm | NoNorm
    qkv: Linear
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    output: Linear
    mlp_norm: RMSNorm
    mlp: GatedMLP
    ranks: Ranks = ALONE

    def __call__(
        self, x: Tensor, rotate: Rotation, layout: RowLayout, keys: Tensor, values: Tensor, attention: Attention
    ) -> Tensor:
        """Hidden states ``[rows, hidden]`` to those after the layer; otherwise as `attend`."""
        return self.finish(x, self.attend(self.attention_norm(x), rotate, layout, keys, values, attention))

    def attend(
        self, x: Tensor, rotate: Rotation, layout: RowLayout, keys: Tensor, values: Tensor, attention: Attention
    ) -> Tensor:
        """What ``x``, normed already, attends to: ``[rows, heads * head_dim]``.

        Writes the rows' keys and values into the layer's cache, ``keys`` and ``values`` of a `PagePool`.
        """
        own_queries, own_keys, own_values = self._heads(x, rotate)
        keys.index_copy_(0, layout.slots, own_keys.to(keys.dtype))
        values.index_copy_(0, layout.slots, own_values.to(values.dtype))
        attended = attention(own_queries, keys, values, layout, self.window, self.config.head_dim**-0.5)
        return attended.view(len(x), -1)

    def _heads(self, x: Tensor, rotate: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries ``[rows, heads, head_dim]`` and keys, and values, ``[rows, kv_heads, head_dim]``."""
        config = self.config
        heads = self.qkv(x).view(len(x), -1, config.head_dim)
        rotated, values = heads.split((config.num_heads + config.num_kv_heads, config.num_kv_heads), dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = rotated.split((config.num_heads, config.num_kv_heads), dim=1)
            rotated = torch.cat((self.query_norm(queries), self.key_norm(keys)), dim=1)
        queries, keys = rotate(rotated).split((config.num_heads, config.num_kv_heads), dim=1)
        return queries, keys, values

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer after attention, ``attended [rows, heads * head_dim]``."""
        x = x + self.ranks.sum(self.output(attended))
        return x + self.ranks.sum(self.mlp(self.mlp_norm(x)))

    def row_by_row(self, x: Tensor) -> Tensor:
        """All that treats rows apart, with the queries standing in for attention: for the row-count self-test."""
        width = self.config.num_heads * self.config.head_dim
        return self.finish(x, self.qkv(self.attention_norm(x))[:, :width].contiguous())


class Model:
    """The weights of one model, or of a rank's part of it, and its forward pass over a flat batch.

    Everything is on the device on which ``checkpoint`` puts its tensors.
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, attention: Attention, ranks: Ranks = ALONE) -> None:
        shard = Shard(checkpoint, ranks.rank, ranks.size)
        self.config = config
        self.ranks = ranks
        self.local_config = shard.config
        self._checkpoint = checkpoint
        self._attention = attention
        self.device = checkpoint.device
        self._rotary = Rotary(config, self.device)
        own_rows = shard.tensor(EMBEDDING)
        self._own_embedding = as_held(own_rows)  # [a rank's part of the vocabulary, hidden]
        self.layers = [load_layer(shard.config, shard, index, ranks=ranks) for index in range(config.num_layers)]
        self.norm = RMSNorm(shard.tensor("model.norm.weight").float(), config.rms_norm_eps)
        self._own_head = Linear([own_rows if config.tie_word_embeddings else shard.tensor(HEAD)])

    @cached_property
    def embedding(self) -> Tensor:
        """``[vocab, hidden]``, for heads that share it. A rank that holds a part reads the whole when asked."""
        return self._own_embedding if self.ranks.size == 1 else as_held(self._checkpoint.tensor(EMBEDDING))

    @cached_property
    def head(self) -> Linear:
        """Normed hidden states to logits of the whole vocabulary, on this rank alone: like `embedding`, for others."""
        name = EMBEDDING if self.config.tie_word_embeddings else HEAD
        return self._own_head if self.ranks.size == 1 else Linear([self._checkpoint.tensor(name)])

    def forward(self, layout: RowLayout, pool: PagePool, taps: Sequence[int] = ()) -> tuple[Tensor, dict[int, Tensor]]:
        """Hidden states ``[rows, hidden]`` after the last layer, before the final norm, and those at ``taps`` by tap.

        A tap is a boundary id: 0 is the embedding output, n the residual stream after n layers
        (``hidden_states[n]`` of Hugging Face models, except that n = num_layers is before the final norm here).
        Writes the rows' keys and values into ``pool``.
        """
        x = self._embed(layout.token_ids)
        cos, sin = self._rotary.at(layout.positions)
        rotate = partial(self._rotary, cos=cos, sin=sin)
        tapped = {0: x}
        for index, layer in enumerate(self.layers):
            x = layer(x, rotate, layout, pool.keys[index], pool.values[index], self._attention)
            if index + 1 in taps:
                tapped[index + 1] = x
        return x, {tap: tapped[tap] for tap in taps}

    def _embed(self, token_ids: Tensor) -> Tensor:
        """``[rows, hidden]``: each id is looked up by the rank that holds it, the others add zeros."""
        if self.ranks.size == 1:
            return self.embedding[token_ids].float()
        places = token_ids - self.ranks.rank * len(self._own_embedding)
        own = (places >= 0) & (places < len(self._own_embedding))
        return self.ranks.sum(self._own_embedding[places.where(own, 0)].float().where(own.unsqueeze(1), 0))

    def logits(self, hidden: Tensor) -> Tensor:
        """``[rows, vocab]`` fp32 from hidden states before the final norm; whole on rank 0 alone."""
        return self.ranks.gather(self._own_head(self.norm(hidden)))[:, : self.config.vocab_size]

    def row_by_row(self, x: Tensor) -> Tensor:
        """What this rank does with rows apart, in one layer and the head: for the row-count self-test."""
        layer = replace(self.layers[0], ranks=ALONE)
        return self._own_head(self.norm(layer.row_by_row(x)))


def load_layer(
    config: ModelConfig,
    checkpoint: Tensors,
    index: int,
    *,
    has_attention_norm: bool = True,
    ranks: Ranks = ALONE,
) -> DecoderLayer:
    """Layer ``index`` from Hugging Face tensor names; of several ranks, ``config`` and tensors are this one's."""
    prefix = f"model.layers.{index}"

    def norm(name: str) -> RMSNorm:
        return RMSNorm(checkpoint.tensor(f"{prefix}.{name}.weight").float(), config.rms_norm_eps)

    def linear(block: str, names: Sequence[str], bias: bool) -> Linear:
        paths = [f"{prefix}.{block}.{name}" for name in names]
        biases = [checkpoint.tensor(f"{path}.bias") for path in paths] if bias else []
        return Linear([checkpoint.tensor(f"{path}.weight") for path in paths], biases)

    return DecoderLayer(
        config=config,
        window=config.layer_windows[index],
        attention_norm=norm("input_layernorm") if has_attention_norm else NoNorm(),
        qkv=linear("self_attn", ("q_proj", "k_proj", "v_proj"), config.attention_bias),
        query_norm=norm("self_attn.q_norm") if config.qk_norm else None,
        key_norm=norm("self_attn.k_norm") if config.qk_norm else None,
        output=linear("self_attn", ("o_proj",), config.output_bias),
        mlp_norm=norm("post_attention_layernorm"),
        mlp=GatedMLP(
            linear("mlp", ("gate_proj", "up_proj"), config.mlp_bias), linear("mlp", ("down_proj",), config.mlp_bias)
        ),
        ranks=ranks,
    )
