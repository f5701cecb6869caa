"""What a model of the Llama family looks like: sizes and flags, read from its files' own words.

Knows the spellings of Hugging Face's config.json, those of transformers 4 and of 5. Knows no tensors, and imports
nothing heavy: settings are checked against a model before anything is loaded. What the engine does not compute
exactly as the model's authors do is refused here, never ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verifier.errors import BadSetting, CheckpointError, ModelNotFound

# Hugging Face's architecture -> its family, which is also its model_type and the family's name in this module.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ROPE_KINDS = ("linear", "dynamic", "llama3", "yarn")
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond ``original_max_positions``. Fields of other kinds keep defaults.

    ``linear`` divides all frequencies by ``factor``; ``dynamic`` raises the base, and only for sequences longer than
    ``max_positions``; ``llama3`` and ``yarn`` blend by wavelength, and ``yarn`` scales cos and sin as well.
    """

    kind: str  # one of ROPE_KINDS
    factor: float
    original_max_positions: int
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: whether the blend's ends are rounded to whole dimensions
    attention_factor: float = 1.0  # yarn: multiplies cos and sin


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder. Biases and norms that differ between families are flags, not classes."""

    architecture: str  # "llama", "mistral", "qwen2" or "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    attention_bias: bool  # on q, k and v
    output_bias: bool  # on o
    mlp_bias: bool
    qk_norm: bool  # a norm over each head of q and k, before rotary
    layer_windows: tuple[int | None, ...]  # per layer: keys a row sees, itself included; None for all
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str  # what the weights were saved in; one of DTYPES
    name: str = field(default="model", compare=False, repr=False)  # for messages

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"{self.name} has {self.num_heads} query heads, which {self.num_kv_heads} KV heads do not divide."
            )
        if self.head_dim % 2:
            raise CheckpointError(f"{self.name} has an odd head_dim, {self.head_dim}; rotary embedding needs pairs.")
        if self.dtype not in DTYPES:
            raise CheckpointError(f"{self.name} has weights in {self.dtype}; supported are {', '.join(DTYPES)}.")

    @classmethod
    def from_hf(cls, source: str | Path | Mapping[str, Any]) -> ModelConfig:
        """Read a model's folder, or an already parsed config.json.

        A folder's generation_config.json says which ids end a text, where there is one, as it does for transformers.

        Raises:
            ModelNotFound: the folder has no config.json.
            CheckpointError: a file is not JSON, lacks a size, or asks for something that is not supported.
        """
        if isinstance(source, Mapping):
            return _from_hf(dict(source), Path(str(source.get("_name_or_path") or "model")).name)
        folder = Path(source)
        if not (folder / "config.json").is_file():
            raise ModelNotFound(f"{folder} is not a model's folder: it has no config.json.")
        data = read_json(folder / "config.json")
        if (folder / "generation_config.json").is_file():
            data |= _given(read_json(folder / "generation_config.json"), "eos_token_id")
        return _from_hf(data, folder.resolve().name)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """The name and shape of every tensor, as Hugging Face names them."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        linears = {
            "self_attn.q_proj": (queries, self.hidden_size, self.attention_bias),
            "self_attn.k_proj": (keys, self.hidden_size, self.attention_bias),
            "self_attn.v_proj": (keys, self.hidden_size, self.attention_bias),
            "self_attn.o_proj": (self.hidden_size, queries, self.output_bias),
            "mlp.gate_proj": (self.intermediate_size, self.hidden_size, self.mlp_bias),
            "mlp.up_proj": (self.intermediate_size, self.hidden_size, self.mlp_bias),
            "mlp.down_proj": (self.hidden_size, self.intermediate_size, self.mlp_bias),
        }
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (self.hidden_size,),
            "post_attention_layernorm.weight": (self.hidden_size,),
        }
        for linear, (rows, columns, bias) in linears.items():
            layer[f"{linear}.weight"] = (rows, columns)
            layer |= {f"{linear}.bias": (rows,)} if bias else {}
        if self.qk_norm:
            layer |= {f"self_attn.{norm}.weight": (self.head_dim,) for norm in ("q_norm", "k_norm")}
        shapes = {
            "model.embed_tokens.weight": (self.vocab_size, self.hidden_size),
            "model.norm.weight": (self.hidden_size,),
        }
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        for index in range(self.num_layers):
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
        return shapes

    def check_tensor_parallel(self, size: int) -> None:
        """Whether the model splits over ``size`` ranks: every rank has as many query heads and feed-forward columns as
        the others, and either its own KV heads or, when there are more ranks than KV heads, a copy of one.

        Raises:
            BadSetting: it does not; says which sizes do.
        """
        sizes = [ranks for ranks in range(1, self.num_heads + 1) if self._splits_over(ranks)]
        if size not in sizes:
            allowed = f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}" if len(sizes) > 1 else "1"
            why = f"{self.name} has {self.num_heads} query heads and {self.num_kv_heads} KV heads"
            raise BadSetting("tensor_parallel", size, f"{allowed}, since {why}")

    def _splits_over(self, ranks: int) -> bool:
        keys_fit = self.num_kv_heads % ranks == 0 or ranks % self.num_kv_heads == 0
        return keys_fit and self.num_heads % ranks == 0 and self.intermediate_size % ranks == 0


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object.

    Raises:
        CheckpointError: the file holds something else, or cannot be read.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}.") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold one JSON object.")
    return data


