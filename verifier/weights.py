"""A model's weights, tensor by tensor, from wherever they lie: a folder of safetensors or a GGUF file.

Knows files and names; checks all names and shapes before the first byte of a weight is read. Knows nothing of layers.
Tensors stay on disk, mapped into memory, until they are asked for, so a model is never held twice. torch is imported
only with the first tensor, because settings are checked against a model without it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from verifier.config import ModelConfig, read_json
from verifier.errors import CheckpointError, ModelNotFound

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

SAFETENSORS_DTYPES = ("F32", "F16", "BF16")
# Tensors that checkpoints carry and a decoder has no use for: old rotary buffers, a head that is tied anyway, and
# Medusa heads, which are a drafter's.
UNUSED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|lm_head\.weight|medusa_head\..+")
EMBEDDING = "model.embed_tokens.weight"
SAMPLE_BYTES = 4096


class TensorFiles(Protocol):
    """Where named tensors come from."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str) -> Tensor:
        """As stored; quantised ones as fp16."""
        ...

    def is_fp16(self, name: str) -> bool:
        """Whether `tensor` is."""
        ...

    def sample(self, name: str) -> bytes:
        """A few bytes that tell one set of weights from another."""
        ...


class ModelFiles(TensorFiles, Protocol):
    """Where a target's tensors come from, whole or in part."""

    def part(self, name: str, dim: int, first: int, end: int) -> Tensor:
        """Rows (``dim`` 0) or columns (1) ``first .. end - 1`` of a tensor, without reading the rest if possible."""
        ...


