"""What a draft head looks like, an EAGLE-3 one above all: the spellings of SafeAILab, SpecForge, ModelOpt and
speculators as one set of flags.

Knows config keys, tensor names and shapes, and refuses what would draft wrongly. Knows no tensors' contents. Sources:
the loaders of SafeAILab/EAGLE (``cnets.py``), vLLM (``llama_eagle3.py``), SGLang and vllm-project/speculators.
"""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verifier.config import ModelConfig
from verifier.errors import CheckpointError

MAX_PADDING = 1024  # rows by which two vocabularies of one tokenizer may differ: tables are padded to round numbers

logger = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class HeadConfig(ABC):
    """One head for one target."""

    decoder: ModelConfig  # the head's own; its vocab_size is the target's
    target_vocab_size: int
    vocab_size: int  # what the head was made for: the target's, give or take padding
    draft_vocab_size: int
    has_embedding: bool  # of its own; otherwise it uses the target's

    @abstractmethod
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight by canonical name; the maps d2t and t2d are looked at apart."""

    @property
    def maps_all(self) -> bool:
        """Whether draft ids are target ids, so that no map is needed."""
        return self.draft_vocab_size >= min(self.vocab_size, self.target_vocab_size)


@dataclass(frozen=True, slots=True)
class Eagle3Config(HeadConfig):
    """Flags that set EAGLE-3 heads apart."""

    target_hidden_size: int
    layer_ids: tuple[int, ...]  # boundary ids of the target's tapped layers, ascending
    fuses_layers: bool  # False: it reads the target's last hidden state after the final norm, and there is no fc
    norm_before_residual: bool  # the residual stream starts from the normed hidden state
    norm_before_fc: bool
    fc_norm: bool  # a norm for each tapped layer
    norm_output: bool  # the hidden state that is fed back is the one after the final norm
    has_output: bool  # of its own; otherwise it uses the target's

    @property
    def fused_width(self) -> int:
        return len(self.layer_ids) * self.target_hidden_size

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        width = self.decoder.hidden_size
        shapes = {name.removeprefix("model."): shape for name, shape in self.decoder.tensor_shapes().items()}
        for name in ("q_proj", "k_proj", "v_proj"):
            rows, _ = shapes[f"layers.0.self_attn.{name}.weight"]
            shapes[f"layers.0.self_attn.{name}.weight"] = (rows, 2 * width)
        shapes["layers.0.hidden_norm.weight"] = (width,)
        shapes["embed_tokens.weight"] = (self.vocab_size, width)
        shapes["lm_head.weight"] = (self.draft_vocab_size, width)
        if self.fuses_layers:
            shapes["fc.weight"] = (width, self.fused_width)
        if self.norm_before_fc:
            shapes["input_norm.weight"] = (self.fused_width,)
        if self.fc_norm:
            shapes |= {f"fc_norm.{index}.weight": (self.target_hidden_size,) for index in range(len(self.layer_ids))}
        absent = [("embed_tokens.weight", self.has_embedding), ("lm_head.weight", self.has_output)]
        for name, is_there in absent:
            if not is_there:
                del shapes[name]
        return shapes


def read_eagle3_config(
    data: Mapping[str, Any], shapes: Shapes, target: ModelConfig, name: str, layer_ids: Sequence[int] = ()
) -> Eagle3Config:
    """
    Args:
        data: the head's config.json.
        shapes: its tensors' by canonical name.
        layer_ids: boundary ids of the tapped layers, instead of what the config says; none: as that says.

    Raises:
        CheckpointError: it is no head for this target, or one that is not supported; in one sentence.
    """
    nested = data.get("eagle_config") or {}
    body = data.get("transformer_layer_config") or data
    decoder = read_decoder(body, shapes, target, name)
    fuses_layers = bool(nested.get("use_aux_hidden_state", data.get("use_aux_hidden_state", True)))
    vocab_size = check_vocab_size(body.get("vocab_size"), target, name)
    own_rows = shapes["lm_head.weight"][0] if "lm_head.weight" in shapes else vocab_size

    def flag(key: str, default: bool) -> bool:
        given = data.get(key, nested.get(key))
        return default if given is None else bool(given)

    config = Eagle3Config(
        decoder=decoder,
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        layer_ids=_layer_ids(data, nested, target, name, layer_ids) if fuses_layers else (target.num_layers,),
        fuses_layers=fuses_layers,
        # What vLLM takes a missing key to mean: the speculators library trains with it unless told otherwise.
        norm_before_residual=flag("norm_before_residual", data.get("speculators_model_type") == "eagle3"),
        norm_before_fc=flag("norm_before_fc", "input_norm.weight" in shapes),
        fc_norm=flag("fc_norm", flag("use_aux_norm", "fc_norm.0.weight" in shapes)),
        norm_output=flag("norm_output", False),
        vocab_size=vocab_size,
        draft_vocab_size=data.get("draft_vocab_size") or own_rows,
        has_embedding="embed_tokens.weight" in shapes,
        has_output="lm_head.weight" in shapes,
    )
    _check_fit(config, shapes, target, name)
    return config


def _check_fit(config: Eagle3Config, shapes: Shapes, target: ModelConfig, name: str) -> None:
    width = config.decoder.hidden_size
    if config.norm_before_fc and config.fc_norm:
        raise CheckpointError(f"{name} asks for norm_before_fc and fc_norm, which exclude one another.")
    if config.fuses_layers and "fc.weight" in shapes and shapes["fc.weight"][-1] != config.fused_width:
        raise CheckpointError(
            f"{name} fuses features of width {shapes['fc.weight'][-1]} altogether (fc.weight), but "
            f"{len(config.layer_ids)} layers of {target.name} give {config.fused_width}."
        )
    needs_width = [
        (not config.fuses_layers, "reads the target's last hidden state as it is"),
        (not config.has_embedding, "has no embed_tokens.weight and would use the target's"),
        (not config.has_output, "has no lm_head.weight and would use the target's"),
    ]
    for needed, why in needs_width:
        if needed and width != target.hidden_size:
            raise CheckpointError(
                f"{name} {why}, but its hidden size is {width} and that of {target.name} is {target.hidden_size}."
            )
    if not config.has_output and not config.maps_all:
        raise CheckpointError(f"{name} lacks lm_head.weight for its draft vocabulary of {config.draft_vocab_size}.")


def check_vocab_size(vocab_size: int | None, target: ModelConfig, name: str) -> int:
    """What a draft network was made for; by default the target's.

    Raises:
        CheckpointError: it differs from the target's by more than padding.
    """
    vocab_size = vocab_size or target.vocab_size
    if abs(vocab_size - target.vocab_size) > MAX_PADDING:
        raise CheckpointError(
            f"{name} was made for a vocabulary of {vocab_size} tokens, but that of {target.name} has "
            f"{target.vocab_size}."
        )
    return vocab_size


def read_decoder(body: Mapping[str, Any], shapes: Shapes, target: ModelConfig, name: str) -> ModelConfig:
    """The head's layers as an ordinary decoder; how many there are, and their biases, is read off the tensors."""
    layers = {int(match[1]) for tensor in shapes if (match := re.match(r"layers\.(\d+)\.", tensor))}
    if not layers:
        raise CheckpointError(f"{name} has no decoder layer, so it is no draft head.")
    attention = "layers.0.self_attn."
    has_bias = bool(body.get("attention_bias") or body.get("qkv_bias"))
    has_head_norms = f"{attention}q_norm.weight" in shapes
    settings = {
        **body,
        "architectures": None,
        "model_type": "qwen3" if has_head_norms else "llama",
        "num_hidden_layers": len(layers),
        "vocab_size": target.vocab_size,
        "head_dim": _head_dim(body, shapes, name),
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "_name_or_path": name,
    }
    return replace(
        ModelConfig.from_hf(settings),
        attention_bias=has_bias or f"{attention}q_proj.bias" in shapes,
        output_bias=f"{attention}o_proj.bias" in shapes,
        mlp_bias="layers.0.mlp.down_proj.bias" in shapes,
    )


