"""Tiny random EAGLE-1 heads, and what such a head computes, slowly and from its definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.drafter.heads import HeadShape, SlowHead, Weights, random_weights, rms, safeailab_config, save_head


@dataclass(frozen=True)
class EagleShape(HeadShape):
    """Sizes, and the two biases that some heads have: ``attention_bias`` is that of q, k and v."""

    head_dim: int = 16
    fc_bias: bool = True
    own_embedding: bool = True


def eagle_weights(shape: EagleShape, seed: int = 0) -> Weights:
    """By the names of yuhuili/EAGLE-*: the layer's are those of a Llama, but for the norms that it lacks."""
    weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in random_weights(shape, seed).items()}
    for name in ("d2t", "t2d", "lm_head.weight", "norm.weight"):
        weights.pop(name, None)
    for name in ("hidden_norm", "input_layernorm"):
        del weights[f"layers.0.{name}.weight"]
    width = shape.hidden
    for name in ("q_proj", "k_proj", "v_proj"):
        full = f"layers.0.self_attn.{name}.weight"
        weights[full] = weights[full][:, :width].contiguous()
    generator = torch.Generator().manual_seed(seed + 1)
    weights["fc.weight"] = torch.randn(width, 2 * width, generator=generator) * 0.05
    if shape.fc_bias:
        weights["fc.bias"] = torch.randn(width, generator=generator) * 0.2
    return weights


def eagle_config(shape: EagleShape) -> dict[str, Any]:
    """As in yuhuili/EAGLE-LLaMA3-Instruct-8B, which says that it has no bias; older ones do not mention theirs."""
    config = safeailab_config(shape)
    for name in ("draft_vocab_size", "head_dim", "attention_bias"):
        config.pop(name, None)
    if not shape.fc_bias:
        config["bias"] = False
    if shape.attention_bias:
        config["qkv_bias"] = True
    return config


def save_tiny_eagle(folder: Path, shape: EagleShape, *, seed: int = 0, pickled: bool = False, **config: Any) -> Path:
    return save_head(folder, eagle_weights(shape, seed), eagle_config(shape) | config, pickled=pickled)


class SlowEagle(SlowHead):
    """One slot after the other."""

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        return rms(states[-1], self.target["model.norm.weight"], 1e-5)

    def read(self, output: Tensor) -> tuple[Tensor, Tensor]:
        return self.target["lm_head.weight"] @ output, output

    def slot(self, token: int, hidden: Tensor, position: int, cache: list[list[tuple[Tensor, Tensor]]]) -> Tensor:
        weights = self.weights
        table = weights["embed_tokens.weight"] if self.shape.own_embedding else self.target["model.embed_tokens.weight"]
        x = weights["fc.weight"] @ torch.cat((table[token], hidden)) + weights.get("fc.bias", torch.zeros(()))
        for index in range(self.shape.num_layers):
            norm = weights.get(f"layers.{index}.input_layernorm.weight")
            normed = x if norm is None else rms(x, norm, self.shape.rms_norm_eps)
            x = self.layer(x, normed, position, f"layers.{index}.", cache[index])
        return x