def _given(data: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """The entries that are there and not null; files write null where they mean the default."""
    return {key: data[key] for key in keys if data.get(key) is not None}


class FieldReader:
    """Typed access to a model's metadata, with errors that name the model and the key."""

    def __init__(self, data: Mapping[str, Any], name: str) -> None:
        self.data = data
        self.name = name

    def size(self, key: str, default: int | None = None) -> int:
        value = self.data.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self.name}: {key} is {value!r}, but must be a whole number above 0.")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.data.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise CheckpointError(f"{self.name}: {key} is {value!r}, but must be a number above 0.")
        return float(value)

    def only(self, key: str, value: object, allowed: Sequence[object]) -> None:
        if value not in allowed:
            wanted = ", ".join(str(each) for each in allowed)
            raise CheckpointError(f"{self.name}: {key} is {value!r}, which is not supported; supported: {wanted}.")


def _from_hf(data: dict[str, Any], name: str) -> ModelConfig:
    read = FieldReader(data, name)
    family = _family(read)
    hidden_size, num_heads = read.size("hidden_size"), read.size("num_attention_heads")
    num_layers = read.size("num_hidden_layers")
    read.only("hidden_act", data.get("hidden_act", "silu"), ("silu",))
    if data.get("quantization_config"):
        raise CheckpointError(f"{name} has quantised weights, which are supported as GGUF files only.")
    bias = bool(data.get("attention_bias")) and family in ("llama", "qwen3")
    by_default = {"bos_token_id": 1, "eos_token_id": 2} if family in ("llama", "mistral") else {}
    marks = by_default | {key: data[key] for key in ("bos_token_id", "eos_token_id") if key in data}
    scaling = _rope_parameters(read)
    return ModelConfig(
        architecture=family,
        vocab_size=read.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=read.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=read.size("num_key_value_heads", num_heads),
        head_dim=read.size("head_dim", 128 if family == "qwen3" else hidden_size // num_heads),
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        max_positions=read.size("max_position_embeddings"),
        rope_theta=scaling.number("rope_theta", read.number("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(scaling, read),
        tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
        attention_bias=bias or family == "qwen2",
        output_bias=bias,
        mlp_bias=bool(data.get("mlp_bias")) and family == "llama",
        qk_norm=family == "qwen3",
        layer_windows=_layer_windows(read, family, num_layers),
        eos_token_ids=token_ids(marks.get("eos_token_id")),
        bos_token_id=next(iter(token_ids(marks.get("bos_token_id"))), None),
        dtype=str(data.get("dtype") or data.get("torch_dtype") or "float32").removeprefix("torch."),
        name=name,
    )


def _family(read: FieldReader) -> str:
    named = read.data.get("architectures") or []
    if named:  # a draft head says model_type "llama" too, so the architecture has the last word
        read.only("architecture", named[0], tuple(ARCHITECTURES))
        return ARCHITECTURES[named[0]]
    read.only("model_type", read.data.get("model_type"), tuple(ARCHITECTURES.values()))
    return str(read.data["model_type"])


def token_ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    """One id, several or none, however it was written."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _rope_parameters(read: FieldReader) -> FieldReader:
    """transformers 5 writes ``rope_parameters``, which holds theta too; 4 wrote ``rope_scaling`` beside it."""
    parameters = read.data.get("rope_scaling") or read.data.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise CheckpointError(f"{read.name} has rotary settings per layer, which are not supported.")
    part = parameters.get("partial_rotary_factor", read.data.get("partial_rotary_factor"))
    read.only("partial_rotary_factor", part, (None, 1.0))
    return FieldReader(parameters, read.name)


def _rope_scaling(scaling: FieldReader, read: FieldReader) -> RopeScaling | None:
    kind = scaling.data.get("rope_type") or scaling.data.get("type") or "default"
    scaling.only("rope type", kind, ("default", *ROPE_KINDS))
    if kind == "default":
        return None
    max_positions = read.size("max_position_embeddings")
    before = scaling.size("original_max_position_embeddings", max_positions)
    original = read.size("original_max_position_embeddings", before)
    factor = scaling.number("factor", max_positions / original if kind == "yarn" else None)
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        return RopeScaling(kind, factor, original, low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        return RopeScaling(
            kind,
            factor,
            original,
            beta_fast=scaling.number("beta_fast", 32.0),
            beta_slow=scaling.number("beta_slow", 1.0),
            truncate=bool(scaling.data.get("truncate", True)),
            attention_factor=yarn_attention_factor(scaling, factor),
        )
    return RopeScaling(kind, factor, original)


def yarn_attention_factor(scaling: FieldReader, factor: float) -> float:
    """0.1 ln(factor) + 1, as the paper has it (https://arxiv.org/abs/2309.00071), or a quotient of two such."""

    def paper(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    over, under = scaling.data.get("mscale"), scaling.data.get("mscale_all_dim")
    return scaling.number("attention_factor", paper(over) / paper(under) if over and under else paper(1.0))


def _layer_windows(read: FieldReader, family: str, num_layers: int) -> tuple[int | None, ...]:
    if family == "llama":
        return (None,) * num_layers
    window = read.data.get("sliding_window", 4096)  # what transformers takes an absent key to mean
    if window is None or (family != "mistral" and not read.data.get("use_sliding_window", False)):
        return (None,) * num_layers
    window = read.size("sliding_window", 4096)
    if family == "mistral":
        return (window,) * num_layers
    first = read.data.get("max_window_layers", 28)
    kinds = read.data.get("layer_types") or [
        "sliding_attention" if index >= first else "full_attention" for index in range(num_layers)
    ]
    if len(kinds) != num_layers:
        raise CheckpointError(f"{read.name}: layer_types names {len(kinds)} layers, but there are {num_layers}.")
    for kind in kinds:
        read.only("layer type", kind, ("full_attention", "sliding_attention"))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
