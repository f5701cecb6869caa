"""A random Llama of a few thousand weights as a Hugging Face folder, for whoever tries the service, not the model.

Made in a moment and without torch. What it says makes no sense, and is the same each time.
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


def make_tiny_model(folder: Path, *, max_positions: int = 256) -> Path:
    """Nine query heads and three KV heads, so that it splits over 1 and 3 ranks; the vocabulary of `byte_text`."""
    from safetensors.numpy import save_file

    tokenizer = byte_tokenizer()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
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
        "eos_token_id": tokenizer.token_to_id("<|end|>"),
        "bos_token_id": None,
        "torch_dtype": "float16",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    shapes = ModelConfig.from_hf(folder).tensor_shapes()
    weights = {name: (random.standard_normal(shape) * 0.3).astype(np.float16) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder
