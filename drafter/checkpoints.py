"""Draft heads' files: which method a folder holds, its tensors under one set of names, the map of its vocabulary.

EAGLE-3 heads come in four layouts (SafeAILab, SpecForge/SGLang, NVIDIA ModelOpt, speculators) that differ in names and
keys, not in mathematics. Tensor names decide, since architecture strings say little. Knows no network. Everything is
checked before a target is loaded, in one sentence each.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from drafter.head_config import Eagle3Config, read_eagle3_config
from verifier.config import ModelConfig, read_json
from verifier.errors import CheckpointError, ModelNotFound
from verifier.weights import SAFETENSORS_DTYPES, SafetensorsFolder, TensorFiles, check_tensors

if TYPE_CHECKING:
    from torch import Tensor

MAPS = ("d2t", "t2d")
DTYPES = (*SAFETENSORS_DTYPES, "I64", "I32", "BOOL", "U8")
# Rotary buffers, and a norm that layers after the first own and nobody reads.
UNUSED = re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq|layers\.[1-9]\d*\.hidden_norm\.weight")

logger = logging.getLogger(__name__)


def is_head(folder: Path) -> bool:
    """Whether a folder can hold a draft head at all."""
    return (folder / "config.json").is_file()


def detect(config: Mapping[str, Any], names: Sequence[str]) -> str:
    """The method that a checkpoint is for: eagle3, peagle, mla (EAGLE-3 over latent attention), eagle, medusa or other.

    Args:
        names: canonical tensor names.
    """
    architecture = " ".join(config.get("architectures") or ())
    if config.get("speculators_model_type") == "peagle" or "mask_hidden" in names or "PEagle" in architecture:
        return "peagle"
    if config.get("kv_lora_rank") or any(".kv_a_proj" in name for name in names):
        return "mla"
    if config.get("medusa_num_heads") or any(re.match(r"\d+\.\d+\.|medusa_head\.", name) for name in names):
        return "medusa"
    if "layers.0.hidden_norm.weight" in names:
        return "eagle3"
    if "fc.weight" in names and "lm_head.weight" not in names and "norm.weight" not in names:
        return "eagle"
    marks = (config.get("draft_vocab_size"), config.get("eagle_config"), "Eagle3" in architecture)
    return "eagle3" if any(marks) else "other"


def canonical(name: str) -> str:
    """One name for what the layouts call differently."""
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
    for index, level in enumerate(("low", "mid", "high")):
        name = name.replace(f"aux_norm_{level}.", f"fc_norm.{index}.")
    return name


class PickledTensors:
    """A ``pytorch_model.bin``, unpickled as weights only: a file from the internet runs no code here.

    Raises:
        CheckpointError: it holds anything but named tensors.
    """

    def __init__(self, path: Path) -> None:
        import torch

        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
        except (UnpicklingError, RuntimeError, EOFError) as error:
            raise CheckpointError(f"{path} cannot be read as a file of nothing but weights.") from error
        if not isinstance(tensors, dict) or not all(isinstance(each, torch.Tensor) for each in tensors.values()):
            raise CheckpointError(f"{path} holds something else than named tensors.")
        self._tensors: dict[str, Tensor] = tensors

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def sample(self, name: str) -> bytes:
        flat = self._tensors[name].flatten()
        middle = flat[len(flat) // 2 :][:1024]
        return middle.double().numpy().tobytes()


def _open_files(folder: Path) -> TensorFiles:
    pickled = folder / "pytorch_model.bin"
    if not (folder / "model.safetensors").is_file() and pickled.is_file():
        return PickledTensors(pickled)
    return SafetensorsFolder(folder, DTYPES)


@dataclass(frozen=True)
class HeadCheckpoint:
    """An EAGLE-3 head on disk that is known to fit its target."""

    config: Eagle3Config
    name: str
    _names: Mapping[str, str]  # canonical -> as stored
    _files: TensorFiles

    @classmethod
    def open(cls, folder: Path, target: ModelConfig, layer_ids: Sequence[int] | None = None) -> HeadCheckpoint:
        """
        Args:
            layer_ids: boundary ids of the target's layers to read, instead of what the head says.

        Raises:
            ModelNotFound: there is no head.
            CheckpointError: it is of another kind, of the wrong width or vocabulary, damaged, or its map is wrong.
        """
        if not is_head(folder):
            raise ModelNotFound(f"{folder} is not a draft head's folder: it has no config.json.")
        data, files, name = read_json(folder / "config.json"), _open_files(folder), folder.resolve().name
        names = {canonical(each): each for each in files.names}
        shapes = {each: files.shape(stored) for each, stored in names.items() if not UNUSED.fullmatch(each)}
        _refuse_others(detect(data, tuple(shapes)), name)
        config = read_eagle3_config(data, shapes, target, name, layer_ids)
        weights = {each: shape for each, shape in shapes.items() if each not in MAPS}
        check_tensors(config.tensor_shapes(), weights, name)
        head = cls(config, name, names, files)
        assert len(head.target_ids)  # looked at now, so that a wrong map is found at the start
        return head

    def num_bytes(self, num_slots: int) -> int:
        """Memory at most: weights as fp32, and for each slot keys and values of the head and a fused feature."""
        decoder = self.config.decoder
        weights = sum(map(math.prod, self.config.tensor_shapes().values()))
        cache = 2 * decoder.num_layers * decoder.num_kv_heads * decoder.head_dim
        return 4 * (weights + num_slots * (cache + decoder.hidden_size))

    def tensor(self, name: str) -> Tensor:
        """One tensor by canonical name, with or without ``model.`` before it, as saved."""
        return self._files.tensor(self._names[name.removeprefix("model.")])

    def has(self, name: str) -> bool:
        return name in self._names

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal heads that read equal layers."""
        digest = hashlib.sha256(repr(self.config).encode())
        for name in sorted(self._names):
            digest.update(name.encode() + self._files.sample(self._names[name]))
        return digest.hexdigest()

    @cached_property
    def target_ids(self) -> Tensor:
        """The target id of each draft id, ``[draft vocabulary]`` int64, ascending.

        Raises:
            CheckpointError: the map is missing or wrong; names the tensor and the index.
        """
        return read_map(
            self.tensor("d2t") if self.has("d2t") else None,
            self.tensor("t2d") if self.has("t2d") else None,
            self.config,
            self.name,
        )


