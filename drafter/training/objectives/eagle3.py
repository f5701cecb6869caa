"""EAGLE-3 with training-time test (Li et al., 2025, https://arxiv.org/abs/2503.01840, section 3.2).

The head is unrolled for some steps: in the first each slot reads the target's fused feature, in the others what the
head itself made of the slot before, while tokens stay those that were written. So it learns from the states that it
will meet in a draft. Loss: soft cross-entropy to the target's distribution over the draft vocabulary.

What is trained carries the names of SafeAILab's checkpoints. Only what keys and values need is computed where nothing
is trained on, which is most of a conversation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.training.objectives.base import FIGURES, Objective, Outcome, randomise, soft_cross_entropy_with
from drafter.training.objectives.eagle3_batch import Batch, Step, make_batch, padding, trained_slots
from drafter.training.shards import Conversation
from drafter.training.target import Target
from drafter.training.vocabulary import draft_ids
from verifier.config import ModelConfig
from verifier.layers import Rotary


class Attention(nn.Module):
    """The matrices alone; who attends to whom is `Eagle3Objective`'s matter."""

    def __init__(self, decoder: ModelConfig) -> None:
        super().__init__()
        width = decoder.hidden_size
        queries, keys = decoder.num_heads * decoder.head_dim, decoder.num_kv_heads * decoder.head_dim
        self.q_proj = nn.Linear(2 * width, queries, bias=False)
        self.k_proj = nn.Linear(2 * width, keys, bias=False)
        self.v_proj = nn.Linear(2 * width, keys, bias=False)
        self.o_proj = nn.Linear(queries, width, bias=False)