class Checkpoint:
    """A model's configuration and its weights, which are known to fit one another."""

    def __init__(self, config: ModelConfig, files: ModelFiles) -> None:
        self.config = config
        self._files = files
        self._device: torch.device | None = None
        check_tensors(config.tensor_shapes(), {name: files.shape(name) for name in files.names}, config.name)

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Open a Hugging Face folder or a GGUF file.

        Raises:
            ModelNotFound: neither is there.
            CheckpointError: it is not supported or damaged, or tensors are missing, unexpected or of the wrong shape.
        """
        if path.suffix == ".gguf" and path.is_file():
            files = GGUFTensors(path)
            return cls(files.config, files)
        return cls(ModelConfig.from_hf(path), SafetensorsFolder(path))

    def on(self, device: torch.device) -> Checkpoint:
        """The same, with its tensors on ``device``."""
        moved = copy(self)
        moved._device = device
        return moved

    @property
    def device(self) -> torch.device:
        """Where its tensors come to be; the CPU unless somebody has said otherwise."""
        import torch

        return self._device or torch.device("cpu")

    def tensor(self, name: str) -> Tensor:
        """One tensor by Hugging Face's name, in the precision it was saved in (fp16 if it was quantised)."""
        return self._files.tensor(name).to(self.device)

    def part(self, name: str, dim: int, first: int, end: int) -> Tensor:
        """Rows (``dim`` 0) or columns (1) ``first .. end - 1`` of one tensor; of q and k, rows of whole heads only."""
        return self._files.part(name, dim, first, end).to(self.device)

    @property
    def held_bytes(self) -> int:
        """As `held_bytes`; a tied head is held apart from the embedding."""
        weights = held_bytes(self._files, self.config.tensor_shapes())
        return weights + _matrix_bytes(self._files, EMBEDDING) * self.config.tie_word_embeddings

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal models. Hashes the configuration and, of each tensor, its name and a few bytes."""
        digest = hashlib.sha256(repr(self.config).encode())
        for name in sorted(self._files.names):
            digest.update(name.encode() + self._files.sample(name))
        return digest.hexdigest()


def held_bytes(files: TensorFiles, names: Iterable[str]) -> int:
    """Memory that tensors take at most: matrices as fp16 if they are stored so, embeddings and the rest as fp32."""
    total = 0
    for name in names:
        is_matrix = len(files.shape(name)) > 1 and "embed_tokens" not in name
        total += _matrix_bytes(files, name) if is_matrix else 4 * math.prod(files.shape(name))
    return total


def _matrix_bytes(files: TensorFiles, name: str) -> int:
    return math.prod(files.shape(name)) * (2 if files.is_fp16(name) else 4)


def check_tensors(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], model: str) -> None:
    """Compare names and shapes.

    Raises:
        CheckpointError: they differ; names the first tensors that do.
    """
    for kind, names in (
        ("lacks", [name for name in expected if name not in found]),
        ("has unexpected", [name for name in found if name not in expected and not UNUSED.fullmatch(name)]),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise CheckpointError(f"{model} {kind} tensors: {', '.join(names[:3])}{more}.")
    for name, shape in expected.items():
        if found[name] != shape:
            raise CheckpointError(f"{model}: {name} has shape {list(found[name])}, but must have {list(shape)}.")


class SafetensorsFolder:
    """The safetensors files of a folder: those that the file's index lists, or the file alone.

    Args:
        dtypes: what tensors may be stored in, in the format's own words.

    Raises:
        ModelNotFound: there are none.
        CheckpointError: one is missing, cut short or not what the index says.
    """

    def __init__(
        self, folder: Path, dtypes: Sequence[str] = SAFETENSORS_DTYPES, file: str = "model.safetensors"
    ) -> None:
        self._files = _files_by_tensor(folder, file)
        self._headers = {path: _read_header(path) for path in sorted(set(self._files.values()))}
        self._open: dict[Path, Any] = {}
        for name, path in self._files.items():
            if name not in self._headers[path]:
                raise CheckpointError(f"{path} lacks {name}, which the index says it holds.")
            if (dtype := self._entry(name)["dtype"]) not in dtypes:
                wanted = ", ".join(dtypes)
                raise CheckpointError(f"{path}: {name} is {dtype}, which is not supported; supported: {wanted}.")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entry(name)["shape"])

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._file(name).get_tensor(name)
        return tensor

    def part(self, name: str, dim: int, first: int, end: int) -> Tensor:
        stored = self._file(name).get_slice(name)
        part: Tensor = stored[first:end] if dim == 0 else stored[:, first:end]
        return part

    def is_fp16(self, name: str) -> bool:
        return bool(self._entry(name)["dtype"] == "F16")

    def sample(self, name: str) -> bytes:
        """From the middle: the first rows of an embedding are often the same in all fine-tunes."""
        path, (begin, end) = self._files[name], self._entry(name)["data_offsets"]
        with path.open("rb") as file:
            header_bytes = struct.unpack("<Q", file.read(8))[0]
            file.seek(8 + header_bytes + (begin + end) // 2)
            return file.read(min(SAMPLE_BYTES, (end - begin + 1) // 2))

    def _file(self, name: str) -> Any:
        from safetensors import safe_open

        path = self._files[name]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path]

    def _entry(self, name: str) -> dict[str, Any]:
        entry: dict[str, Any] = self._headers[self._files[name]][name]
        return entry


class GGUFTensors:
    """A GGUF file's tensors under Hugging Face's names."""

    def __init__(self, path: Path) -> None:
        from verifier.gguf import GGUFFile

        self._file = GGUFFile(path)
        self.config = self._file.config

    @property
    def names(self) -> tuple[str, ...]:
        return self._file.names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.shape(name)

    def tensor(self, name: str) -> Tensor:
        return self._tensor(self._file.array(name))

    def part(self, name: str, dim: int, first: int, end: int) -> Tensor:
        """Columns are cut after the rows were dequantised: blocks of quantised numbers lie along a row."""
        return self._tensor(self._file.rows(name, first, end) if dim == 0 else self._file.array(name)[:, first:end])

    def _tensor(self, values: np.ndarray) -> Tensor:
        import torch

        dtype: torch.dtype = getattr(torch, self.config.dtype)
        return torch.tensor(values, dtype=dtype)

    def is_fp16(self, name: str) -> bool:
        return self.config.dtype == "float16"

    def sample(self, name: str) -> bytes:
        return self._file.sample(name, SAMPLE_BYTES)


def _files_by_tensor(folder: Path, file: str) -> dict[str, Path]:
    index, single = folder / f"{file}.index.json", folder / file
    if index.is_file():
        files = {name: folder / each for name, each in read_json(index).get("weight_map", {}).items()}
        for path in files.values():
            if not path.is_file():
                raise CheckpointError(f"{path} is missing, but {index.name} lists it.")
        return files
    if not single.is_file():
        raise ModelNotFound(f"{folder} has no {file} and no {index.name}; other formats are not loaded.")
    return dict.fromkeys(_read_header(single), single)


def _read_header(path: Path) -> dict[str, Any]:
    """name -> dtype, shape and data_offsets, which count from the header's end.

    Source: https://github.com/huggingface/safetensors, section "Format".
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        header_bytes = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if header_bytes > size - 8:
            raise CheckpointError(f"{path} is not a safetensors file, or is cut short.")
        try:
            header: dict[str, Any] = json.loads(file.read(header_bytes))
        except ValueError as error:
            raise CheckpointError(f"{path} is not a safetensors file: its header is not JSON.") from error
    header.pop("__metadata__", None)
    end = 8 + header_bytes + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end > size:
        raise CheckpointError(f"{path} is cut short: it should have {end} bytes, but has {size}.")
    return header
