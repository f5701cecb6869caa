from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafter.training.shards import Shard, write_shard
from drafter.training.vocabulary import draft_ids, most_frequent
from tests.drafter.training.data import HEADER, conversation
from verifier.errors import BadSetting


def test_what_answers_say_comes_before_what_prompts_say_and_that_before_low_ids(tmp_path: Path) -> None:
    answers = [7, 7, 7, 9, 9, 30]
    prompts = [40, 40, 40, 40, 20, 9]
    each = replace(
        conversation(12),
        ids=torch.tensor(prompts + answers, dtype=torch.int32),
        mask=torch.tensor([0] * 6 + [1] * 6, dtype=torch.uint8),
    )
    write_shard(tmp_path / "a.safetensors", HEADER, [each])
    shards = [Shard(tmp_path / "a.safetensors")]
    ranked = [7, 9, 30, 40, 20, 0, 1, 2]
    for size in range(1, len(ranked) + 1):
        assert most_frequent(shards, size, 50).tolist() == sorted(ranked[:size])
    with pytest.raises(BadSetting, match="draft_vocab is 51, but must be from 1 to 50"):
        most_frequent(shards, 51, 50)


def test_draft_ids_turn_the_map_around() -> None:
    table = draft_ids(torch.tensor([2, 5, 6]), 8)
    assert table.tolist() == [-1, -1, 0, -1, -1, 1, 2, -1]
