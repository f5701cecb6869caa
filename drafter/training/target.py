"""The parts of a target that training a head on its states still needs: embedding, final norm, output matrix."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from verifier.config import ModelConfig
from verifier.default_model import Progress, default_model_path
from verifier.hub import resolve_model
from verifier.weights import Checkpoint


def locate(name: str, progress: Progress = lambda line: None) -> Path:
    """A model's folder or file by its path or its id on a hub; the default model's where there is no name.

    Raises:
        ModelNotFound: it is nowhere to be found.
    """
    return resolve_model(name) if name else default_model_path(progress)


@dataclass(frozen=True)
class Target:
    """Frozen, fp32."""

    checkpoint: Checkpoint
    embedding: Tensor  # [vocab, H]
    norm: Tensor  # [H]
    output: Tensor  # [vocab, H]

    @classmethod
    def open(cls, path: Path) -> Self:
        """
        Raises:
            ModelNotFound, CheckpointError: as `Checkpoint.open`.
        """
        checkpoint = Checkpoint.open(path)
        embedding = checkpoint.tensor("model.embed_tokens.weight").float()
        tied = checkpoint.config.tie_word_embeddings
        output = embedding if tied else checkpoint.tensor("lm_head.weight").float()
        return cls(checkpoint, embedding, checkpoint.tensor("model.norm.weight").float(), output)

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    def normed(self, last: Tensor) -> Tensor:
        """What the output matrix reads, fp32, from the residual stream ``[…, H]`` after the last layer."""
        return F.rms_norm(last.to(torch.float32), self.norm.shape, self.norm.to(last.device), self.config.rms_norm_eps)
