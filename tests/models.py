"""Tiny random models of every family, as Hugging Face folders, and `transformers`' answers to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SMALL: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_SCALING = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {"model_type": "llama", "num_key_value_heads": 4},
    "llama2-linear": {"model_type": "llama", "rope_parameters": LINEAR_SCALING},
    "llama3": {"model_type": "llama", "rope_parameters": LLAMA3_SCALING},
    "llama-biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "smollm2": {"model_type": "llama", "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72,
                "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": 24, "head_dim": 80},
    "qwen2": {"model_type": "qwen2", "head_dim": 16},
    "qwen2-windowed": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 128, "tie_word_embeddings": True},
}  # fmt: skip


def save_tiny_model(folder: Path, family: str = "smollm2", *, seed: int = 0, **changes: Any) -> Path:
    """Saves a random model of ``family`` and returns its folder."""
    torch.manual_seed(seed)
    settings = {**SMALL, **FAMILIES[family], **changes}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # initialised to zero, which would hide a missing bias
                parameter.normal_(std=0.3)
            elif name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder, max_shard_size=changes.get("max_shard_size", "5GB"))
    return folder


@torch.inference_mode()
def reference_logits(folder: Path, ids: Sequence[int]) -> torch.Tensor:
    """``[len(ids), vocab]`` fp32: what `transformers` says after each token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model(torch.tensor([list(ids)])).logits[0]  # type: ignore[no-any-return]
