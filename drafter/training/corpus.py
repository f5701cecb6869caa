"""Which conversations are trained on, in which order, and which are held out to see whether anything was learnt.

Both follow from the seed and the conversations' own tokens, so that a run can be resumed, and a conversation that is
collected twice never stands on both sides. Knows no method and no tensors beyond tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import torch

from drafter.training.objectives.base import Objective
from drafter.training.shards import Conversation, Shard, ShardFolder

WINDOW = 256  # conversations sorted by length together, so that little is padded


@dataclass(frozen=True, slots=True)
class Item:
    """A conversation by where it lies."""

    shard: Shard
    index: int
    num_tokens: int
    num_rows: int
    whole: bool = False  # questions are learnt as answers are

    def load(self) -> Conversation:
        conversation = self.shard[self.index]
        return replace(conversation, mask=torch.ones_like(conversation.mask)) if self.whole else conversation

    @property
    def kind(self) -> str:
        kind: str = self.shard.kinds[self.index]
        return kind


MicroBatch = list[Item]  # computed at once
Batch = list[MicroBatch]  # one step of the optimizer


@dataclass(frozen=True)
class Corpus:
    """A folder's conversations that have anything to train on."""

    trained: Sequence[Item]
    held_out: Sequence[Item]

    @classmethod
    def of(cls, folder: ShardFolder, objective: Objective, held_out: float, *, whole: bool = False) -> Corpus:
        """
        Args:
            held_out: share of the conversations that are not trained on.
            whole: train on questions too. What is held out is measured on answers alone.
        """
        sides: tuple[list[Item], list[Item]] = ([], [])
        for shard in folder.shards:
            for index in range(len(shard)):
                ids, mask = shard.ids_of(index), shard.mask_of(index)
                is_held_out = _draw(ids.numpy().tobytes()) < held_out
                mask = torch.ones_like(mask) if (learnt_whole := whole and not is_held_out) else mask
                if num_rows := objective.num_rows(ids, mask):
                    sides[is_held_out].append(Item(shard, index, len(ids), num_rows, learnt_whole))
        return cls(*sides)

    def batches(self, seed: int, epoch: int, batch_rows: int, micro_rows: int) -> list[Batch]:
        """One epoch: batches of at least ``batch_rows`` rows, computed ``micro_rows`` at a time or one conversation."""
        random = Random(f"{seed} {epoch}")
        items = list(self.trained)
        random.shuffle(items)
        micro_batches: list[MicroBatch] = []
        for start in range(0, len(items), WINDOW):
            window = by_length(items[start : start + WINDOW], micro_rows)
            random.shuffle(window)
            micro_batches += window
        return list(_grouped(micro_batches, batch_rows))


def by_length(items: Sequence[Item], micro_rows: int) -> list[MicroBatch]:
    """Micro-batches of conversations of like length."""
    batches: list[MicroBatch] = []
    room = 0
    for item in sorted(items, key=lambda item: item.num_tokens):
        if item.num_rows > room:
            batches.append([])
            room = micro_rows
        batches[-1].append(item)
        room -= item.num_rows
    return batches


def _grouped(micro_batches: Sequence[MicroBatch], batch_rows: int) -> Iterator[Batch]:
    """The last batch takes what is left, so it may be smaller."""
    batch: Batch = []
    rows = 0
    for each in micro_batches:
        batch.append(each)
        rows += sum(item.num_rows for item in each)
        if rows >= batch_rows:
            yield batch
            batch, rows = [], 0
    if batch:
        yield batch


def _draw(content: bytes) -> float:
    """A number in [0, 1) that depends on ``content`` alone."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") / 2**64
