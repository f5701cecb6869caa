"""Tiny random Medusa heads in every layout, and what they compute, head by head and from the definition."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class MedusaShape:
    num_heads: int = 5
    num_layers: int = 1
    hidden: int = 64
    vocab: int = 160
    truncated: int | None = None  # ids of a truncated vocabulary
    bias: bool = True
    shared: bool = False  # one output matrix for all heads


def random_medusa(shape: MedusaShape, seed: int = 0) -> Weights:
    """By the names of vLLM's layout."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator) * 0.3

    rows = shape.truncated or shape.vocab
    weights = {}
    for head in range(shape.num_heads):
        for layer in range(shape.num_layers):
            weights[f"blocks.{head}.layers.{layer}.weight"] = matrix(shape.hidden, shape.hidden)
            if shape.bias:
                weights[f"blocks.{head}.layers.{layer}.bias"] = matrix(shape.hidden)
        if not shape.shared:
            weights[f"lm_heads.{head}.weight"] = matrix(rows, shape.hidden)
    if shape.shared:
        weights["lm_head.weight"] = matrix(rows, shape.hidden)
    if shape.truncated:
        weights["token_map"] = torch.randperm(shape.vocab, generator=generator)[: shape.truncated]
    return weights


def medusa_1_names(weights: Weights) -> Weights:
    """As in ``medusa_lm_head.pt`` of FasterDecoding/medusa-vicuna-7b-v1.3."""
    num_layers = sum(name.startswith("blocks.0.") and name.endswith(".weight") for name in weights)
    renamed = {}
    for name, tensor in weights.items():
        if match := re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", name):
            renamed["{}.{}.linear.{}".format(*match.groups())] = tensor
        else:
            renamed[f"{name.split('.')[1]}.{num_layers}.weight"] = tensor
    return renamed


def vllm_config(shape: MedusaShape) -> dict[str, Any]:
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": shape.hidden,
        "vocab_size": shape.vocab,
        "num_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "max_paths": 64,
        "topk": 10,
        "truncated_vocab_size": shape.truncated or shape.vocab,
        "medusa_fc_bias": shape.bias,
        **({"original_lm_head": True} if shape.shared else {}),
    }


# Medusa-1's, as published for five heads.
MEDUSA_1_CONFIG = {
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    "medusa_num_heads": 2,
    "medusa_num_layers": 1,
    "transformers_version": "4.31.0",
}


def save_medusa(folder: Path, weights: Weights, config: Mapping[str, Any]) -> Path:
    """In vLLM's layout."""
    return _save(folder, weights, config, "model.safetensors")


def save_medusa_1(folder: Path, weights: Weights, *, pickled: bool = True) -> Path:
    file = "medusa_lm_head.pt" if pickled else "medusa_lm_head.safetensors"
    return _save(folder, medusa_1_names(weights), MEDUSA_1_CONFIG, file)


def _save(folder: Path, weights: Weights, config: Mapping[str, Any], file: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".pt"):
        torch.save(weights, folder / file)
    else:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / file)
    return folder


def slow_logits(shape: MedusaShape, weights: Weights, state: Tensor, head: int) -> Tensor:
    """``[draft vocabulary]`` of one head from ``state [hidden]``, block by block."""
    for layer in range(shape.num_layers):
        name = f"blocks.{head}.layers.{layer}"
        inner = weights[f"{name}.weight"] @ state + weights.get(f"{name}.bias", torch.zeros(()))
        state = state + inner * torch.sigmoid(inner)
    output = weights["lm_head.weight" if shape.shared else f"lm_heads.{head}.weight"]
    return output @ state
