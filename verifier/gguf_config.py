"""A `ModelConfig` from what a GGUF file says of itself. Knows GGUF's keys; opens no file.

Source of the keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from verifier.config import FieldReader, ModelConfig, RopeScaling, token_ids, yarn_attention_factor
from verifier.errors import CheckpointError

ARCHITECTURES = ("llama", "qwen2", "qwen3")


def config_from_gguf(
    metadata: Mapping[str, Any], formats: Mapping[str, str], rope_factors: Sequence[float], name: str
) -> ModelConfig:
    """Read a GGUF file's key-value pairs, its tensors' names and formats (which tell biases, a tied head and the
    precision) and the values of its rope_freqs tensor, if it has one.

    Raises:
        CheckpointError: a size is missing, or something is not supported.
    """
    family = metadata.get("general.architecture")
    FieldReader(metadata, name).only("general.architecture", family, ARCHITECTURES)
    prefix = f"{family}."
    read = FieldReader(
        {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}, name
    )
    read.only("expert_count", read.data.get("expert_count", 0), (0,))
    hidden_size, num_heads = read.size("embedding_length"), read.size("attention.head_count")
    head_dim = read.size("attention.key_length", hidden_size // num_heads)
    read.only("rope.dimension_count", read.size("rope.dimension_count", head_dim), (head_dim,))
    read.only("attention.value_length", read.size("attention.value_length", head_dim), (head_dim,))
    num_layers, window = read.size("block_count"), read.data.get("attention.sliding_window")
    theta = read.number("rope.freq_base", 10000.0)
    vocab_size = read.data.get("vocab_size") or len(metadata.get("tokenizer.ggml.tokens", ()))
    return ModelConfig(
        architecture=str(family),
        vocab_size=int(vocab_size),
        hidden_size=hidden_size,
        intermediate_size=read.size("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=read.size("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=read.number("attention.layer_norm_rms_epsilon"),
        max_positions=read.size("context_length"),
        rope_theta=theta,
        rope_scaling=_gguf_rope_scaling(read, theta, rope_factors, head_dim),
        tie_word_embeddings="output.weight" not in formats,
        attention_bias="blk.0.attn_q.bias" in formats,
        output_bias="blk.0.attn_output.bias" in formats,
        mlp_bias="blk.0.ffn_up.bias" in formats,
        qk_norm="blk.0.attn_q_norm.weight" in formats,
        layer_windows=(int(window) if window else None,) * num_layers,
        eos_token_ids=token_ids(metadata.get("tokenizer.ggml.eos_token_id")),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        dtype=_gguf_dtype(set(formats.values())),
        name=name,
    )


def _gguf_dtype(formats: set[str]) -> str:
    """Quantised weights are held in fp16; norms are stored as F32 in every file."""
    if formats == {"F32"}:
        return "float32"
    return "bfloat16" if formats <= {"F32", "BF16"} else "float16"


def _gguf_rope_scaling(
    read: FieldReader, theta: float, rope_factors: Sequence[float], head_dim: int
) -> RopeScaling | None:
    if len(rope_factors):
        return _llama3_from_factors(read, theta, rope_factors, head_dim)
    kind = read.data.get("rope.scaling.type", "none")
    read.only("rope.scaling.type", kind, ("none", "linear", "yarn"))
    if kind == "none":
        return None
    factor = read.number("rope.scaling.factor")
    original = read.size("rope.scaling.original_context_length", read.size("context_length"))
    attention = yarn_attention_factor(FieldReader({}, read.name), factor) if kind == "yarn" else 1.0
    return RopeScaling(kind, factor, original, attention_factor=attention)


def _llama3_from_factors(read: FieldReader, theta: float, factors: Sequence[float], head_dim: int) -> RopeScaling:
    """A GGUF holds what each frequency is divided by, not the parameters. Meta's differ in ``factor`` alone, which is
    what the lowest frequency is divided by; the other factors confirm the rest.
    """
    scaling = RopeScaling("llama3", float(max(factors)), 8192)
    expected = [_llama3_factor(scaling, theta ** (2 * index / head_dim)) for index in range(head_dim // 2)]
    close = len(factors) == len(expected) and all(
        math.isclose(got, want, rel_tol=1e-4) for got, want in zip(factors, expected, strict=True)
    )
    if not close:
        raise CheckpointError(f"{read.name}: rope_freqs are not those of Llama 3, the only ones supported.")
    return scaling


def _llama3_factor(scaling: RopeScaling, inverse_frequency: float) -> float:
    turns = scaling.original_max_positions / (2 * math.pi * inverse_frequency)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = min(max((turns - low) / (high - low), 0.0), 1.0)
    return 1 / (kept + (1 - kept) / scaling.factor)
