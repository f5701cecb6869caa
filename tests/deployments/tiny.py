"""A random Llama of a few thousand weights as a Hugging Face folder, made without torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.deployments.fakes import END, TEMPLATE, TEXT, VOCAB_SIZE
from verifier.config import ModelConfig


def make_tiny_model(folder: Path, *, max_positions: int = 256) -> Path:
    """Nine query heads and three KV heads, so that it splits over 1 and 3 ranks; the vocabulary of `byte_text`."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 72,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": END,
        "bos_token_id": None,
        "torch_dtype": "float16",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    shapes = ModelConfig.from_hf(folder).tensor_shapes()
    weights = {name: (random.standard_normal(shape) * 0.3).astype(np.float16) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    TEXT._tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder
