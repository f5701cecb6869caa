"""Trained Medusa heads as folders: in vLLM's layout, which is also how Draftree reads its own, and in Medusa-1's.

Knows names and config keys. What they mean is said in `drafter.medusa_config`, which reads both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafter.medusa_config import HEADS_FILE, TOKEN_MAP
from verifier.config import ModelConfig
from verifier.errors import BadSetting

Weights = Mapping[str, Tensor]  # by the names of `drafter.training.objectives.medusa`


def save_vllm(folder: Path, weights: Weights, target_ids: Tensor, target: ModelConfig) -> None:
    """``config.json`` and ``model.safetensors``, fp16, with a ``token_map`` if the vocabulary is a truncated one."""
    tensors = _halves(weights)
    if len(target_ids) < target.vocab_size:
        tensors[TOKEN_MAP] = target_ids.long().contiguous()
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "truncated_vocab_size": len(target_ids),
        "num_heads": _count(weights, r"lm_heads\..*"),
        "num_hidden_layers": _count(weights, r"blocks\.0\..*\.weight"),
        "medusa_fc_bias": "blocks.0.layers.0.bias" in weights,
        "max_paths": 64,  # vLLM's defaults; it reads neither when it drafts chains
        "topk": 10,
        "torch_dtype": "float16",
    }
    _write_config(folder, config)
    save_file(tensors, folder / "model.safetensors")


def save_medusa_1(folder: Path, weights: Weights, target_ids: Tensor, target: ModelConfig) -> None:
    """``config.json`` and ``medusa_lm_head.pt``, fp16, as FasterDecoding's code reads them.

    Raises:
        BadSetting: the vocabulary is a truncated one, for which that layout has no map.
    """
    if len(target_ids) < target.vocab_size:
        raise BadSetting(
            "draft_vocab", len(target_ids), f"{target.vocab_size}, the target's, in a layout without a map"
        )
    num_layers = _count(weights, r"blocks\.0\..*\.weight")
    tensors = {
        re.sub(r"blocks\.(\d+)\.layers\.(\d+)", r"\1.\2.linear", name)
        if name.startswith("blocks.")
        else re.sub(r"lm_heads\.(\d+)", rf"\1.{num_layers}", name): tensor
        for name, tensor in _halves(weights).items()
    }
    config = {
        "base_model_name_or_path": target.name,
        "medusa_num_heads": _count(weights, r"lm_heads\..*"),
        "medusa_num_layers": num_layers,
    }
    _write_config(folder, config)
    torch.save(tensors, folder / f"{HEADS_FILE}.pt")


def _halves(weights: Weights) -> dict[str, Tensor]:
    return {name: tensor.half().contiguous() for name, tensor in weights.items()}


def _count(weights: Weights, pattern: str) -> int:
    return sum(re.fullmatch(pattern, name) is not None for name in weights)


def _write_config(folder: Path, config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
