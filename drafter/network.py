"""What a draft network is: rows in, states out, logits from states.

EAGLE-3 and EAGLE-1 heads and small models differ in this alone; sessions and trees are the same for all. Knows no
trees, sessions or texts.
"""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from verifier.attention.layout import RowLayout
from verifier.config import ModelConfig
from verifier.device import as_held
from verifier.features import Fusion
from verifier.layers import RMSNorm
from verifier.linear import Linear
from verifier.pool import PagePool
from verifier.weights import EMBEDDING, Checkpoint


class DraftNetwork(Protocol):
    """A decoder over slots of a paged cache, one token in each.

    A network that reads the target's features (``fusion``) pairs the feature of position i with token i+1 in slot i,
    and below the context its own output takes the feature's place. One without has token i in slot i. Either way a slot
    predicts the token after its own, and the last slot of a text is its last token's.
    """

    @property
    def decoder(self) -> ModelConfig:
        """The layers whose keys and values are cached, and the positions they have."""
        ...

    @property
    def fusion(self) -> Fusion | None:
        """How the target's states become what this network reads; None for one that reads text alone."""
        ...

    @property
    def target_ids(self) -> Tensor:
        """The target's id of each draft id, ``[draft vocabulary]`` int64, ascending; on the CPU."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    def forward(self, layout: RowLayout, hidden: Tensor | None, pool: PagePool) -> Tensor:
        """States ``[rows, width]`` from ``hidden [rows, width]``, features or `feedback`; None without a fusion.

        Writes the rows' keys and values into ``pool``.
        """
        ...

    def feedback(self, states: Tensor) -> Tensor | None:
        """What the slots below read in place of features, from what `forward` returned at their parents."""
        ...

    def logits(self, states: Tensor) -> Tensor:
        """``[rows, draft vocabulary]`` fp32, from what `forward` returned."""
        ...


class Target(Protocol):
    """What a draft network may share with the model that it drafts for."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def device(self) -> torch.device:
        """Where its tensors are, and a network's that drafts for it are to be."""
        ...

    @property
    def embedding(self) -> Tensor:
        """``[vocabulary, hidden]``, as `verifier.device.as_held`."""
        ...

    @property
    def norm(self) -> RMSNorm: ...

    @property
    def head(self) -> Linear:
        """Normed hidden states to logits."""
        ...


class TargetParts:
    """A `Target` for a process that has no model: each part is read from the checkpoint when it is first asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = checkpoint.config
        self.device = checkpoint.device
        self._checkpoint = checkpoint

    @cached_property
    def embedding(self) -> Tensor:
        return as_held(self._checkpoint.tensor(EMBEDDING))

    @cached_property
    def norm(self) -> RMSNorm:
        return RMSNorm(self._checkpoint.tensor("model.norm.weight").float(), self.config.rms_norm_eps)

    @cached_property
    def head(self) -> Linear:
        return Linear([self._checkpoint.tensor(EMBEDDING if self.config.tie_word_embeddings else "lm_head.weight")])


def last_state(target: Target) -> Fusion:
    """The target's hidden state after the final norm, as it is: the same for all that read it."""
    config = target.config
    return Fusion("final norm", taps=(config.num_layers,), width=config.hidden_size, each_norm=(target.norm,))


def embedding_table(own: Tensor | None, target: Target) -> Tensor:
    """``[target vocabulary, width]``: the target's very tensor where a network has none or an equal one."""
    if own is None:
        return target.embedding
    own = as_held(own)
    if own.dtype == target.embedding.dtype and torch.equal(own, target.embedding):
        return target.embedding
    return padded(own, len(target.embedding))


def padded(table: Tensor, num_rows: int) -> Tensor:
    """A table of embeddings with zeros for ids that pad the target's vocabulary beyond it."""
    return torch.nn.functional.pad(table, (0, 0, 0, max(0, num_rows - len(table))))
