"""Writes a Hugging Face folder as a GGUF file, the way llama.cpp's converter does: the reverse of what we read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quantize
from safetensors.numpy import load_file
from tokenizers.pre_tokenizers import ByteLevel

from verifier.config import ModelConfig

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h i", "1 2", "Ġ 1", "Ġ hi", "Ċ Ċ"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCABULARY = [*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


def pair_rows(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Row i and row i + head_dim/2 of each head, side by side."""
    heads = rows.reshape(num_heads, rows.shape[0] // num_heads, -1)
    half = heads.shape[1] // 2
    return np.stack([heads[:, :half], heads[:, half:]], axis=2).reshape(rows.shape)


def write_gguf(
    folder: Path,
    path: Path,
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
    rope_factors: np.ndarray | None = None,
) -> Path:
    """Norms stay F32 whatever the quantisation of matrices, as everywhere. The tokenizer is a made-up one."""
    config = ModelConfig.from_hf(folder)
    writer = GGUFWriter(path, config.architecture)
    _write_sizes(writer, config)
    _write_tokenizer(writer)
    for name, values in load_file(folder / "model.safetensors").items():
        if config.architecture == "llama" and ".q_proj." in name:
            values = pair_rows(values, config.num_heads)
        if config.architecture == "llama" and ".k_proj." in name:
            values = pair_rows(values, config.num_kv_heads)
        kind = quantization if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(name), quantize(values, kind), raw_dtype=kind)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.{kind}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def _write_sizes(writer: GGUFWriter, config: ModelConfig) -> None:
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _write_tokenizer(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(VOCABULARY)
    kinds = [TokenType.CONTROL if token in SPECIAL_TOKENS else TokenType.NORMAL for token in VOCABULARY]
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
