"""Small shards of made-up conversations."""

from __future__ import annotations

from pathlib import Path

import torch

from drafter.training.shards import Conversation, ShardHeader, write_shard

HEADER = ShardHeader("tiny", "0123", (1, 2), ("chat", "code"), seed=7)


def conversation(
    num_tokens: int, *, seed: int = 0, hidden: int = 8, num_taps: int = 2, vocab: int = 50
) -> Conversation:
    """Random tokens and states; the second half is the answer."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(num_tokens) >= num_tokens // 2).to(torch.uint8)
    return Conversation(
        ids=torch.randint(0, vocab, (num_tokens,), generator=generator, dtype=torch.int32),
        mask=mask,
        kind=HEADER.kinds[seed % 2],
        features=torch.randn(num_tokens, num_taps * hidden, generator=generator).half(),
        last=torch.randn(num_tokens, hidden, generator=generator).half(),
    )


def save_shards(
    folder: Path, *lengths: list[int], header: ShardHeader = HEADER, hidden: int = 8, vocab: int = 50
) -> Path:
    """A shard for each list of lengths."""
    for number, each in enumerate(lengths):
        conversations = [
            conversation(n, seed=100 * number + i, hidden=hidden, num_taps=len(header.layer_ids), vocab=vocab)
            for i, n in enumerate(each)
        ]
        write_shard(folder / f"{number:05}.safetensors", header, conversations)
    return folder
