"""Medusa heads' files: those of FasterDecoding, alone or inside a whole model, and vLLM's, under one set of names.

    blocks.{head}.layers.{layer}.weight, .bias   residual blocks       [H, H], [H]
    lm_heads.{head}.weight                       own output matrices   [draft vocabulary, H]
    lm_head.weight                               one for all heads instead
    token_map                                    the target's id of each draft id, for a truncated vocabulary

Tensors decide, not configs: published ones say two heads where there are five. Knows names, shapes and the map; knows
no network. Everything is checked before a target is loaded, in one sentence each. Sources: FasterDecoding/Medusa
(``medusa_model.py``) and vLLM (``models/medusa.py``).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from drafter.checkpoints import DTYPES, PickledTensors, open_files
from drafter.head_config import MAX_PADDING, Shapes
from verifier.config import ModelConfig, read_json
from verifier.errors import CheckpointError
from verifier.weights import SafetensorsFolder, TensorFiles, check_tensors, held_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

HEADS_FILE = "medusa_lm_head"
TOKEN_MAP = "token_map"
MEDUSA_1 = re.compile(r"(\d+)\.(\d+)\.(linear\.)?(weight|bias)")
MEDUSA_2 = "medusa_head."  # before Medusa-1's names, among those of a whole model


def is_medusa(folder: Path) -> bool:
    """Whether a folder's files or its config say that it holds Medusa heads."""
    if any((folder / f"{HEADS_FILE}{suffix}").is_file() for suffix in (".pt", ".safetensors")):
        return True
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    return "medusa_num_heads" in config or config.get("model_type") == "medusa"


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """What the heads of one target look like."""

    hidden_size: int  # the target's
    num_heads: int
    num_layers: int  # residual blocks of each head
    has_bias: bool
    outputs: Literal["own", "shared", "target"]  # a matrix for each head, one for all, or the target's own
    num_outputs: int  # rows of such a matrix
    logit_scale: float

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight by canonical name; the map is looked at apart."""
        width = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        for head in range(self.num_heads):
            for layer in range(self.num_layers):
                shapes[f"blocks.{head}.layers.{layer}.weight"] = (width, width)
                if self.has_bias:
                    shapes[f"blocks.{head}.layers.{layer}.bias"] = (width,)
            if self.outputs == "own":
                shapes[f"lm_heads.{head}.weight"] = (self.num_outputs, width)
        if self.outputs == "shared":
            shapes["lm_head.weight"] = (self.num_outputs, width)
        return shapes


@dataclass(frozen=True)
class MedusaCheckpoint:
    """Medusa heads on disk that are known to fit their target."""

    config: MedusaConfig
    name: str
    _vocab_size: int  # the target's
    _names: Mapping[str, str]  # canonical -> as stored
    _files: TensorFiles
    _device: torch.device | str = "cpu"  # for its tensors, the map of ids apart

    @classmethod
    def open(cls, folder: Path, target: ModelConfig) -> MedusaCheckpoint:
        """
        Raises:
            ModelNotFound: there are no weights.
            CheckpointError: they are of the wrong width or vocabulary, incomplete or damaged, or their map is wrong.
        """
        files, name = _open_files(folder), folder.resolve().name
        data = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
        names = _canonical_names(files.names, shares_output=bool(data.get("original_lm_head")))
        shapes = {each: files.shape(stored) for each, stored in names.items()}
        config = read_medusa_config(data, shapes, target, name)
        check_tensors(config.tensor_shapes(), {each: shapes[each] for each in shapes if each != TOKEN_MAP}, name)
        heads = cls(config, name, target.vocab_size, names, files)
        assert len(heads.target_ids)  # looked at now, so that a wrong map is found at the start
        return heads

    def num_bytes(self, num_slots: int) -> int:
        """Memory at most: weights, and for each slot the hidden state that heads read."""
        weights = held_bytes(self._files, [self._names[name] for name in self.config.tensor_shapes()])
        return weights + 4 * num_slots * self.config.hidden_size

    def tensor(self, name: str) -> Tensor:
        """One tensor by canonical name, as saved."""
        return self._files.tensor(self._names[name]).to(self._device)

    def on(self, device: torch.device) -> MedusaCheckpoint:
        """The same, with its tensors on ``device``."""
        return replace(self, _device=device)

    def output(self, head: int) -> Tensor:
        """The output matrix ``[len(target_ids), hidden]`` of a head."""
        weight = self.tensor("lm_head.weight" if self.config.outputs == "shared" else f"lm_heads.{head}.weight")
        return weight if len(weight) == len(self.target_ids) else weight[self.target_ids]

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal heads."""
        digest = hashlib.sha256(repr(self.config).encode())
        for name in sorted(self._names):
            digest.update(name.encode() + self._files.sample(self._names[name]))
        return digest.hexdigest()

    @cached_property
    def target_ids(self) -> Tensor:
        """The target id of each draft id, ``[draft vocabulary]`` int64. Ids that only pad a vocabulary are left out.

        Raises:
            CheckpointError: the map does not lead to different ids of the target.
        """
        import torch

        if TOKEN_MAP not in self._names:
            return torch.arange(min(self.config.num_outputs, self._vocab_size))
        ids = self._files.tensor(self._names[TOKEN_MAP]).long()
        outputs = self.config.num_outputs
        if ids.dim() != 1 or len(ids) > outputs:
            raise CheckpointError(f"{self.name}: {TOKEN_MAP} has shape {list(ids.shape)} for {outputs} outputs.")
        # Matrices over the whole vocabulary are cut to the rows that the map names.
        num_ids = self._vocab_size if len(ids) == outputs else min(outputs, self._vocab_size)
        wrong = (ids < 0) | (ids >= num_ids)
        if wrong.any():
            index = int(wrong.int().argmax())
            raise CheckpointError(f"{self.name}: {TOKEN_MAP}[{index}] is {int(ids[index])}, but ids end at {num_ids}.")
        if len(ids.unique()) < len(ids):
            raise CheckpointError(f"{self.name}: {TOKEN_MAP} holds a token id twice.")
        return ids


