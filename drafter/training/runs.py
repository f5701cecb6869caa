"""A training run's folder: how far it is, and the best head so far. Knows files, not what is in them.

    settings.json    what the run was started with
    checkpoint.pt    everything needed to go on
    best.pt          the weights with the smallest loss on held-out conversations
    log.jsonl        a line for each evaluation

Files appear whole or not at all, so a run may be killed at any moment.
"""

from __future__ import annotations

import json
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch

from drafter.training.files import written_whole
from verifier.config import read_json
from verifier.errors import CheckpointError, ModelNotFound

NEEDED = {"settings", "target_ids", "model", "fingerprint", "layer_ids", "weights"}  # in every file that is saved


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def is_new(self) -> bool:
        return not (self.path / "checkpoint.pt").is_file()

    def settings(self) -> dict[str, Any]:
        return read_json(self.path / "settings.json")

    def begin(self, settings: dict[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "settings.json").write_text(json.dumps(settings, indent=1) + "\n")

    def save(self, content: dict[str, Any], *, best: bool = False) -> None:
        """
        Raises:
            DraftreeError: it cannot be written.
        """
        with written_whole(self._file(best)) as unfinished:
            torch.save(content, unfinished)

    def load(self, *, best: bool = False) -> dict[str, Any]:
        """
        Raises:
            ModelNotFound: nothing was saved yet.
            CheckpointError: the file is damaged, or something else.
        """
        path = self._file(best)
        if not path.is_file():
            raise ModelNotFound(f"{self.path} holds no training run that has saved anything: there is no {path.name}.")
        unreadable = f"{path} cannot be read as a checkpoint of a training run."
        try:
            with ZipFile(path) as file:
                if file.testzip():  # torch does not look at check sums
                    raise CheckpointError(unreadable)
            content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except (BadZipFile, UnpicklingError, RuntimeError, EOFError) as error:
            raise CheckpointError(unreadable) from error
        if not (isinstance(content, dict) and content.keys() >= NEEDED):
            raise CheckpointError(unreadable)
        return content

    def log(self, line: dict[str, Any]) -> None:
        with (self.path / "log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _file(self, best: bool) -> Path:
        return self.path / ("best.pt" if best else "checkpoint.pt")
