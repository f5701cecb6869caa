"""Tiny random EAGLE-3 heads, and what such a head computes, slowly and from its definition."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from verifier.config import ModelConfig

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class HeadShape:
    """The flags of a head; sizes are small and differ from one another wherever they may."""

    target_hidden: int = 64
    target_vocab: int = 160
    hidden: int = 64
    intermediate: int = 80
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 24
    draft_vocab: int = 48
    num_taps: int = 3
    num_layers: int = 1
    max_positions: int = 512
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    fuses_layers: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    own_embedding: bool = False
    own_output: bool = True


def random_weights(shape: HeadShape, seed: int = 0) -> Weights:
    """By the names of SafeAILab's layout."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator) * 0.2

    def norm(size: int) -> Tensor:
        return torch.rand(size, generator=generator) + 0.5

    width, queries, keys = shape.hidden, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    weights = {"midlayer.hidden_norm.weight": norm(width), "norm.weight": norm(width)}
    fused = shape.num_taps * shape.target_hidden
    if shape.fuses_layers:
        weights["fc.weight"] = matrix(width, fused)
    if shape.norm_before_fc:
        weights["input_norm.weight"] = norm(fused)
    if shape.fc_norm:
        weights |= {f"fc_norm.{i}.weight": norm(shape.target_hidden) for i in range(shape.num_taps)}
    for index in range(shape.num_layers):
        prefix = f"layers.{index}." if index else "midlayer."
        columns = width if index else 2 * width
        sizes = {"q_proj": (queries, columns), "k_proj": (keys, columns), "v_proj": (keys, columns)}
        for name, size in (sizes | {"o_proj": (width, queries)}).items():
            weights[f"{prefix}self_attn.{name}.weight"] = matrix(*size)
        if shape.attention_bias:
            weights |= {f"{prefix}self_attn.{name}.bias": matrix(size[0]) for name, size in sizes.items()}
        if shape.qk_norm:
            weights |= {f"{prefix}self_attn.{name}.weight": norm(shape.head_dim) for name in ("q_norm", "k_norm")}
        for name in ("gate_proj", "up_proj"):
            weights[f"{prefix}mlp.{name}.weight"] = matrix(shape.intermediate, width)
        weights[f"{prefix}mlp.down_proj.weight"] = matrix(width, shape.intermediate)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = norm(width)
    if shape.own_embedding:
        weights["embed_tokens.weight"] = matrix(shape.target_vocab, width)
    if shape.own_output:
        weights["lm_head.weight"] = matrix(shape.draft_vocab, width)
    if shape.draft_vocab < shape.target_vocab:
        ids = torch.randperm(shape.target_vocab, generator=generator)[: shape.draft_vocab].sort().values
        weights["d2t"] = ids - torch.arange(shape.draft_vocab)
        weights["t2d"] = torch.zeros(shape.target_vocab, dtype=torch.bool).index_fill_(0, ids, True)
    return weights


def safeailab_config(shape: HeadShape) -> dict[str, Any]:
    """As in yuhuili/EAGLE3-LLaMA3.1-Instruct-8B: draft_vocab_size is the only thing that says what this is."""
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": shape.num_layers,
        "vocab_size": shape.target_vocab,
        "draft_vocab_size": shape.draft_vocab,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_positions,
        "hidden_act": "silu",
        "torch_dtype": "float16",
        **{flag: True for flag in flags if getattr(shape, flag)},
        **({} if shape.fuses_layers else {"eagle_config": {"use_aux_hidden_state": False}}),
    }