def _refuse_others(kind: str, name: str) -> None:
    refused = {
        "peagle": "is a P-EAGLE head, which drafts in parallel and is not supported",
        "mla": "is an EAGLE-3 head with latent attention (MLA), which is not supported",
        "eagle": "is an EAGLE-1 head, not an EAGLE-3 one",
        "medusa": "has Medusa heads, not an EAGLE-3 one",
        "other": "is not an EAGLE-3 head: it has neither a hidden_norm nor any key that says so",
    }
    if kind in refused:
        raise CheckpointError(f"{name} {refused[kind]}.")


def read_map(d2t: Tensor | None, t2d: Tensor | None, config: Eagle3Config, name: str) -> Tensor:
    """Target ids ``[draft vocabulary]`` int64 from the stored offsets ``d2t`` and the mask ``t2d``.

    ``d2t[i]`` is what is added to draft id i. A head over the target's whole vocabulary needs no map; ids that pad it
    beyond the target's are left out.

    Raises:
        CheckpointError: a map is missing, or does not lead to different target ids in ascending order.
    """
    import torch

    size, num_ids = config.draft_vocab_size, config.target_vocab_size
    own = torch.arange(size)
    if config.maps_all:
        return own[:num_ids]
    if d2t is None:
        raise CheckpointError(f"{name} lacks d2t, the map of its {size} draft ids to the target's {num_ids}.")
    if d2t.shape != (size,):
        raise CheckpointError(f"{name}: d2t has shape {list(d2t.shape)}, but must have [{size}].")
    offsets = d2t.long()
    if not offsets.any():
        raise CheckpointError(f"{name}: d2t is all zeros, so the map of its draft vocabulary was never saved.")
    if _is_absolute(offsets, t2d, num_ids):
        logger.warning("%s: d2t holds target ids rather than offsets; it is read as such.", name)
        offsets = offsets - own
    ids = own + offsets
    _first(offsets < 0, f"{name}: d2t[{{}}] is negative, but offsets begin at 0 and never fall.")
    _first(ids >= num_ids, f"{name}: d2t[{{}}] leads beyond the target's {num_ids} token ids.")
    _first(ids.diff(prepend=ids.new_tensor([-1])) <= 0, f"{name}: d2t[{{}}] leads to a token id that is not new.")
    if t2d is not None:
        _check_mask(t2d, ids, config, name)
    return ids


def _is_absolute(d2t: Tensor, t2d: Tensor | None, num_ids: int) -> bool:
    """Whether these can only be ids: ascending ones that as offsets would lead out, and that t2d marks."""
    ascending = bool((d2t.diff() > 0).all()) and int(d2t[0]) >= 0 and int(d2t[-1]) < num_ids
    leads_out = int(d2t[-1]) + len(d2t) - 1 >= num_ids
    return ascending and leads_out and t2d is not None and len(t2d) > int(d2t[-1]) and bool(t2d[d2t].bool().all())


def _check_mask(t2d: Tensor, ids: Tensor, config: Eagle3Config, name: str) -> None:
    if t2d.dim() != 1 or len(t2d) not in (config.vocab_size, config.target_vocab_size):
        raise CheckpointError(f"{name}: t2d has shape {list(t2d.shape)}, but must have [{config.vocab_size}].")
    _first(ids >= len(t2d), f"{name}: d2t[{{}}] leads beyond t2d.")
    _first(~t2d.bool()[ids], f"{name}: d2t[{{}}] leads to a token id that t2d says is not in the draft vocabulary.")
    marked = int(t2d.bool().sum())
    if marked != len(ids):
        raise CheckpointError(f"{name}: t2d marks {marked} token ids, but the draft vocabulary has {len(ids)}.")


def _first(wrong: Tensor, sentence: str) -> None:
    """Raises ``sentence`` with the first index at which ``wrong [n]`` is true."""
    if wrong.any():
        raise CheckpointError(sentence.format(int(wrong.int().argmax())))