def read_medusa_config(data: Mapping[str, Any], shapes: Shapes, target: ModelConfig, name: str) -> MedusaConfig:
    """
    Args:
        data: the heads' config.json, or that of the whole model around them.
        shapes: their tensors' by canonical name.

    Raises:
        CheckpointError: these are no heads for this target; in one sentence.
    """
    blocks = [tuple(map(int, re.findall(r"\d+", each))) for each in shapes if each.startswith("blocks.")]
    own = [int(each.split(".")[1]) for each in shapes if each.startswith("lm_heads.")]
    if not blocks and not own:
        raise CheckpointError(f"{name} holds no Medusa heads: no tensor is called as theirs are.")
    widths = {shape[-1] for each, shape in shapes.items() if each != TOKEN_MAP} - {target.hidden_size}
    if widths:
        raise CheckpointError(
            f"{name} reads hidden states of width {min(widths)}, but those of {target.name} have {target.hidden_size}."
        )
    outputs, num_outputs = _outputs(shapes, target)
    if outputs == "target" and not data.get("original_lm_head"):
        raise CheckpointError(f"{name} lacks the heads' output matrices, such as lm_heads.0.weight.")
    _check_vocabulary(data, shapes, num_outputs, target, name)
    return MedusaConfig(
        hidden_size=target.hidden_size,
        num_heads=1 + max([head for head, *_ in blocks] + own),
        num_layers=1 + max((layer for _, layer in blocks), default=-1),
        has_bias=any(each.startswith("blocks.") and each.endswith(".bias") for each in shapes),
        outputs=outputs,
        num_outputs=num_outputs,
        logit_scale=float(data.get("logit_scale", 1.0)) if data.get("model_type") == "medusa" else 1.0,
    )


def _outputs(shapes: Shapes, target: ModelConfig) -> tuple[Literal["own", "shared", "target"], int]:
    """Whose output matrices the heads use, and their rows."""
    for name, shape in shapes.items():
        if name.startswith("lm_heads."):
            return "own", shape[0]
    if "lm_head.weight" in shapes:
        return "shared", shapes["lm_head.weight"][0]
    return "target", target.vocab_size


def _check_vocabulary(
    data: Mapping[str, Any], shapes: Shapes, num_outputs: int, target: ModelConfig, name: str
) -> None:
    vocab_size = data.get("vocab_size") or (target.vocab_size if TOKEN_MAP in shapes else num_outputs)
    truncated = data.get("truncated_vocab_size") or vocab_size
    if abs(vocab_size - target.vocab_size) > MAX_PADDING:
        raise CheckpointError(
            f"{name} was made for a vocabulary of {vocab_size} tokens, but that of {target.name} has "
            f"{target.vocab_size}."
        )
    if TOKEN_MAP not in shapes and (truncated < vocab_size or abs(num_outputs - target.vocab_size) > MAX_PADDING):
        raise CheckpointError(
            f"{name} lacks {TOKEN_MAP}, the map of its {min(truncated, num_outputs)} draft ids to the target's "
            f"{target.vocab_size}."
        )


def _canonical_names(names: tuple[str, ...], shares_output: bool) -> dict[str, str]:
    """Canonical names to stored ones: of the heads alone where they are part of a whole model."""
    inside = [name for name in names if name.startswith(MEDUSA_2)]
    canonical = {_canonical(name): name for name in inside or names}
    if shares_output and "lm_heads.0.weight" in canonical and "lm_heads.1.weight" not in canonical:
        canonical["lm_head.weight"] = canonical.pop("lm_heads.0.weight")
    return canonical


def _canonical(name: str) -> str:
    match = MEDUSA_1.fullmatch(name.removeprefix(MEDUSA_2))
    if match is None:
        return name.removeprefix("medusa_heads.")
    head, layer, linear, kind = match.groups()
    return f"blocks.{head}.layers.{layer}.{kind}" if linear else f"lm_heads.{head}.{kind}"


def _open_files(folder: Path) -> TensorFiles:
    if (folder / f"{HEADS_FILE}.safetensors").is_file():
        return SafetensorsFolder(folder, DTYPES, f"{HEADS_FILE}.safetensors")
    pickled = folder / f"{HEADS_FILE}.pt"
    return PickledTensors(pickled) if pickled.is_file() else open_files(folder)
