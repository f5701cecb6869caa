"""What an EAGLE-1 or EAGLE-2 head looks like: the same network, the same files (SafeAILab/EAGLE, ``cnets1.py``).

Knows config keys, tensor names and shapes. Knows no tensors' contents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drafter.head_config import HeadConfig, Shapes, check_vocab_size, read_decoder
from verifier.config import ModelConfig
from verifier.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class EagleConfig(HeadConfig):
    """It has neither a norm before its first layer nor a final one, and its output matrix is the target's."""

    has_fc_bias: bool

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        width = self.decoder.hidden_size
        shapes = {name.removeprefix("model."): shape for name, shape in self.decoder.tensor_shapes().items()}
        for name in ("norm.weight", "lm_head.weight", "layers.0.input_layernorm.weight"):
            del shapes[name]
        shapes["fc.weight"] = (width, 2 * width)
        if self.has_fc_bias:
            shapes["fc.bias"] = (width,)
        del shapes["embed_tokens.weight"]
        if self.has_embedding:
            shapes["embed_tokens.weight"] = (self.vocab_size, width)
        return shapes


def read_eagle_config(data: Mapping[str, Any], shapes: Shapes, target: ModelConfig, name: str) -> EagleConfig:
    """
    Args:
        data: the head's config.json.
        shapes: its tensors' by canonical name.

    Raises:
        CheckpointError: it is no head for this target, in one sentence.
    """
    decoder = read_decoder(data, shapes, target, name)
    if decoder.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{name} continues features of width {decoder.hidden_size}, but those of {target.name} have "
            f"{target.hidden_size}."
        )
    vocab_size = check_vocab_size(data.get("vocab_size"), target, name)
    return EagleConfig(
        decoder=decoder,
        target_vocab_size=target.vocab_size,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        has_embedding="embed_tokens.weight" in shapes,
        has_fc_bias=bool(data.get("bias")) or "fc.bias" in shapes,
    )
