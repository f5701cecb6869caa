"""A tiny target and what it might have written, for runs of seconds."""

from __future__ import annotations

from pathlib import Path

import torch

from drafter.training.shards import Conversation, ShardHeader, write_shard
from drafter.training.target import Target
from tests.models import save_tiny_model

WIDTH, NUM_TAPS = 72, 3  # of the tiny target
KINDS = ("chat", "code")


def tiny_target(folder: Path) -> Path:
    return save_tiny_model(folder, "smollm2")


def header(target: Target) -> ShardHeader:
    return ShardHeader("smollm2", target.checkpoint.fingerprint, (0, 1, 2), KINDS, seed=7)


def countdown(num_tokens: int, seed: int) -> Conversation:
    """A text that can be learnt: each token is three more than the one before, of forty, and states say nothing."""
    generator = torch.Generator().manual_seed(seed)
    ids = 110 + (seed + 3 * torch.arange(num_tokens)) % 40
    return Conversation(
        ids=ids.int(),
        mask=(torch.arange(num_tokens) >= num_tokens // 3).to(torch.uint8),
        kind=KINDS[seed % 2],
        features=torch.randn(num_tokens, NUM_TAPS * WIDTH, generator=generator).half() * 0.1,
        last=torch.randn(num_tokens, WIDTH, generator=generator).half(),
    )


def said_by(target: Target, each: Conversation) -> Conversation:
    """The same conversation with last states that make the target say the next token."""
    after = torch.cat((each.ids[1:], each.ids[:1])).long()
    last = 40 * target.output[after] / target.norm
    return Conversation(each.ids, each.mask, each.kind, each.features, last.half())


def save_data(folder: Path, model: Path, *seeds: int, name: str = "a") -> Path:
    """One shard with a conversation for each seed."""
    target = Target.open(model)
    conversations = [said_by(target, countdown(16 + seed % 5, seed)) for seed in seeds]
    write_shard(folder / f"{name}.safetensors", header(target), conversations)
    return folder
