"""A small model of the Llama family learns to speak like the target (distillation; Leviathan et al., 2022, and Kim and
Rush, 2016, https://arxiv.org/abs/1606.07947).

It reads ids alone. Each token of an answer teaches the target's distribution over what comes next, by soft
cross-entropy. The model chooses among all of the target's ids; the target's distribution is taken over the draft
vocabulary, its most frequent ones, and the others learn to be unlikely. Embedding and output matrix are one.

What is trained carries the names of Hugging Face's checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.training.objectives.base import INIT_STD, Objective, Outcome, randomise, soft_cross_entropy
from drafter.training.objectives.decoders import Batch, DecoderLayer, make_batch, runs_of_hits, trained_slots
from drafter.training.shards import Conversation
from drafter.training.target import Target
from verifier.config import ModelConfig
from verifier.errors import BadSetting


class Body(nn.Module):
    """All of a tied model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[conversations, slots]`` to what the output matrix reads."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        normed: Tensor = self.norm(x)
        return normed


class SmallModelObjective(Objective):
    """
    Args:
        config: the small model's.
        target_ids: ``[draft vocabulary]`` int64, ascending.
        num_steps: guesses in a row that are counted; it learns one.
    """

    def __init__(self, target: Target, config: ModelConfig, target_ids: Tensor, num_steps: int) -> None:
        super().__init__()
        self.config, self.target_ids, self.num_steps = config, target_ids, num_steps
        self.model = Body(config)
        self._target = target
        self.target_rows = nn.Buffer(target.output[target_ids], persistent=False)

    def matrices(self) -> list[nn.Parameter]:
        return [each for each in super().matrices() if each is not self.model.embed_tokens.weight]

    def collate(self, conversations: Sequence[Conversation], device: torch.device) -> Batch:
        return make_batch(conversations, 0, device)

    def num_rows(self, ids: Tensor, mask: Tensor) -> int:
        return len(trained_slots(mask, 0))

    def forward(self, batch: Batch) -> Outcome:
        logits = self.logits(batch)
        losses = soft_cross_entropy(logits, self.goal(batch))
        figures = torch.zeros(self.num_steps, 4, device=logits.device)
        figures[0, :2] = torch.stack((losses.sum().detach(), losses.new_tensor(len(losses))))
        figures[:, 2:] = runs_of_hits(batch, logits.argmax(-1) == batch.labels, self.num_steps)
        return Outcome(losses.sum(), figures)

    def logits(self, batch: Batch) -> Tensor:
        """``[rows, vocab]``."""
        states = self.model(batch.tokens).flatten(0, 1)[batch.rows]
        return F.linear(states, self.model.embed_tokens.weight)

    @torch.no_grad()
    def goal(self, batch: Batch) -> Tensor:
        """The target's probabilities ``[rows, vocab]``, as if no others than the draft vocabulary existed."""
        known = F.linear(self._target.normed(batch.last), self.target_rows).softmax(-1)
        goal = known.new_zeros(len(known), self.config.vocab_size)
        return goal.index_copy_(1, self.target_ids.to(known.device), known)


def initialise(objective: SmallModelObjective, target: Target, start: str, seed: int) -> None:
    """Gives the weights their first values: ``random``, or with the target's embedding, turned and cut to the width.

    What is kept of it are the directions in which its tokens differ the most.

    Raises:
        BadSetting: there are fewer of these than the model is wide.
    """
    width, given = objective.config.hidden_size, target.config.hidden_size
    if start == "target" and width > given:
        allowed = f"at most {given}, the target's width, to begin with its embedding; init random does without"
        raise BadSetting("model_hidden", width, allowed)
    randomise(objective, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        if start == "target":
            _, directions = torch.linalg.eigh(target.embedding.T @ target.embedding)
            kept = target.embedding @ directions[:, -width:]
            objective.model.embed_tokens.weight.copy_(kept * (INIT_STD / kept.std()))