def save_head(folder: Path, weights: Weights, config: Mapping[str, Any], *, pickled: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def save_tiny_head(folder: Path, shape: HeadShape, *, seed: int = 0, **config: Any) -> Path:
    return save_head(folder, random_weights(shape, seed), safeailab_config(shape) | config)


# ── the definition ───────────────────────────────────────────────────────────────────────────────────────────────────


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """``x [heads, head_dim]`` turned pair by pair, as complex numbers."""
    half = x.shape[-1] // 2
    angles = torch.tensor([position * theta ** (-i / half) for i in range(half)], dtype=torch.float64)
    turned = torch.complex(x[:, :half].double(), x[:, half:].double()) * torch.polar(torch.ones(half).double(), angles)
    return torch.cat((turned.real, turned.imag), dim=-1).float()


class SlowHead:
    """One sequence, one slot after the other, no cache but a list; every flag an if."""

    def __init__(self, shape: HeadShape, weights: Weights, target: Mapping[str, Tensor]) -> None:
        self.shape, self.weights, self.target = shape, weights, target

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """From the tapped states of one position, ``[hidden]`` each; for heads without fc, from the last one's."""
        shape, weights, eps = self.shape, self.weights, self.shape.rms_norm_eps
        if not shape.fuses_layers:
            return rms(states[-1], self.target["model.norm.weight"], 1e-5)
        if shape.fc_norm:
            states = [rms(state, weights[f"fc_norm.{i}.weight"], eps) for i, state in enumerate(states)]
        joined = torch.cat(list(states))
        if shape.norm_before_fc:
            joined = rms(joined, weights["input_norm.weight"], eps)
        return weights["fc.weight"] @ joined

    def run(self, tokens: Sequence[int], hidden: Sequence[Tensor], num_guesses: int = 0) -> tuple[Tensor, list[int]]:
        """Slots 0, 1, … of ``tokens[i]`` with ``hidden[i]``, then ``num_guesses`` more that each feed on the last one.

        Returns logits ``[slots, draft vocabulary]`` and the target ids guessed, the best one each time.
        """
        cache: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(self.shape.num_layers)]
        logits, guesses = [], []
        token, state = 0, hidden[0]
        for slot in range(len(tokens) + num_guesses):
            if slot < len(tokens):
                token, state = tokens[slot], hidden[slot]
            output = self.slot(token, state, slot, cache)
            scores, state = self.read(output)
            logits.append(scores)
            token = int(scores.argmax())
            if "d2t" in self.weights:
                token += int(self.weights["d2t"][token])
            if slot >= len(tokens) - 1:
                guesses.append(token)
        return torch.stack(logits), guesses

    def read(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """A slot's logits, and what the slots below it are fed."""
        normed = rms(output, self.weights["norm.weight"], self.shape.rms_norm_eps)
        head = self.weights["lm_head.weight"] if self.shape.own_output else self.target["lm_head.weight"]
        return head @ normed, normed if self.shape.norm_output else output

    def slot(self, token: int, hidden: Tensor, position: int, cache: list[list[tuple[Tensor, Tensor]]]) -> Tensor:
        shape, weights, eps = self.shape, self.weights, self.shape.rms_norm_eps
        table = weights["embed_tokens.weight"] if shape.own_embedding else self.target["model.embed_tokens.weight"]
        x = hidden
        for index in range(shape.num_layers):
            prefix = f"layers.{index}." if index else "midlayer."
            normed = rms(x, weights[f"{prefix}input_layernorm.weight"], eps)
            if index == 0:
                normed_hidden = rms(hidden, weights["midlayer.hidden_norm.weight"], eps)
                normed = torch.cat((rms(table[token], weights[f"{prefix}input_layernorm.weight"], eps), normed_hidden))
                x = normed_hidden if shape.norm_before_residual else hidden
            x = self.layer(x, normed, position, prefix, cache[index])
        return x

    def layer(
        self, x: Tensor, normed: Tensor, position: int, prefix: str, cache: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """``x`` after a layer whose attention reads ``normed``."""
        weights, eps = self.weights, self.shape.rms_norm_eps
        x = x + self._attend(normed, position, f"{prefix}self_attn.", cache)
        normed = rms(x, weights[f"{prefix}post_attention_layernorm.weight"], eps)
        gate, up = (weights[f"{prefix}mlp.{name}_proj.weight"] @ normed for name in ("gate", "up"))
        return x + weights[f"{prefix}mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)

    def _attend(self, x: Tensor, position: int, prefix: str, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        shape, weights = self.shape, self.weights

        def heads(name: str) -> Tensor:
            out = weights[f"{prefix}{name}_proj.weight"] @ x + weights.get(f"{prefix}{name}_proj.bias", torch.zeros(()))
            out = out.view(-1, shape.head_dim)
            if shape.qk_norm and name != "v":
                out = rms(out, weights[f"{prefix}{name}_norm.weight"], shape.rms_norm_eps)
            return out if name == "v" else rotate(out, position, shape.rope_theta)

        queries = heads("q")
        cache.append((heads("k"), heads("v")))
        group = shape.num_heads // shape.num_kv_heads
        mixed = []
        for index, query in enumerate(queries):
            scores = torch.stack([keys[index // group] @ query for keys, _ in cache]) / math.sqrt(shape.head_dim)
            values = torch.stack([values[index // group] for _, values in cache])
            mixed.append(scores.softmax(0) @ values)
        return weights[f"{prefix}o_proj.weight"] @ torch.cat(mixed)


def target_config(num_layers: int = 30, **changes: Any) -> ModelConfig:
    """A target to check heads against, of which nothing but its sizes is known."""
    return ModelConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": 160,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "_name_or_path": "target",
            **changes,
        }
    )
