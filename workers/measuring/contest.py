"""Contestants that answer the same prompts in turn, prompt by prompt, each with an engine of its own over one model.

All see the same machine, threads and OpenMP settings in the same minute. Knows what is answered and how long it takes;
what is compared with what is for whoever calls.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from drafter.base import Drafter, DraftLimits
from drafter.factory import DraftPlan
from verifier.errors import BadSetting
from verifier.pool import PagePool
from verifier.sampling import SamplingParams
from verifier.verifier import Verifier
from verifier.weights import Checkpoint
from workers.config import EngineConfig
from workers.engine import Engine
from workers.machine import available_memory, check_memory
from workers.measuring.prompts import Prompt
from workers.profile import profile
from workers.sequence import Request
from workers.text import Text

PAGE_SIZE = 16  # tokens
TREE_SLOTS = 128  # of the KV cache, beside the text's own

Contestant = Callable[[Sequence[int]], Sequence[int]]  # from prompt ids to answer ids
Question = TypeVar("Question")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Asked:
    """A prompt as the model sees it."""

    category: str
    ids: tuple[int, ...]

    @property
    def digest(self) -> str:
        """Names it, whichever file it stands in."""
        return digest_of(self.ids)


def digest_of(ids: Sequence[int]) -> str:
    return hashlib.sha256(repr(tuple(ids)).encode()).hexdigest()[:16]


def ask(text: Text, prompts: Sequence[Prompt]) -> list[Asked]:
    """Prompts as a user's first words where the model has a chat template, else as texts to go on with."""

    def ids(words: str) -> Sequence[int]:
        return text.chat_ids([{"role": "user", "content": words}]) if text.has_chat_template else text.encode(words)

    return [Asked(prompt.category, tuple(ids(prompt.text))) for prompt in prompts]


@dataclass
class Scores:
    """One contestant's answers."""

    tokens_per_s: list[float] = field(default_factory=list)  # a prompt each
    answers: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_s)

    def over(self, other: Scores) -> float:
        """Median over the prompts of how many times faster than ``other``."""
        return statistics.median(a / b for a, b in zip(self.tokens_per_s, other.tokens_per_s, strict=True))

    def differing(self, other: Scores) -> int:
        """Answers that are not ``other``'s."""
        return sum(a != b for a, b in zip(self.answers, other.answers, strict=True))


def take_turns(
    contestants: Mapping[str, Callable[[Question], Answer]], question: Question
) -> dict[str, tuple[Answer, float]]:
    """Every contestant's answer to one question, one after the other, and the seconds that it took."""
    answers: dict[str, tuple[Answer, float]] = {}
    for name, contestant in contestants.items():
        began = time.perf_counter()
        answer = contestant(question)
        answers[name] = answer, time.perf_counter() - began
    return answers


def in_turn(contestants: Mapping[str, Contestant], prompts: Sequence[Sequence[int]]) -> dict[str, Scores]:
    """Every contestant answers every prompt; one unmeasured prompt comes first."""
    scores = {name: Scores() for name in contestants}
    take_turns(contestants, prompts[0])
    for prompt in prompts:
        for name, (answer, seconds) in take_turns(contestants, prompt).items():
            scores[name].tokens_per_s.append(len(answer) / seconds)
            scores[name].answers.append(tuple(answer))
    return scores


def load_verifier(
    path: Path, asked: Sequence[Asked], max_tokens: int, plans: Sequence[DraftPlan], at_a_time: int = 1
) -> Verifier:
    """The model, with pages for the longest of the prompts and its answer, or so many of them.

    Raises:
        DraftreeError: they are longer than the model's positions, or it does not fit into memory beside the drafters.
    """
    model = Checkpoint.open(path).config
    longest = max(len(prompt.ids) for prompt in asked) + max_tokens
    if (num_prompt := longest - max_tokens) >= model.max_positions:
        raise BadSetting("prompts", f"up to {num_prompt} tokens long", f"shorter than {model.max_positions} tokens")
    if longest > model.max_positions:
        allowed = f"at most {model.max_positions - longest + max_tokens}, which are left after the longest prompt"
        raise BadSetting("max_tokens", max_tokens, allowed)
    num_pages = at_a_time * math.ceil((longest + TREE_SLOTS) / PAGE_SIZE)
    for plan in plans:
        check_memory(model, EngineConfig(num_pages, PAGE_SIZE), plan, available_memory())
    return Verifier.load(path, num_pages=num_pages, page_size=PAGE_SIZE)


def beside(verifier: Verifier) -> Verifier:
    """Another one over the same weights and pages, that keeps no features but those its own engine asks for."""
    return Verifier(verifier.model, verifier.pool, verifier.row_counts, verifier.fingerprint)


def apart(verifier: Verifier) -> Verifier:
    """Another one over the same weights, with pages of its own."""
    config, pool = verifier.model.local_config, verifier.pool
    own = PagePool.of(config, pool.num_pages, pool.page_size, pool.device)
    return Verifier(verifier.model, own, verifier.row_counts, verifier.fingerprint)


def engine_of(verifier: Verifier, drafter: Drafter, limits: DraftLimits, **settings: Any) -> Engine:
    """An engine that nothing is cached in between answers. Engines over the same pages must not run at a time.

    Args:
        settings: others of `EngineConfig`.
    """
    num_pages, page_size = verifier.pool.num_pages - 1, verifier.pool.page_size  # the last page only takes padding
    longest = min(num_pages * page_size, verifier.config.max_positions)
    config = EngineConfig(num_pages, page_size, max_model_len=longest, prefix_cache=False, limits=limits, **settings)
    engine = Engine(verifier, drafter, config)
    if config.adaptive:
        profile(verifier, engine.pages, engine.costs, engine.clock)
    return engine


def engine_contestant(verifier: Verifier, drafter: Drafter, limits: DraftLimits, max_tokens: int) -> Contestant:
    """Greedy answers of exactly ``max_tokens`` tokens."""
    engine = engine_of(verifier, drafter, limits)
    request = Request("bench", (), SamplingParams(temperature=0), max_tokens)
    return lambda ids: engine.run([replace(request, prompt_ids=tuple(ids))])[0].output_ids
