"""A run's files: damaged ones are refused in a sentence, and those that cannot be written leave nothing behind."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter.training.runs import NEEDED, RunFolder
from verifier.errors import CheckpointError, DraftreeError

CONTENT: dict[str, Any] = {**dict.fromkeys(NEEDED, 1), "weights": {"w": torch.arange(1000.0)}}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.begin({})
    run.save(CONTENT)
    return run


def test_what_was_saved_is_loaded(run: RunFolder) -> None:
    assert torch.equal(run.load()["weights"]["w"], CONTENT["weights"]["w"])
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoint.pt", "settings.json"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-100],
        lambda content: b"",
        lambda content: b"hello world" * 100,
        lambda content: pickle.dumps({"weights": {}}),
        lambda content: content.replace(torch.arange(500.0, 504.0).numpy().tobytes(), bytes(16)),
    ],
    ids=["cut", "empty", "text", "pickle", "flipped"],
)
def test_a_damaged_file_is_refused_in_a_sentence(run: RunFolder, damage: Any) -> None:
    """Only some kinds of damage were; others ended in a traceback, and flipped bits in weights were not even seen."""
    path = run.path / "checkpoint.pt"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt cannot be read as a checkpoint of a training run"):
        run.load()


@pytest.mark.parametrize("content", [{"a": 1}, [1, 2], torch.zeros(3)], ids=["dict", "list", "tensor"])
def test_another_tools_file_is_refused_in_a_sentence(run: RunFolder, content: Any) -> None:
    torch.save(content, run.path / "checkpoint.pt")
    with pytest.raises(CheckpointError, match="cannot be read"):
        run.load()


def test_a_full_disk_is_said_in_a_sentence_and_nothing_is_left_behind(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written so far stayed there for good, under a name that nobody would look for."""

    def save(content: object, path: Path) -> None:
        path.write_bytes(b"half of it")
        raise RuntimeError("PytorchStreamWriter failed writing file")

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(DraftreeError, match=r"best\.pt cannot be written: PytorchStreamWriter failed"):
        run.save(CONTENT, best=True)
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoint.pt", "settings.json"]
