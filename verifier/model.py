"""The Llama family by flags: Llama 2 and 3, Mistral, Qwen2, Qwen3, SmolLM2.

Knows how rows become hidden states and logits. Knows nothing of requests, sampling, or where pages come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from verifier.attention import Attention
from verifier.attention.layout import RowLayout
from verifier.config import ModelConfig
from verifier.layers import GatedMLP, NoNorm, RMSNorm, Rotary
from verifier.linear import Linear
from verifier.pool import PagePool
from verifier.weights import Checkpoint

Rotation = Callable[[Tensor], Tensor]  # heads [rows, any, head_dim] turned by their rows' positions


class Tensors(Protocol):
    """Weights by Hugging Face's names."""

    def tensor(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class DecoderLayer:
    """Pre-norm attention and MLP. Heads of q, k and v come out of one merged matrix, in that order."""

    config: ModelConfig
    window: int | None
    attention_norm: RMSNorm | NoNorm
    qkv: Linear
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    output: Linear
    mlp_norm: RMSNorm
    mlp: GatedMLP

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
        keys.index_copy_(0, layout.slots, own_keys)
        values.index_copy_(0, layout.slots, own_values)
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
        x = x + self.output(attended)
        return x + self.mlp(self.mlp_norm(x))

    def row_by_row(self, x: Tensor) -> Tensor:
        """All that treats rows apart, with the queries standing in for attention: for the row-count self-test."""
        width = self.config.num_heads * self.config.head_dim
        return self.finish(x, self.qkv(self.attention_norm(x))[:, :width].contiguous())


class Model:
    """The weights of one model and its forward pass over a flat batch."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, attention: Attention) -> None:
        self.config = config
        self._attention = attention
        self._rotary = Rotary(config)
        embedding = checkpoint.tensor("model.embed_tokens.weight")
        self.embedding = embedding.float()  # [vocab, hidden]
        self.layers = [load_layer(config, checkpoint, index) for index in range(config.num_layers)]
        self.norm = RMSNorm(checkpoint.tensor("model.norm.weight").float(), config.rms_norm_eps)
        self.head = Linear([embedding if config.tie_word_embeddings else checkpoint.tensor("lm_head.weight")])

    def forward(self, layout: RowLayout, pool: PagePool, taps: Sequence[int] = ()) -> tuple[Tensor, dict[int, Tensor]]:
        """Hidden states ``[rows, hidden]`` after the last layer, before the final norm, and those at ``taps`` by tap.

        A tap is a boundary id: 0 is the embedding output, n the residual stream after n layers
        (``hidden_states[n]`` of Hugging Face models, except that n = num_layers is before the final norm here).
        Writes the rows' keys and values into ``pool``.
        """
        x = self.embedding[layout.token_ids]
        cos, sin = self._rotary.at(layout.positions)
        rotate = partial(self._rotary, cos=cos, sin=sin)
        tapped = {0: x}
        for index, layer in enumerate(self.layers):
            x = layer(x, rotate, layout, pool.keys[index], pool.values[index], self._attention)
            if index + 1 in taps:
                tapped[index + 1] = x
        return x, {tap: tapped[tap] for tap in taps}

    def logits(self, hidden: Tensor) -> Tensor:
        """``[rows, vocab]`` fp32 from hidden states before the final norm."""
        return self.head(self.norm(hidden))


def load_layer(
    config: ModelConfig, checkpoint: Tensors, index: int, *, has_attention_norm: bool = True
) -> DecoderLayer:
    """Layer ``index`` from Hugging Face tensor names."""
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
    )
