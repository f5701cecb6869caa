from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drafter.training.shards import ShardFolder, write_shard
from tests.drafter.training.data import HEADER, conversation, save_shards
from verifier.errors import CheckpointError, ModelNotFound


def test_what_was_written_is_read(tmp_path: Path) -> None:
    save_shards(tmp_path, [5, 9], [4])
    folder = ShardFolder(tmp_path)
    assert folder.header == HEADER
    assert (folder.num_conversations, folder.num_tokens, folder.num_trained_tokens) == (3, 18, 3 + 5 + 2)
    for read, written in zip(
        folder, [conversation(5), conversation(9, seed=1), conversation(4, seed=100)], strict=True
    ):
        assert read.kind == written.kind
        for name in ("ids", "mask", "features", "last"):
            got, expected = getattr(read, name), getattr(written, name)
            assert got.dtype == expected.dtype
            assert torch.equal(got, expected)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"fingerprint": "4567", "model": "other"}, "another model .other"), ({"layer_ids": (1, 3)}, r"\[1, 3\]")],
)
def test_shards_of_two_models_or_layers_do_not_mix(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    save_shards(tmp_path, [5])
    write_shard(tmp_path / "later.safetensors", replace(HEADER, **changes), [conversation(6)])  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=words):
        ShardFolder(tmp_path)


def test_data_of_another_model_than_the_one_asked_for(tmp_path: Path) -> None:
    folder = ShardFolder(save_shards(tmp_path, [5]))
    folder.check_model("0123", "tiny")
    with pytest.raises(CheckpointError, match=r"another model \(tiny\) than huge"):
        folder.check_model("89", "huge")


def test_what_is_no_shard(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no training data"):
        ShardFolder(tmp_path)
    save_file({"ids": torch.zeros(3)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="not a shard"):
        ShardFolder(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="cannot be read"):
        ShardFolder(tmp_path)


def test_a_shard_that_does_not_add_up(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(4, dtype=torch.int32) for name in ("ids", "mask")}
    tensors |= {"lengths": torch.tensor([3]), "kind": torch.tensor([0])}
    tensors |= {"features": torch.zeros(4, 4), "last": torch.zeros(4, 2)}
    save_file(tensors, tmp_path / "a.safetensors", metadata=HEADER.to_metadata())
    with pytest.raises(CheckpointError, match="different numbers"):
        ShardFolder(tmp_path)
