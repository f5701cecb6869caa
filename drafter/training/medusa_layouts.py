"""Trained Medusa heads as folders: in vLLM's layout, which is also how Draftree reads its own, and in Medusa-1's.

Knows names and config keys; `drafter.medusa_config` says what they mean, and reads both.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from drafter.medusa_config import HEADS_FILE, TOKEN_MAP
from drafter.training.layouts import halves, save_config, save_weights
from drafter.training.trained import Trained
from verifier.errors import BadSetting


def save_vllm(folder: Path, head: Trained) -> None:
    """``config.json`` and ``model.safetensors``, fp16, with a ``token_map`` if the vocabulary is a truncated one."""
    target, tensors = head.target.config, halves(head.weights)
    if len(head.target_ids) < target.vocab_size:
        tensors[TOKEN_MAP] = head.target_ids
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "truncated_vocab_size": len(head.target_ids),
        "num_heads": _num_heads(head),
        "num_hidden_layers": _num_layers(head),
        "medusa_fc_bias": True,
        "max_paths": 64,  # vLLM's defaults; it reads neither when it drafts chains
        "topk": 10,
        "torch_dtype": "float16",
    }
    save_config(folder, config)
    save_weights(folder, tensors)


def save_medusa_1(folder: Path, head: Trained) -> None:
    """``config.json`` and ``medusa_lm_head.pt``, fp16, as FasterDecoding's code reads them.

    Raises:
        BadSetting: the vocabulary is a truncated one, for which that layout has no map.
    """
    num_ids, target = len(head.target_ids), head.target.config
    if num_ids < target.vocab_size:
        raise BadSetting("draft_vocab", num_ids, f"{target.vocab_size}, the target's, in a layout without a map")
    num_layers = _num_layers(head)
    tensors = {
        re.sub(r"blocks\.(\d+)\.layers\.(\d+)", r"\1.\2.linear", name)
        if name.startswith("blocks.")
        else re.sub(r"lm_heads\.(\d+)", rf"\1.{num_layers}", name): tensor
        for name, tensor in halves(head.weights).items()
    }
    config = {
        "base_model_name_or_path": target.name,
        "medusa_num_heads": _num_heads(head),
        "medusa_num_layers": num_layers,
    }
    save_config(folder, config)
    torch.save(tensors, folder / f"{HEADS_FILE}.pt")


def _num_heads(head: Trained) -> int:
    return sum(name.startswith("lm_heads.") for name in head.weights)


def _num_layers(head: Trained) -> int:
    return sum(name.startswith("blocks.0.") and name.endswith(".weight") for name in head.weights)
