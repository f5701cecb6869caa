"""The draft vocabulary: the tokens that a target writes most often (EAGLE-3's reduced output matrix)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from drafter.training.shards import Shard
from verifier.errors import BadSetting


def most_frequent(shards: Iterable[Shard], size: int, vocab_size: int) -> Tensor:
    """``[size]`` int64, ascending: the target ids that occur most often where the data is trained on.

    Those that never do are ranked by how often they occur in prompts, then by id: low ids are the earlier merges.

    Raises:
        BadSetting: the target has fewer ids.
    """
    if not 1 <= size <= vocab_size:
        raise BadSetting("draft_vocab", size, f"from 1 to {vocab_size}, the ids of the target")
    answers = torch.zeros(vocab_size, dtype=torch.int64)
    everywhere = torch.zeros(vocab_size, dtype=torch.int64)
    for shard in shards:
        answers += torch.bincount(shard.ids[shard.mask.bool()], minlength=vocab_size)
        everywhere += torch.bincount(shard.ids, minlength=vocab_size)
    by_prompts = everywhere.argsort(descending=True, stable=True)
    ranked = by_prompts[answers[by_prompts].argsort(descending=True, stable=True)]
    return ranked[:size].sort().values


def draft_ids(target_ids: Tensor, vocab_size: int) -> Tensor:
    """``[vocab_size]`` int64: the draft id of each target id, -1 for those without one."""
    table = torch.full((vocab_size,), -1, dtype=torch.int64)
    table[target_ids] = torch.arange(len(target_ids))
    return table
