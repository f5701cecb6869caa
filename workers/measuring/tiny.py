"""A random Llama of a few thousand weights as a Hugging Face folder, for whoever tries the service, not the model.

And a draft head for it. Made in a moment and without torch. What it says makes no sense, and is the same each time.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from verifier.config import ModelConfig
from workers.template import ChatTemplate
from workers.text import Text

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
HIDDEN = 72
DRAFT_VOCAB = 64  # of a head: every fourth byte


def byte_tokenizer() -> Tokenizer:
    """One token a byte, then <|start|> and <|end|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|start|>", special=True), AddedToken("<|end|>", special=True)])
    return tokenizer


def byte_text() -> Text:
    return Text(byte_tokenizer(), ChatTemplate(TEMPLATE, {}))


def make_tiny_model(folder: Path, *, max_positions: int = 256, num_heads: int = 9, num_kv_heads: int = 3) -> Path:
    """By default it splits over 1 and 3 ranks. The vocabulary is `byte_text`'s."""
    from safetensors.numpy import save_file

    tokenizer = byte_tokenizer()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": 64,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.token_to_id("<|end|>"),
        "bos_token_id": None,
        "torch_dtype": "float16",
    }
    _written(folder, config)
    random = np.random.default_rng(0)
    shapes = ModelConfig.from_hf(folder).tensor_shapes()
    weights = {name: (random.standard_normal(shape) * 0.3).astype(np.float16) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def make_tiny_head(folder: Path, model: Path) -> Path:
    """An EAGLE-3 head for a tiny model, in SafeAILab's layout. Its guesses are as good as any."""
    from safetensors.numpy import save_file

    target, heads, kv_heads, head_dim, inner = ModelConfig.from_hf(model), 4, 2, 16, 96
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": 1,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": DRAFT_VOCAB,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "hidden_act": "silu",
        "torch_dtype": "float16",
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    }
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.input_layernorm.weight": (HIDDEN,),
        "midlayer.post_attention_layernorm.weight": (HIDDEN,),
        "midlayer.self_attn.q_proj.weight": (heads * head_dim, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": (kv_heads * head_dim, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": (kv_heads * head_dim, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, heads * head_dim),
        "midlayer.mlp.gate_proj.weight": (inner, HIDDEN),
        "midlayer.mlp.up_proj.weight": (inner, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, inner),
    }
    random = np.random.default_rng(1)
    weights = {name: (random.standard_normal(shape) * 0.2).astype(np.float16) for name, shape in shapes.items()}
    ids = 4 * np.arange(DRAFT_VOCAB)
    save_file(
        weights | {"d2t": ids - np.arange(DRAFT_VOCAB), "t2d": np.isin(np.arange(target.vocab_size), ids)},
        _written(folder, config) / "model.safetensors",
    )
    return folder


def _written(folder: Path, config: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
