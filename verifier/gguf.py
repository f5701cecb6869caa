"""GGUF files as a Hugging Face model: the same names, the same order of rows, plain numbers.

Knows GGUF's names and the one transformation that its converter made (the order of q and k rows). Imports no torch,
since the default model is converted without it. Dequantising itself is the ``gguf`` package's work.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, ReaderField, ReaderTensor, dequantize

from verifier.config import ModelConfig
from verifier.errors import CheckpointError
from verifier.gguf_config import config_from_gguf

GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"  # what llama3 scaling divides frequencies by; not a weight of the model


def hf_name(name: str) -> str | None:
    """Hugging Face's name of a GGUF tensor; None for one that the Llama family does not have."""
    stem, _, kind = name.rpartition(".")
    if stem in GLOBAL_NAMES:
        return f"{GLOBAL_NAMES[stem]}.{kind}"
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if block == "blk" and layer.isdecimal() and part in LAYER_NAMES:
        return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"
    return None


def split_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Put the rows of q or k, [heads * head_dim, ...], back into Hugging Face's order.

    Rotary embedding turns pairs of a head's rows. Hugging Face pairs row i with row i + head_dim/2; GGUF's llama
    architecture stores each pair side by side.
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _plain(entry: ReaderField) -> Any:
    value = entry.contents()
    # 1e-5 is stored in 32 bits; read back digit by digit it stays 1e-5 in 64.
    return float(str(np.float32(value))) if entry.types == [GGUFValueType.FLOAT32] else value


class GGUFFile:
    """One open file. Tensors stay on disk, mapped into memory, until they are asked for.

    Raises:
        CheckpointError: not a GGUF file, or one that is cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError) as error:
            raise CheckpointError(f"{path} is not a whole GGUF file: {error}.") from error
        self._tensors = {hf_name(tensor.name) or tensor.name: tensor for tensor in self._reader.tensors}
        self._tensors.pop(ROPE_FACTORS, None)

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """The key-value pairs as plain Python values."""
        return {name: _plain(entry) for name, entry in self._reader.fields.items()}

    @cached_property
    def config(self) -> ModelConfig:
        formats = {tensor.name: tensor.tensor_type.name for tensor in self._reader.tensors}
        factors = [factor for tensor in self._reader.tensors if tensor.name == ROPE_FACTORS for factor in tensor.data]
        return config_from_gguf(self.metadata, formats, factors, self.path.stem)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def array(self, name: str) -> np.ndarray:
        """One tensor, dequantised to float32, with rows in Hugging Face's order.

        Raises:
            CheckpointError: a quantisation that the gguf package cannot undo.
        """
        return self.rows(name, 0, self.shape(name)[0])

    def rows(self, name: str, first: int, end: int) -> np.ndarray:
        """Rows ``first .. end - 1`` of what `array` gives, and no others are read; of q and k, rows of whole heads."""
        values = self._dequantized(self._tensors[name], first, end).reshape(end - first, *self.shape(name)[1:])
        if self.config.architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            num_heads, rest = divmod(end - first, self.config.head_dim)
            assert first % self.config.head_dim == rest == 0, "a head's rows are in order only together"
            return split_halves(values, num_heads)
        return values

    def sample(self, name: str, size: int) -> bytes:
        """At most ``size`` bytes as they are stored, from the middle of the tensor."""
        stored = self._tensors[name].data.reshape(-1).view(np.uint8)
        return stored[len(stored) // 2 :][:size].tobytes()

    def _dequantized(self, tensor: ReaderTensor, first: int, end: int) -> np.ndarray:
        try:
            return dequantize(tensor.data[first:end], tensor.tensor_type)
        except NotImplementedError as error:
            raise CheckpointError(f"{self.path}: {tensor.name} is {tensor.tensor_type.name}; {error}.") from error
