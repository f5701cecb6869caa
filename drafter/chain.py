"""A small model of the target's vocabulary as draft network: speculative decoding as it began (Leviathan et al., 2022,
https://arxiv.org/abs/2211.17192).

It reads text alone, so its sessions hold the text's tokens as any model's cache does. Meant for chains, which is what
limits with one guess at each node make of a tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafter.network import padded
from verifier.attention import Attention
from verifier.attention.layout import RowLayout
from verifier.config import ModelConfig
from verifier.features import Fusion
from verifier.model import Model
from verifier.pool import PagePool
from verifier.weights import Checkpoint


class SmallModel:
    """A `drafter.network.DraftNetwork` that is a whole model."""

    fusion: Fusion | None = None

    def __init__(self, checkpoint: Checkpoint, target: ModelConfig, attention: Attention) -> None:
        self.decoder = checkpoint.config
        self.device = checkpoint.device
        self.target_ids = torch.arange(min(self.decoder.vocab_size, target.vocab_size))
        self._model = Model(self.decoder, checkpoint, attention)
        self._model.embedding = padded(self._model.embedding, target.vocab_size)

    def forward(self, layout: RowLayout, hidden: Tensor | None, pool: PagePool) -> Tensor:
        """``[rows, hidden]`` before the final norm."""
        return self._model.forward(layout, pool)[0]

    def feedback(self, states: Tensor) -> Tensor | None:
        return None

    def logits(self, states: Tensor) -> Tensor:
        return self._model.logits(states)[:, : len(self.target_ids)]
