"""Checkpoints of large models without their weights: true configurations and headers over files that are holes.

All that is asked before a weight is read can be asked of them, and they take no room on the disk.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.deployments.fakes import TEMPLATE, TEXT
from verifier.config import ModelConfig

BYTES = {"BF16": 2, "F16": 2, "I64": 8, "BOOL": 1}

LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "torch_dtype": "bfloat16",
}
MISTRAL_LARGE: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 32768,
    "hidden_size": 12288,
    "intermediate_size": 28672,
    "num_hidden_layers": 88,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
}
EAGLE3_70B: dict[str, Any] = {  # as wide as its target, which is the widest that such heads are
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float16",
}


def hollow_model(folder: Path, config: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = ModelConfig.from_hf(folder).tensor_shapes()
    save(folder, {name: ("BF16", shape) for name, shape in shapes.items()})
    TEXT._tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def hollow_head(folder: Path, config: Mapping[str, Any]) -> Path:
    """An EAGLE-3 head in SafeAILab's layout, whose draft vocabulary is the end of the target's."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    width, inner, vocab, drafted = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size", "draft_vocab_size")
    )
    keys = width // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, 3 * width),
        "midlayer.self_attn.q_proj.weight": (width, 2 * width),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * width),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, width),
        "midlayer.mlp.gate_proj.weight": (inner, width),
        "midlayer.mlp.up_proj.weight": (inner, width),
        "midlayer.mlp.down_proj.weight": (width, inner),
        "midlayer.input_layernorm.weight": (width,),
        "midlayer.hidden_norm.weight": (width,),
        "midlayer.post_attention_layernorm.weight": (width,),
        "norm.weight": (width,),
        "lm_head.weight": (drafted, width),
    }
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {name: ("F16", shape) for name, shape in shapes.items()}
    offsets, known = np.full(drafted, vocab - drafted, dtype=np.int64), np.arange(vocab) >= vocab - drafted
    return save(
        folder,
        {"d2t": ("I64", (drafted,)), "t2d": ("BOOL", (vocab,)), **tensors},
        offsets.tobytes() + known.tobytes(),
    )


def save(folder: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], beginning: bytes = b"") -> Path:
    """``model.safetensors`` of these kinds and shapes; ``beginning`` holds the first of them, zeros the rest."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + beginning)
        file.truncate(8 + len(text) + end)
    return folder
