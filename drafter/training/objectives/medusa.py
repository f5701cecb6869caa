"""Medusa-1 (Cai et al., 2024, https://arxiv.org/abs/2401.10774, section 2.2.1): heads on a frozen target's last state.

The state of position i is what the target draws token i + 1 from; head j learns token i + 2 + j from it. Loss:
cross-entropy of all heads, each weighted by a power of `step_weight`, the paper's 0.8. Where the paper trains on the
written tokens, heads learn the target's own distribution at the place that they guess: softer, and already at hand.

What is trained carries the names of vLLM's checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.training.objectives.base import Objective, Outcome, randomise, soft_cross_entropy
from drafter.training.objectives.eagle3_batch import trained_slots
from drafter.training.shards import Conversation
from drafter.training.target import Target
from drafter.training.vocabulary import draft_ids


@dataclass(frozen=True)
class Batch:
    """Rows are the positions that the first head is trained on, of some conversations one after another."""

    states: Tensor  # [rows, H] float16: the residual stream that heads read
    next_states: Tensor  # [rows, H] float16: that of the position after
    labels: Tensor  # [rows] int64: the written token that the first head guesses, as draft id
    trained: Sequence[Tensor]  # by head, the rows that it is trained on
    ahead: Sequence[Tensor]  # by head, the rows that stand as many places after those as the head before it guesses
    num_places: Sequence[int]  # by head, rows and those that the draft vocabulary has cut off


class Blocks(nn.Module):
    """One head's residual blocks; they begin as doing nothing."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, states: Tensor) -> Tensor:
        for layer in self.layers:
            states = states + F.silu(layer(states))
        return states


class MedusaObjective(Objective):
    """
    Args:
        target_ids: ``[draft vocabulary]`` int64, ascending.
        num_heads: each is a step.
        step_weight: a head counts this much of the one before it.
        num_layers: residual blocks of each head.
    """

    def __init__(
        self, target: Target, target_ids: Tensor, num_heads: int, step_weight: float, num_layers: int = 1
    ) -> None:
        super().__init__()
        width = target.config.hidden_size
        self.target_ids = target_ids
        self.num_steps, self.step_weight = num_heads, step_weight
        self.blocks = nn.ModuleList(Blocks(width, num_layers) for _ in range(num_heads))
        self.lm_heads = nn.ModuleList(nn.Linear(width, len(target_ids), bias=False) for _ in range(num_heads))
        self._target = target
        self._draft_ids = draft_ids(target_ids, target.config.vocab_size)
        self.target_rows = nn.Buffer(target.output[target_ids], persistent=False)

    def collate(self, conversations: Sequence[Conversation], device: torch.device) -> Batch:
        return _make_batch(conversations, self._draft_ids, self.num_steps, device)

    def num_rows(self, ids: Tensor, mask: Tensor) -> int:
        return len(trained_slots(ids, mask, self._draft_ids, 1)[0][0])

    def forward(self, batch: Batch) -> Outcome:
        goal = self.goal(batch)
        states = self._target.normed(batch.states)
        right = torch.ones(len(states), dtype=torch.bool, device=goal.device)
        loss = goal.new_zeros(())
        figures = goal.new_zeros(self.num_steps, 4)
        for head, (rows, ahead) in enumerate(zip(batch.trained, batch.ahead, strict=True)):
            logits = self.lm_heads[head](self.blocks[head](states[rows]))
            losses = soft_cross_entropy(logits, goal[ahead])
            hits = right[rows] & (logits.argmax(-1) == batch.labels[ahead])
            right = torch.zeros_like(right).index_copy_(0, rows, hits)
            summed = losses.sum()
            loss = loss + self.step_weight**head * summed
            figures[head, :3] = torch.stack((summed.detach(), summed.new_tensor(len(rows)), hits.sum()))
        figures[:, 3] = torch.tensor(batch.num_places)
        return Outcome(loss, figures)

    @torch.no_grad()
    def goal(self, batch: Batch) -> Tensor:
        """The target's probabilities ``[rows, draft vocabulary]`` where the first head guesses, no others existing."""
        return F.linear(self._target.normed(batch.next_states), self.target_rows).softmax(-1)


def initialise(objective: MedusaObjective, start: str, seed: int) -> None:
    """Gives output matrices their first values: ``random``, or the target's own."""
    randomise(objective.lm_heads, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        if start == "target":
            for weight in objective.lm_heads.parameters():
                weight.copy_(objective.target_rows)


def _make_batch(
    conversations: Sequence[Conversation], draft_ids: Tensor, num_heads: int, device: torch.device
) -> Batch:
    """Of conversations that all have something to train on."""
    by_head: list[list[Tensor]] = [[] for _ in range(num_heads)]
    num_places = [0] * num_heads
    states, next_states, labels = [], [], []
    offset = 0  # of a conversation's positions among all
    for each in conversations:
        slots, places = trained_slots(each.ids, each.mask, draft_ids, num_heads)
        states.append(each.last[slots[0]])
        next_states.append(each.last[slots[0] + 1])
        labels.append(draft_ids[each.ids[slots[0] + 2].long()])
        for head in range(num_heads):
            by_head[head].append(slots[head] + offset)
            num_places[head] += places[head]
        offset += len(each)
    positions = [torch.cat(slots) for slots in by_head]
    # Positions are ascending, so a search finds their rows.
    trained = [torch.searchsorted(positions[0], each) for each in positions]
    ahead = [torch.searchsorted(positions[0], each + head) for head, each in enumerate(positions)]
    return Batch(
        states=torch.cat(states).to(device),
        next_states=torch.cat(next_states).to(device),
        labels=torch.cat(labels).to(device),
        trained=[each.to(device) for each in trained],
        ahead=[each.to(device) for each in ahead],
        num_places=num_places,
    )
