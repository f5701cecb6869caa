"""What all layouts of trained draft networks share: a decoder in Hugging Face's words, and the file it stands in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from verifier.config import ModelConfig


def decoder_words(decoder: ModelConfig) -> dict[str, Any]:
    """A config.json of the Llama family that says what ``decoder`` is; whoever saves it names the architecture."""
    return {
        "model_type": "llama",
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_hidden_layers": decoder.num_layers,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "vocab_size": decoder.vocab_size,
        "max_position_embeddings": decoder.max_positions,
        "rms_norm_eps": decoder.rms_norm_eps,
        "rope_theta": decoder.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": decoder.tie_word_embeddings,
        "torch_dtype": "float16",
    }


def save_config(folder: Path, config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def save_weights(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(0o644)  # the library keeps it from other users, who may share a head


def halves(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.half().contiguous() for name, tensor in weights.items()}