class MLP(nn.Module):
    def __init__(self, decoder: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(decoder.hidden_size, decoder.intermediate_size, bias=False)
        self.up_proj = nn.Linear(decoder.hidden_size, decoder.intermediate_size, bias=False)
        self.down_proj = nn.Linear(decoder.intermediate_size, decoder.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class MidLayer(nn.Module):
    """The one decoder layer; its attention reads the token's embedding and the hidden state side by side."""

    def __init__(self, decoder: ModelConfig) -> None:
        super().__init__()
        width, eps = decoder.hidden_size, decoder.rms_norm_eps
        self.self_attn = Attention(decoder)
        self.mlp = MLP(decoder)
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.hidden_norm = nn.RMSNorm(width, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + self.self_attn.o_proj(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class State:
    """After a step."""

    hidden: Tensor  # [rows, width], before the final norm
    keys: Tensor  # [conversations, kv_heads, slots, head_dim]: of the first step, padded by conversation
    values: Tensor
    own: list[tuple[Tensor, Tensor]]  # [rows, kv_heads, head_dim] each, of the later steps, which only the row sees


class Eagle3Objective(Objective):
    """
    Args:
        decoder: sizes of the head's own layer; its hidden size is the target's, since it uses the target's embedding.
        target_ids: ``[draft vocabulary]`` int64, ascending.
        num_steps: how far it is unrolled.
        step_weight: a step counts this much of the one before it.
        least_path: rows go on to the next step while the head gives what was written at least this probability, all
            steps together, or guesses it right: where trees go. The others would cost time and teach little.
    """

    def __init__(
        self,
        target: Target,
        decoder: ModelConfig,
        num_taps: int,
        target_ids: Tensor,
        num_steps: int,
        step_weight: float,
        least_path: float,
    ) -> None:
        super().__init__()
        assert decoder.hidden_size == target.config.hidden_size
        self.decoder, self.target_ids = decoder, target_ids
        self.num_steps, self.step_weight = num_steps, step_weight
        self._least_path = math.log(least_path) if least_path else -math.inf
        self.fc = nn.Linear(num_taps * target.config.hidden_size, decoder.hidden_size, bias=False)
        self.midlayer = MidLayer(decoder)
        self.norm = nn.RMSNorm(decoder.hidden_size, eps=decoder.rms_norm_eps)
        self.lm_head = nn.Linear(decoder.hidden_size, len(target_ids), bias=False)
        self._target = target
        self._draft_ids = draft_ids(target_ids, target.config.vocab_size)
        self._rotary = Rotary(decoder)
        self._embedding = nn.Buffer(target.embedding, persistent=False)
        self._target_rows = nn.Buffer(target.output[target_ids], persistent=False)

    def collate(self, conversations: Sequence[Conversation], device: torch.device) -> Batch:
        return make_batch(conversations, self._draft_ids, self.num_steps, device)

    def num_rows(self, ids: Tensor, mask: Tensor) -> int:
        return len(trained_slots(ids, mask, self._draft_ids, 1)[0][0])

    def forward(self, batch: Batch) -> Outcome:
        goal = self.goal(batch.last)
        figures = goal.new_zeros(self.num_steps, len(FIGURES))
        figures[:, 3] = torch.tensor([step.num_places for step in batch.steps])
        loss = goal.new_zeros(())
        step, state = batch.steps[0], self.begin(batch)
        computed = right = torch.ones_like(batch.labels, dtype=torch.bool)
        path = torch.zeros_like(goal[:, 0])  # log-probability of what was guessed so far
        for index in range(self.num_steps):
            if index:
                going = computed.masked_scatter(computed, right | (path >= self._least_path))
                step, computed = batch.steps[index].following(computed, going)
                if not len(step.slots):
                    break
                state = self.advance(batch, state, step, index)
                right, path = right[step.parents], path[step.parents]
            labels = batch.labels[step.ahead]
            logits = self.logits(state.hidden)
            losses, of_labels = soft_cross_entropy_with(labels, logits, goal[step.ahead])
            right, path = right & (logits.argmax(-1) == labels), path + of_labels
            summed = losses.sum()
            loss = loss + self.step_weight**index * summed
            figures[index, :3] = torch.stack((summed.detach(), summed.new_tensor(len(losses)), right.sum()))
        return Outcome(loss, figures)

    @torch.no_grad()
    def goal(self, last: Tensor) -> Tensor:
        """The target's probabilities ``[rows, draft vocabulary]``, as if no other tokens existed."""
        return F.linear(self._target.normed(last), self._target_rows).softmax(-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[rows, draft vocabulary]``."""
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits

    def begin(self, batch: Batch) -> State:
        """The first step: features in, and keys and values of all slots for the steps to come."""
        step = batch.steps[0]
        features = self.fc(
            batch.features.to(self.fc.weight.dtype)
        ).float()  # the residual stream, whatever autocast says
        joined = self._join(batch.tokens, features)
        pad, _ = padding(batch.owners, batch.num_conversations)
        keys, values = (each[pad].transpose(1, 2) for each in self._keys_and_values(joined, batch.positions))
        queries = self._rotated(self.midlayer.self_attn.q_proj(joined[step.slots]), batch.positions[step.slots])
        attended, _ = self._attend_context(queries, keys, values, batch, step)
        return State(self.midlayer.finish(features[step.slots], attended.flatten(1)), keys, values, [])

    def advance(self, batch: Batch, before: State, step: Step, shift: int) -> State:
        """Step ``shift``: what the step before made of its slots in, with the next tokens, at the next positions."""
        hidden = before.hidden[step.parents]
        joined = self._join(batch.tokens[step.slots + shift], hidden)
        positions = batch.positions[step.slots] + shift
        own = [(keys[step.parents], values[step.parents]) for keys, values in before.own]
        own.append(self._keys_and_values(joined, positions))
        queries = self._rotated(self.midlayer.self_attn.q_proj(joined), positions)
        attended, weight = self._attend_context(queries, before.keys, before.values, batch, step)
        attended = self._attend_own(queries, attended, weight, own)
        return State(self.midlayer.finish(hidden, attended.flatten(1)), before.keys, before.values, own)

    def _join(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """What q, k and v read: ``[rows, 2 * width]``, the embedding first."""
        embedded = self.midlayer.input_layernorm(F.embedding(tokens, self._embedding))
        return torch.cat((embedded, self.midlayer.hidden_norm(hidden)), dim=-1)

    def _keys_and_values(self, joined: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Each ``[rows, kv_heads, head_dim]``."""
        values = self.midlayer.self_attn.v_proj(joined).unflatten(-1, (-1, self.decoder.head_dim))
        return self._rotated(self.midlayer.self_attn.k_proj(joined), positions), values

    def _rotated(self, flat: Tensor, positions: Tensor) -> Tensor:
        cos, sin = (each.to(flat.device) for each in self._rotary.at(positions.cpu()))
        return self._rotary(flat.unflatten(-1, (-1, self.decoder.head_dim)), cos, sin)

    def _attend_context(
        self, queries: Tensor, keys: Tensor, values: Tensor, batch: Batch, step: Step
    ) -> tuple[Tensor, Tensor]:
        """Over the slots up to the row's own: ``[rows, heads, head_dim]``, and log of the summed weights."""
        heads, kv_heads = self.decoder.num_heads, self.decoder.num_kv_heads
        pad, unpad = padding(step.owners, batch.num_conversations)
        padded = queries[pad].unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)  # [c, kv_heads, group, rows, dim]
        scores = (padded.flatten(2, 3) @ keys.transpose(2, 3)).float() * self.decoder.head_dim**-0.5
        reach = batch.positions[step.slots][pad].unsqueeze(-1)
        beyond = torch.arange(keys.shape[2], device=reach.device) > reach  # [c, rows, slots]
        scores = scores.unflatten(2, (heads // kv_heads, -1)).masked_fill(beyond[:, None, None], -torch.inf)
        attended = (scores.softmax(-1).flatten(2, 3) @ values).unflatten(2, (heads // kv_heads, -1))
        attended = attended.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
        weight = scores.logsumexp(-1).permute(0, 3, 1, 2).flatten(2, 3).flatten(0, 1)
        return attended[unpad], weight[unpad]

    def _attend_own(
        self, queries: Tensor, attended: Tensor, weight: Tensor, own: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Adds what the row itself was in the later steps; the parts meet by the logarithms of their summed weights."""
        group = self.decoder.num_heads // self.decoder.num_kv_heads
        keys, values = (torch.stack(each).repeat_interleave(group, dim=2) for each in zip(*own, strict=True))
        scores = torch.einsum("rhd,srhd->rhs", queries, keys) * self.decoder.head_dim**-0.5
        shares = torch.cat((weight.unsqueeze(-1), scores), dim=-1).softmax(-1)
        return attended * shares[..., :1] + torch.einsum("rhs,srhd->rhd", shares[..., 1:], values)


def initialise(objective: Eagle3Objective, target: Target, start: str, seed: int) -> None:
    """Gives the weights their first values: ``random``, or with the target's own where shapes fit."""
    randomise(objective, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        if start == "target":
            _start_from(objective, target)


def _start_from(objective: Eagle3Objective, target: Target) -> None:
    """The target's last layer, its final norm and its output rows; the last tap passes through `fc`.

    The half of q, k and v that reads the embedding keeps its small random values.
    """
    width = target.config.hidden_size
    prefix = f"model.layers.{target.config.num_layers - 1}."
    objective.lm_head.weight.copy_(target.output[objective.target_ids])
    objective.norm.weight.copy_(target.norm)
    objective.fc.weight[:, -width:] += torch.eye(width)
    layer = objective.midlayer
    pairs: dict[str, Tensor] = {
        "input_layernorm": layer.hidden_norm.weight,
        "post_attention_layernorm": layer.post_attention_layernorm.weight,
        "self_attn.o_proj": layer.self_attn.o_proj.weight,
        **{f"self_attn.{name}_proj": getattr(layer.self_attn, f"{name}_proj").weight[:, width:] for name in "qkv"},
        **{f"mlp.{name}_proj": getattr(layer.mlp, f"{name}_proj").weight for name in ("gate", "up", "down")},
    }
    for name, own in pairs.items():
        theirs = target.checkpoint.tensor(f"{prefix}{name}.weight")
        if theirs.shape == own.shape:
            own.copy_(theirs)
