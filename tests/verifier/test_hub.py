"""Where models are looked for, and what is said of those that are nowhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verifier.errors import ModelNotFound
from verifier.hub import resolve_model


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").touch()
    return folder


def test_models_are_found_by_path(llama: Path, tmp_path: Path) -> None:
    assert resolve_model(str(llama)) == llama
    gguf = tmp_path / "m.gguf"
    gguf.touch()
    assert resolve_model(str(gguf)) == gguf


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./no/such/folder", "There is no folder or GGUF file"),
        ("no-such.gguf", "There is no folder or GGUF file"),
        ("not a hub id", "There is no folder or GGUF file"),
        (str(Path(__file__).parent), "neither a folder with a config.json nor a GGUF file"),
        ("some-author/some-model", "There is no folder some-author/some-model, and the Hugging Face hub cannot be"),
    ],
)
def test_a_model_that_is_nowhere(name: str, words: str) -> None:
    with pytest.raises(ModelNotFound, match=words) as refusal:
        resolve_model(name)
    assert "\n" not in str(refusal.value)


def test_hub_ids_are_fetched(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def snapshot_download(name: str, **choices: Any) -> str:
        asked.append(name)
        return str(llama)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve_model("some-author/some-model") == llama
    assert asked == ["some-author/some-model"]
