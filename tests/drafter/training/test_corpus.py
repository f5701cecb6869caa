from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafter.training.corpus import Corpus, by_length
from drafter.training.objectives.base import Objective, Outcome
from drafter.training.shards import Conversation, ShardFolder
from tests.drafter.training.data import save_shards


class Answers(Objective):
    """Every token of an answer is a row."""

    def num_rows(self, ids: Tensor, mask: Tensor) -> int:
        return int(mask.sum())

    def collate(self, conversations: Sequence[Conversation], device: torch.device) -> Any: ...

    def forward(self, batch: Any) -> Outcome:
        raise AssertionError("a corpus sorts conversations, it trains nothing")


@pytest.fixture
def folder(tmp_path: Path) -> ShardFolder:
    return ShardFolder(save_shards(tmp_path, [5 + i % 37 for i in range(200)], [60 - i % 50 for i in range(200)]))


def test_an_epoch_is_every_conversation_once(folder: ShardFolder) -> None:
    corpus = Corpus.of(folder, Answers(), held_out=0.1)
    batches = corpus.batches(seed=1, epoch=0, batch_rows=300, micro_rows=60)
    items = [item for batch in batches for micro in batch for item in micro]
    assert len(items) == len(set(items)) == len(corpus.trained)
    assert set(items) == set(corpus.trained)
    rows = [sum(item.num_rows for micro in batch for item in micro) for batch in batches]
    assert all(300 <= each < 360 for each in rows[:-1])
    assert all(sum(item.num_rows for item in micro) <= 60 for batch in batches for micro in batch)


def test_the_order_follows_from_seed_and_epoch(folder: ShardFolder) -> None:
    corpus = Corpus.of(folder, Answers(), held_out=0.1)
    first = corpus.batches(1, 0, 300, 60)
    assert first == Corpus.of(folder, Answers(), 0.1).batches(1, 0, 300, 60)
    assert first != corpus.batches(1, 1, 300, 60)
    assert first != corpus.batches(2, 0, 300, 60)


def test_questions_are_learnt_too_if_wished_but_not_measured(folder: ShardFolder) -> None:
    answers, whole = Corpus.of(folder, Answers(), 0.1), Corpus.of(folder, Answers(), 0.1, whole=True)
    assert whole.held_out == answers.held_out
    assert any(item.num_rows < item.num_tokens for item in answers.trained)
    for item in whole.trained:
        assert item.num_rows == item.num_tokens == int(item.load().mask.sum())


def test_what_is_held_out_depends_on_the_text_alone(folder: ShardFolder, tmp_path: Path) -> None:
    corpus = Corpus.of(folder, Answers(), held_out=0.1)
    assert 20 <= len(corpus.held_out) <= 60
    held_out = {item.load().ids.numpy().tobytes() for item in corpus.held_out}
    assert held_out.isdisjoint(item.load().ids.numpy().tobytes() for item in corpus.trained)
    alone = ShardFolder(folder.shards[1].path.parent, [folder.shards[1].path.name])
    later = {item.load().ids.numpy().tobytes() for item in Corpus.of(alone, Answers(), 0.1).held_out}
    assert later < held_out


def test_little_is_padded(folder: ShardFolder) -> None:
    corpus = Corpus.of(folder, Answers(), held_out=0.1)
    for micro in by_length(corpus.trained, micro_rows=100):
        lengths = [item.num_tokens for item in micro]
        assert max(lengths) - min(lengths) <= 10


def test_a_conversation_longer_than_a_micro_batch_has_one_of_its_own(folder: ShardFolder) -> None:
    corpus = Corpus.of(folder, Answers(), held_out=0.1)
    assert all(len(micro) == 1 for micro in by_length(corpus.trained, micro_rows=1))
