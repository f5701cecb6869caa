"""Ordinary decoder layers in training, over whole conversations at once: EAGLE-1 heads and small models.

A slot holds a token that the target may have written, and learns what the target says after it. Names are those of
Hugging Face's checkpoints. Knows no method: whether slots read features, and what a loss is made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.training.objectives.eagle3 import MLP
from drafter.training.shards import Conversation
from verifier.config import ModelConfig
from verifier.layers import Rotary


class Attention(nn.Module):
    """Causal. Conversations are padded at their ends, so that no token sees padding."""

    def __init__(self, decoder: ModelConfig) -> None:
        super().__init__()
        width, queries = decoder.hidden_size, decoder.num_heads * decoder.head_dim
        keys = decoder.num_kv_heads * decoder.head_dim
        self.q_proj = nn.Linear(width, queries, bias=False)
        self.k_proj = nn.Linear(width, keys, bias=False)
        self.v_proj = nn.Linear(width, keys, bias=False)
        self.o_proj = nn.Linear(queries, width, bias=False)
        self._head_dim = decoder.head_dim
        self._rotary = Rotary(decoder)

    def forward(self, x: Tensor) -> Tensor:
        """``[conversations, slots, width]`` to the same."""
        cos, sin = (each.squeeze(1).to(x.device) for each in self._rotary.at(torch.arange(x.shape[1])))
        queries, keys, values = (
            linear(x).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = (self._rotary(each, cos, sin).to(values.dtype) for each in (queries, keys))
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out


class DecoderLayer(nn.Module):
    """
    Args:
        has_input_norm: an EAGLE-1 head's first layer has none.
    """

    def __init__(self, decoder: ModelConfig, *, has_input_norm: bool = True) -> None:
        super().__init__()
        width, eps = decoder.hidden_size, decoder.rms_norm_eps
        self.self_attn = Attention(decoder)
        self.mlp = MLP(decoder)
        self.input_layernorm = nn.RMSNorm(width, eps=eps) if has_input_norm else nn.Identity()
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


@dataclass(frozen=True)
class Batch:
    """Some conversations, slot by slot up to the last one that is trained on."""

    tokens: Tensor  # [conversations, slots] int64; padding is 0
    features: Tensor  # [conversations, slots, H] float16: last states of the positions before the tokens'
    lengths: Tensor  # [conversations]: tokens of each
    rows: Tensor  # [rows] into the slots, flattened: those that are trained on
    last: Tensor  # [rows, H] float16: the target's state at the slot's token, which predicts the next
    labels: Tensor  # [rows] int64: the next token


def trained_slots(mask: Tensor, first_token: int) -> Tensor:
    """Slots whose token and the one after it are of one answer: a guess follows a token that the target wrote.

    Args:
        first_token: of a conversation, that has a slot.
    """
    mask = mask[first_token:].bool()
    return (mask[:-1] & mask[1:]).nonzero()[:, 0]


def make_batch(conversations: Sequence[Conversation], first_token: int, device: torch.device) -> Batch:
    """Of conversations that all have something to train on."""
    slots = [trained_slots(each.mask, first_token) for each in conversations]
    width = max(int(each[-1]) for each in slots) + 1
    ids = [each.ids.long() for each in conversations]
    sizes = [int(each[-1]) + 1 for each in slots]

    def padded(parts: Sequence[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(list(parts), batch_first=True).to(device)

    def joined(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts)).to(device)

    return Batch(
        tokens=padded([each[first_token : first_token + size] for each, size in zip(ids, sizes, strict=True)]),
        features=padded([each.last[:size] for each, size in zip(conversations, sizes, strict=True)]),
        lengths=torch.tensor([len(each) for each in conversations], device=device),
        rows=joined([each + index * width for index, each in enumerate(slots)]),
        last=joined([each.last[rows + first_token] for each, rows in zip(conversations, slots, strict=True)]),
        labels=joined([each[rows + first_token + 1] for each, rows in zip(ids, slots, strict=True)]),
    )


def runs_of_hits(batch: Batch, hits: Tensor, num_steps: int) -> Tensor:
    """By step, how often that many slots in a row were right, and how often there were that many: ``[steps, 2]``.

    What a network says after tokens that it would have guessed itself is what it says in a draft.

    Args:
        hits: ``[rows]`` bool.
    """
    shape = batch.tokens.shape
    place = torch.zeros(shape.numel(), dtype=torch.bool, device=hits.device)
    right, place = place.index_copy(0, batch.rows, hits).view(shape), place.index_fill(0, batch.rows, True).view(shape)
    all_right, all_there = right, place
    counts = []
    for step in range(num_steps):
        if step:
            all_right, all_there = all_right[:, :-1] & right[:, step:], all_there[:, :-1] & place[:, step:]
        counts.append(torch.stack((all_right.sum(), all_there.sum())))
    return torch.stack(counts)
