"""Trained EAGLE-1 heads and small models as folders: names and config keys as the published ones have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from drafter.training.layouts import decoder_words, halves, save_config, save_weights
from drafter.training.objectives.factory import head_decoder, small_model_config
from drafter.training.trained import Trained


def save_draftree(folder: Path, head: Trained) -> None:
    """``config.json`` and ``model.safetensors``, fp16; the target's embedding is not repeated."""
    save_config(folder, _eagle_config(head))
    save_weights(folder, halves(head.weights))


def save_safeailab(folder: Path, head: Trained) -> None:
    """``config.json`` and ``pytorch_model.bin``, fp16, with the target's embedding, as EAGLE's authors publish them."""
    save_config(folder, _eagle_config(head))
    embedding = {"embed_tokens.weight": head.target.embedding}
    torch.save(halves(head.weights) | halves(embedding), folder / "pytorch_model.bin")


def save_small_model(folder: Path, head: Trained) -> None:
    """A Hugging Face folder, fp16, without a tokenizer: the target's is its own."""
    config = small_model_config(head.settings, head.target.config)
    ends = {"eos_token_id": list(config.eos_token_ids), "bos_token_id": config.bos_token_id}
    save_config(folder, {"architectures": ["LlamaForCausalLM"]} | decoder_words(config) | ends)
    save_weights(folder, halves(head.weights))


def _eagle_config(head: Trained) -> dict[str, Any]:
    words = decoder_words(head_decoder(head.settings, head.target.config))
    return {"architectures": ["LlamaForCausalLM"]} | words | {"bias": False, "qkv_bias": False}
