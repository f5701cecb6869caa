"""What decoding costs and what guessing gains, on this machine: forward passes by rows, and tokens/s of whole answers.

Each contestant generates as many greedy tokens, the prompt included in its time. Knows no HTTP: see
`deployments.bench`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from drafter.base import DraftLimits, NoDraft
from drafter.factory import create_drafter
from drafter.scripted import Oracle
from verifier.batch import Segment, StepPlan
from verifier.rows import RowCounts
from verifier.tree import TokenTree
from verifier.verifier import Verifier
from workers.build import DEFAULT_LIMITS
from workers.measuring.contest import Contestant, engine_contestant

ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 48)


def milliseconds_by_rows(verifier: Verifier, context: int, rounds: int) -> dict[int, float]:
    """Median time of a forward pass over one sequence's chain of so many rows, each with logits, after ``context``."""
    pages = tuple(range(-(-(context + max(ROWS)) // verifier.pool.page_size)))
    for start in range(0, context, 64):
        verifier.forward(StepPlan((Segment(start, TokenTree.chain(range(100, 164)), pages, scored_from=63),)))
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(rounds):
        for rows in ROWS:
            plan = StepPlan((Segment(context, TokenTree.chain(range(200, 200 + rows)), pages),))
            began = time.perf_counter()
            verifier.forward(plan)
            times[rows].append(1e3 * (time.perf_counter() - began))
    return {rows: statistics.median(each) for rows, each in times.items()}


def transformers_contestant(folder: Path, max_tokens: int) -> Contestant:
    """`generate` of `transformers` in fp32 with its own defaults, greedy, never stopping early."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def answer(ids: Sequence[int]) -> Sequence[int]:
        prompt = torch.tensor([list(ids)])
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
        )
        return output[0, len(ids) :].tolist()  # type: ignore[no-any-return]

    return answer


class Remembered:
    """Answers heard from one contestant, as the continuation that an oracle proposes to another."""

    def __init__(self, contestant: Contestant) -> None:
        self._contestant = contestant
        self._heard: list[tuple[int, ...]] = []

    def answer(self, ids: Sequence[int]) -> Sequence[int]:
        answer = self._contestant(ids)
        self._heard.append((*ids, *answer))
        return answer

    def continuation(self, ids: Sequence[int]) -> Sequence[int]:
        for text in reversed(self._heard):
            if text[: len(ids)] == tuple(ids):
                return text[len(ids) : len(ids) + DEFAULT_LIMITS.max_draft]
        return ()


def contestants(folder: Path, verifier: Verifier, max_tokens: int) -> dict[str, Contestant]:
    """`transformers`, plain decoding exact and not, an oracle that drafts what plain decoding said, and n-grams."""
    inexact = Verifier(verifier.model, verifier.pool, RowCounts.any_up_to(verifier.max_rows), verifier.fingerprint)
    plain = Remembered(engine_contestant(verifier, NoDraft(), DraftLimits(), max_tokens))
    return {
        "transformers fp32": transformers_contestant(folder, max_tokens),
        "plain": plain.answer,
        "plain, not exact": engine_contestant(inexact, NoDraft(), DraftLimits(), max_tokens),
        "oracle": engine_contestant(verifier, Oracle(plain.continuation), DEFAULT_LIMITS, max_tokens),
        "n-gram": engine_contestant(verifier, create_drafter("ngram"), DEFAULT_LIMITS, max_tokens),
    }
