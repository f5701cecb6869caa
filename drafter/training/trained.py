"""A head that a run has made: its best weights, and what they were made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from drafter.training.runs import RunFolder
from drafter.training.settings import TrainSettings
from drafter.training.target import Target
from verifier.errors import CheckpointError


@dataclass(frozen=True)
class Trained:
    """
    Attributes:
        weights: fp32, by the names of the method's objective.
        target_ids: ``[draft vocabulary]`` int64, ascending.
        layer_ids: boundary ids of the target's layers whose states were trained on.
        figures: of the evaluation that found it the best; a line of the run's log.
    """

    settings: TrainSettings
    target: Target
    weights: Mapping[str, Tensor]
    target_ids: Tensor
    layer_ids: tuple[int, ...]
    figures: Mapping[str, Any]

    @classmethod
    def load(cls, run: RunFolder, target: Target) -> Self:
        """
        Raises:
            ModelNotFound: the run has evaluated nothing yet.
            CheckpointError: it was for another target.
        """
        content = run.load(best=True)
        if content["fingerprint"] != target.checkpoint.fingerprint:
            raise CheckpointError(f"{run.path} trained a head for {content['model']}, not for {target.config.name}.")
        return cls(
            settings=TrainSettings.of(content["settings"]),
            target=target,
            weights=content["weights"],
            target_ids=content["target_ids"],
            layer_ids=tuple(content["layer_ids"]),
            figures=content["figures"],
        )
