"""The folder that training data is collected in: what is there already, and how more is added.

Knows shards and counts. Knows not how conversations are made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from drafter.training.shards import SUFFIX, Conversation, Shard, ShardFolder, ShardHeader, write_shard
from verifier.errors import CheckpointError, ModelNotFound

PER_SHARD = 256  # conversations


class ShardStore:
    """Writes a shard for every ``PER_SHARD`` conversations.

    Attributes:
        tokens: trained tokens by kind, those not yet on disk included.
        next_number: of the next shard with this header's seed; no shard of that seed that is there has it or a later.

    Raises:
        CheckpointError: the folder holds shards of another model, or of other layers.
    """

    def __init__(self, folder: Path, header: ShardHeader) -> None:
        self.folder, self.header = folder, header
        self.tokens: Counter[str] = Counter()
        self.next_number = 0
        self._pending: list[Conversation] = []
        self._shards: list[Shard] = []
        try:
            found = ShardFolder(folder)
        except ModelNotFound:
            return
        found.check_model(header.fingerprint, header.model)
        if found.header.layer_ids != header.layer_ids:
            theirs, ours = list(found.header.layer_ids), list(header.layer_ids)
            raise CheckpointError(f"{folder} holds the states after layers {theirs}, not {ours}.")
        self._shards = found.shards
        for shard in found.shards:
            for index, kind in enumerate(shard.kinds):
                self.tokens[kind] += int(shard.mask_of(index).sum())
        names = [path.stem.removeprefix(self._prefix) for path in folder.glob(f"{self._prefix}*{SUFFIX}")]
        self.next_number = max((int(name) for name in names if name.isdecimal()), default=-1) + 1

    @property
    def num_tokens(self) -> int:
        return self.tokens.total()

    @property
    def _prefix(self) -> str:
        return f"seed{self.header.seed}-"

    def prompts(self, kind: str) -> set[tuple[int, ...]]:
        """The ids before the first answer of all conversations of one kind that were there at the start."""
        return {
            tuple(shard.ids_of(index)[: int(shard.mask_of(index).argmax())].tolist())
            for shard in self._shards
            for index, each in enumerate(shard.kinds)
            if each == kind
        }

    def add(self, conversations: Sequence[Conversation]) -> None:
        for conversation in conversations:
            self.tokens[conversation.kind] += int(conversation.mask.sum())
            self._pending.append(conversation)
            if len(self._pending) == PER_SHARD:
                self.flush()

    def flush(self) -> None:
        """Writes what is left, if anything is."""
        if self._pending:
            write_shard(self.folder / f"{self._prefix}{self.next_number:05}{SUFFIX}", self.header, self._pending)
            self.next_number += 1
            self._pending = []
