"""Training data on disk: conversations with the target's hidden states, in shards that are safetensors files.

    ids       int32    [tokens]               all conversations, one after another
    lengths   int32    [conversations]        tokens of each
    mask      uint8    [tokens]               1 where the target wrote the token in the role that is trained on
    kind      int32    [conversations]        index into the header's kinds
    features  float16  [tokens, taps * H]     hidden states after the layers of ``layer_ids``, side by side
    last      float16  [tokens, H]            the residual stream after the last layer, before the final norm

The header says which model wrote them. Knows files alone: not how conversations are made, nor what is learnt from them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafter.training.files import written_whole
from verifier.errors import CheckpointError, ModelNotFound

FORMAT = "1"
SUFFIX = ".safetensors"


@dataclass(frozen=True)
class ShardHeader:
    """Where a shard comes from. Shards of different models or layers do not mix."""

    model: str
    fingerprint: str  # of the model's checkpoint
    layer_ids: tuple[int, ...]  # boundary ids, ascending
    kinds: tuple[str, ...]  # of conversations: chat, code, …
    seed: int

    def to_metadata(self) -> dict[str, str]:
        return {
            "format": FORMAT,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "layer_ids": ",".join(map(str, self.layer_ids)),
            "kinds": ",".join(self.kinds),
            "seed": str(self.seed),
        }

    @classmethod
    def from_metadata(cls, metadata: dict[str, str], path: Path) -> Self:
        if metadata.get("format") != FORMAT:
            raise CheckpointError(f"{path} is not a shard of training data in format {FORMAT}.")
        return cls(
            model=metadata["model"],
            fingerprint=metadata["fingerprint"],
            layer_ids=tuple(map(int, metadata["layer_ids"].split(","))),
            kinds=tuple(metadata["kinds"].split(",")),
            seed=int(metadata["seed"]),
        )


@dataclass(frozen=True)
class Conversation:
    """One of n tokens. Shapes and types are those of a shard."""

    ids: Tensor  # [n] int32
    mask: Tensor  # [n] uint8
    kind: str
    features: Tensor  # [n, taps * H] float16
    last: Tensor  # [n, H] float16

    def __len__(self) -> int:
        return len(self.ids)


def write_shard(path: Path, header: ShardHeader, conversations: Sequence[Conversation]) -> None:
    """The shard appears whole or not at all.

    Raises:
        DraftreeError: it cannot be written.
    """
    tensors = {
        "ids": torch.cat([each.ids for each in conversations]).int(),
        "lengths": torch.tensor([len(each) for each in conversations], dtype=torch.int32),
        "mask": torch.cat([each.mask for each in conversations]).to(torch.uint8),
        "kind": torch.tensor([header.kinds.index(each.kind) for each in conversations], dtype=torch.int32),
        "features": torch.cat([each.features for each in conversations]).half(),
        "last": torch.cat([each.last for each in conversations]).half(),
    }
    with written_whole(path) as unfinished:
        save_file(tensors, unfinished, metadata=header.to_metadata())
        unfinished.chmod(0o644)  # the library keeps it from other users


class Shard:
    """One file. Tokens are in memory, hidden states stay on disk until they are asked for.

    Raises:
        CheckpointError: it is damaged or not a shard.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            file = _open(path)
            self.header = ShardHeader.from_metadata(file.metadata() or {}, path)
            self.ids: Tensor = file.get_tensor("ids")
            self.mask: Tensor = file.get_tensor("mask")
            self.lengths: list[int] = file.get_tensor("lengths").tolist()
            self.kinds = [self.header.kinds[index] for index in file.get_tensor("kind").tolist()]
            self._states = {name: file.get_slice(name) for name in ("features", "last")}
        except (SafetensorError, KeyError, ValueError, IndexError) as error:
            raise CheckpointError(f"{path} cannot be read as a shard of training data: {error}.") from error
        self._starts = [0, *accumulate(self.lengths)]
        tokens = {
            len(self.ids),
            len(self.mask),
            self._starts[-1],
            *(each.get_shape()[0] for each in self._states.values()),
        }
        if len(tokens) > 1 or len(self.kinds) != len(self.lengths):
            raise CheckpointError(f"{path} holds tensors of different numbers of tokens or conversations.")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Conversation:
        begin, end = self._starts[index], self._starts[index + 1]
        return Conversation(
            ids=self.ids[begin:end],
            mask=self.mask[begin:end],
            kind=self.kinds[index],
            features=self._states["features"][begin:end],
            last=self._states["last"][begin:end],
        )

    def ids_of(self, index: int) -> Tensor:
        """A conversation's ids, without touching the disk."""
        return self.ids[self._starts[index] : self._starts[index + 1]]

    def mask_of(self, index: int) -> Tensor:
        return self.mask[self._starts[index] : self._starts[index + 1]]


def _open(path: Path) -> Any:
    return safe_open(path, framework="pt")


class ShardFolder:
    """All shards of a folder as they are now, or those of ``names`` alone, in the order of their names.

    Raises:
        ModelNotFound: there are none.
        CheckpointError: one is damaged, or of another model or other layers than the first; or one of ``names`` is not
            there.
    """

    def __init__(self, folder: Path, names: Collection[str] | None = None) -> None:
        paths = sorted(path for path in folder.glob(f"*{SUFFIX}") if not path.name.startswith("."))
        if not paths:
            raise ModelNotFound(f"{folder} holds no training data: there is no {SUFFIX} file in it.")
        if names is not None:
            paths = [path for path in paths if path.name in names]
            if missing := sorted({*names} - {path.name for path in paths}):
                raise CheckpointError(f"{folder} does not hold {missing[0]} any more, which this run is trained on.")
        self.shards = [Shard(path) for path in paths]
        self.header = self.shards[0].header
        for shard in self.shards:
            self._check(shard)

    def _check(self, shard: Shard) -> None:
        first, header, name = self.header, shard.header, self.shards[0].path.name
        if header.fingerprint != first.fingerprint:
            models = f"another model ({header.model}) than {name} ({first.model})"
            raise CheckpointError(f"{shard.path} was written by {models}.")
        if header.layer_ids != first.layer_ids:
            ids, others = list(header.layer_ids), list(first.layer_ids)
            raise CheckpointError(f"{shard.path} holds the states after layers {ids}, but {name} after {others}.")

    def check_model(self, fingerprint: str, name: str) -> None:
        """
        Raises:
            CheckpointError: the data is not the work of the model of this fingerprint.
        """
        if self.header.fingerprint != fingerprint:
            folder = self.shards[0].path.parent
            raise CheckpointError(f"{folder} was written by another model ({self.header.model}) than {name}.")

    @property
    def num_tokens(self) -> int:
        return sum(len(shard.ids) for shard in self.shards)

    @property
    def num_trained_tokens(self) -> int:
        return sum(int(shard.mask.sum()) for shard in self.shards)

    @property
    def num_conversations(self) -> int:
        return sum(map(len, self.shards))

    def __iter__(self) -> Iterator[Conversation]:
        for shard in self.shards:
            for index in range(len(shard)):
                yield shard[index]
