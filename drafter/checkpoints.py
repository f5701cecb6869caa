"""Draft networks' files: what kind a folder holds, and its tensors under one set of names.

EAGLE-3 heads come in four layouts (SafeAILab, SpecForge/SGLang, NVIDIA ModelOpt, speculators) that differ in names and
keys, not in mathematics; EAGLE-1 and EAGLE-2 heads in one. Tensor names decide, since architecture strings say little.
Knows no network. Everything is checked before a target is loaded, in one sentence each.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from drafter.eagle_config import EagleConfig, read_eagle_config
from drafter.head_config import Eagle3Config, HeadConfig, Shapes, read_eagle3_config
from drafter.vocabulary import read_map
from verifier.config import ModelConfig, read_json
from verifier.errors import CheckpointError, ModelNotFound
from verifier.weights import SAFETENSORS_DTYPES, SafetensorsFolder, TensorFiles, check_tensors, held_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAPS = ("d2t", "t2d")
DTYPES = (*SAFETENSORS_DTYPES, "I64", "I32", "BOOL", "U8")
PICKLED = "pytorch_model.bin"
# Rotary buffers, and a norm that layers after the first own and nobody reads.
UNUSED = re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq|layers\.[1-9]\d*\.hidden_norm\.weight")

AnyConfig = TypeVar("AnyConfig", bound=HeadConfig, covariant=True)


def detect(config: Mapping[str, Any], shapes: Shapes) -> str:
    """What a checkpoint is: eagle3, eagle, medusa, model (a whole one), peagle, mla (EAGLE-3 over latent attention),
    speculators (another method in that library's format) or other.

    Args:
        shapes: the tensors', by canonical name.
    """
    architecture = " ".join(config.get("architectures") or ())
    method = config.get("speculators_model_type")
    if method == "peagle" or "mask_hidden" in shapes or "PEagle" in architecture:
        return "peagle"
    if method not in (None, "eagle3"):
        return "speculators"
    if config.get("kv_lora_rank") or any(".kv_a_proj" in name for name in shapes):
        return "mla"
    if config.get("medusa_num_heads") or any(re.match(r"\d+\.\d+\.|medusa_head\.", name) for name in shapes):
        return "medusa"
    if "layers.0.hidden_norm.weight" in shapes:
        return "eagle3"
    marks = (method, config.get("draft_vocab_size"), config.get("eagle_config"), "Eagle3" in architecture)
    if any(marks):
        return "eagle3"
    if "fc.weight" in shapes:
        rows, columns = shapes["fc.weight"]
        return "eagle" if columns == 2 * rows and "lm_head.weight" not in shapes else "other"
    return (
        "model" if {"embed_tokens.weight", "norm.weight", "layers.0.input_layernorm.weight"} <= {*shapes} else "other"
    )


def canonical(name: str) -> str:
    """One name for what the layouts call differently."""
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
    for index, level in enumerate(("low", "mid", "high")):
        name = name.replace(f"aux_norm_{level}.", f"fc_norm.{index}.")
    return name


class PickledTensors:
    """``pytorch_model.bin`` in one file or several, unpickled as weights only: a file from the internet runs no code.

    Raises:
        CheckpointError: one holds anything but named tensors.
    """

    def __init__(self, *paths: Path) -> None:
        self._tensors: dict[str, Tensor] = {}
        for path in paths:
            self._tensors |= _unpickle(path)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def is_fp16(self, name: str) -> bool:
        return str(self._tensors[name].dtype) == "torch.float16"

    def sample(self, name: str) -> bytes:
        flat = self._tensors[name].flatten()
        middle = flat[len(flat) // 2 :][:1024]
        return middle.double().numpy().tobytes()


def _unpickle(path: Path) -> dict[str, Tensor]:
    import torch

    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{path} cannot be read as a file of nothing but weights.") from error
    if not isinstance(tensors, dict) or not all(isinstance(each, torch.Tensor) for each in tensors.values()):
        raise CheckpointError(f"{path} holds something else than named tensors.")
    return tensors


def open_files(folder: Path) -> TensorFiles:
    """Safetensors where there are any, else what is pickled.

    Raises:
        ModelNotFound, CheckpointError: there is neither, or a file is missing or damaged.
    """
    if any((folder / f"model.safetensors{suffix}").is_file() for suffix in ("", ".index.json")):
        return SafetensorsFolder(folder, DTYPES)
    index = folder / f"{PICKLED}.index.json"
    if index.is_file():
        paths = [folder / file for file in sorted(set(read_json(index).get("weight_map", {}).values()))]
        for path in paths:
            if not path.is_file():
                raise CheckpointError(f"{path} is missing, but {index.name} lists it.")
        return PickledTensors(*paths)
    if (folder / PICKLED).is_file():
        return PickledTensors(folder / PICKLED)
    raise ModelNotFound(f"{folder} has neither safetensors nor a {PICKLED}.")


class DraftFolder:
    """A folder with a draft network.

    Attributes:
        data: its config.json.
        shapes: of its tensors, by canonical name.

    Raises:
        ModelNotFound: there is no config.json, or there are no weights.
        CheckpointError: a file is damaged.
    """

    def __init__(self, path: Path) -> None:
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{path} is not a draft model's folder: it has no config.json.")
        self.path = path
        self.name = path.resolve().name
        self.data = read_json(path / "config.json")
        self._files = open_files(path)
        self._names = {canonical(each): each for each in self._files.names}
        self.shapes: Shapes = {
            each: self._files.shape(stored) for each, stored in self._names.items() if not UNUSED.fullmatch(each)
        }

    @property
    def kind(self) -> str:
        """As `detect` says."""
        return detect(self.data, self.shapes)

    def tensor(self, name: str) -> Tensor:
        """By canonical name, as saved."""
        return self._files.tensor(self._names[name])

    def held_bytes(self, names: Iterable[str]) -> int:
        """As `verifier.weights.held_bytes`, by canonical name."""
        return held_bytes(self._files, [self._names[name] for name in names])

    def fingerprint(self, config: HeadConfig) -> str:
        digest = hashlib.sha256(repr(config).encode())
        for name in sorted(self._names):
            digest.update(name.encode() + self._files.sample(self._names[name]))
        return digest.hexdigest()


@dataclass(frozen=True)
class HeadCheckpoint(Generic[AnyConfig]):
    """A head on disk.

    Raises:
        CheckpointError: tensors are missing, unexpected or of the wrong shape, or the vocabulary's map is wrong.
    """

    config: AnyConfig
    folder: DraftFolder
    device: torch.device | str = "cpu"  # for its tensors, the map of ids apart

    def __post_init__(self) -> None:
        weights = {name: shape for name, shape in self.folder.shapes.items() if name not in MAPS}
        check_tensors(self.config.tensor_shapes(), weights, self.folder.name)
        assert len(self.target_ids)  # looked at now, so that a wrong map is found at the start

    def num_bytes(self, num_slots: int) -> int:
        """Memory at most: weights, and for each slot keys and values of the head and a fused feature."""
        decoder = self.config.decoder
        cache = 2 * decoder.num_layers * decoder.num_kv_heads * decoder.head_dim
        weights = self.folder.held_bytes(self.config.tensor_shapes())
        return weights + 4 * num_slots * (cache + decoder.hidden_size)

    def tensor(self, name: str) -> Tensor:
        """One tensor by canonical name, with or without ``model.`` before it, as saved."""
        return self.folder.tensor(name.removeprefix("model.")).to(self.device)

    def on(self, device: torch.device) -> HeadCheckpoint[AnyConfig]:
        """The same, with its tensors on ``device``."""
        return replace(self, device=device)

    def optional(self, name: str) -> Tensor | None:
        return self.tensor(name) if name in self.folder.shapes else None

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal heads that read equal layers."""
        return self.folder.fingerprint(self.config)

    @cached_property
    def target_ids(self) -> Tensor:
        """The target id of each draft id, ``[draft vocabulary]`` int64, ascending.

        Raises:
            CheckpointError: the map is missing or wrong; names the tensor and the index.
        """
        d2t, t2d = (self.folder.tensor(name) if name in self.folder.shapes else None for name in MAPS)
        return read_map(d2t, t2d, self.config, self.folder.name)


def open_eagle3(
    folder: DraftFolder, target: ModelConfig, layer_ids: Sequence[int] = ()
) -> HeadCheckpoint[Eagle3Config]:
    """
    Args:
        layer_ids: boundary ids of the target's layers to read, instead of what the head says.

    Raises:
        CheckpointError: it does not fit the target, is damaged or not supported; in one sentence.
    """
    return HeadCheckpoint(read_eagle3_config(folder.data, folder.shapes, target, folder.name, layer_ids), folder)


def open_eagle(folder: DraftFolder, target: ModelConfig) -> HeadCheckpoint[EagleConfig]:
    """
    Raises:
        CheckpointError: it does not fit the target, is damaged or not supported; in one sentence.
    """
    return HeadCheckpoint(read_eagle_config(folder.data, folder.shapes, target, folder.name), folder)