def _head_dim(body: Mapping[str, Any], shapes: Shapes, name: str) -> int:
    given = body.get("head_dim")
    heads = body.get("num_attention_heads")
    rows = shapes.get("layers.0.self_attn.q_proj.weight", (0,))[0]
    if given is None and heads and rows:
        given = rows // heads
    if not isinstance(given, int) or given < 1:
        raise CheckpointError(
            f"{name} says neither by head_dim nor by layers.0.self_attn.q_proj how wide its heads are."
        )
    return given


def _layer_ids(
    data: Mapping[str, Any], nested: Mapping[str, Any], target: ModelConfig, name: str, override: Sequence[int]
) -> tuple[int, ...]:
    """Boundary ids: the residual stream after that many layers. Explicit ids come in two conventions.

    Top-level ones are boundary ids. Nested ones count layers' outputs from 0 if the first is 1, as SpecForge and
    ModelOpt write them; ids such as 2, 30, 58, or with the number of layers among them, can only be boundary ids.
    """
    last = target.num_layers
    top, inner = data.get("eagle_aux_hidden_state_layer_ids"), nested.get("eagle_aux_hidden_state_layer_ids")
    top = top or nested.get("layer_ids")
    if override:
        ids, origin = tuple(override), "as asked"
    elif top:
        ids, origin = tuple(top), "as its config says"
    elif inner:
        counts_outputs = max(inner) != last and inner[0] == 1
        ids = tuple(each + counts_outputs for each in inner)
        origin = "whose outputs its config numbers from 0" if counts_outputs else "as its config says"
    else:
        ids, origin = (2, last // 2, last - 3), "by default, since its config names none"
    wrong = [each for each in ids if not 0 <= each <= last]
    if wrong:
        raise CheckpointError(f"{name} reads layer {wrong[0]} of its target, but {target.name} has {last}.")
    if list(ids) != sorted(set(ids)):
        raise CheckpointError(f"{name} reads layers {list(ids)}, which must be different and ascending.")
    level = logging.WARNING if "default" in origin else logging.INFO
    logger.log(level, "%s reads the residual stream after layers %s, %s.", name, ", ".join(map(str, ids)), origin)
    return ids
