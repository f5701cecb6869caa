"""What stands in for the parts behind the interface: a tokenizer of bytes, and a verifier that follows a script."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from deployments.admission import Admission
from deployments.aggregator import Aggregator
from deployments.agreement import Aggregate, Agreement, AtHand
from deployments.fleet import Placement
from deployments.keys import KeyRing
from deployments.router import Limits, Router
from deployments.service import Service
from deployments.speculation import DraftGuide
from drafter.base import DraftLimits
from workers.costs import Prices
from workers.measuring.tiny import TEMPLATE as TEMPLATE
from workers.measuring.tiny import byte_text
from workers.sequence import FinishReason, Progress, Request
from workers.stats import Counters, EngineStats, Speculation, Usage

MODEL = "fake/model"
MAX_MODEL_LEN = 2048
TEXT = byte_text()
END = TEXT.encode("<|end|>")[0]
VOCAB_SIZE = END + 1
DRAFT = DraftLimits(5, 2, 8)
IDLE = EngineStats(0, 0, 64, 0, 64, 0, 0, 0, 0, Counters())

Script = Callable[[Request], Sequence[Progress]]


def usage(request: Request, output_tokens: int = 0) -> Usage:
    """Steps of a chain of two guesses, of which the first was always right."""
    steps = output_tokens // 2
    spoken = Speculation(steps, 2 * steps, 2 * steps, steps, (steps, steps), (steps, 0), (steps, steps))
    prompt_tokens = len(request.prompt_ids)
    return Usage(**vars(spoken), prompt_tokens=prompt_tokens, cached_tokens=2, output_tokens=output_tokens)


def says(*runs: str, end: bool = True) -> Script:
    """Writes these runs of text, as the engine would: cut at the budget, and with a stop id at the end."""

    def script(request: Request) -> list[Progress]:
        ids = [TEXT.encode(run) for run in runs]
        if end:
            ids[-1] = [*ids[-1], END]
        progress: list[Progress] = []
        written = 0
        for run in ids:
            tokens: list[int] = []
            finish: FinishReason | None = None
            for token in run:
                tokens.append(token)
                written += 1
                if token in request.stop_ids:
                    finish = "stop"
                elif written == request.max_tokens:
                    finish = "length"
                if finish:
                    break
            if finish:
                return [*progress, Progress(request.id, tuple(tokens), finish, usage(request, written))]
            progress.append(Progress(request.id, tuple(tokens), usage=usage(request, written)))
        return [*progress, Progress(request.id, (), "length", usage(request, written))]

    return script


@dataclass
class ScriptedVerifier:
    """Follows ``script``; remembers what it was asked and which requests were aborted."""

    script: Script = field(default_factory=lambda: says("Hello", " world"))
    pause_s: float = 0.0  # between runs
    unwell: Exception | None = None  # what stats() raises
    figures: EngineStats = IDLE
    requests: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)

    async def generate(self, request: Request, placement: Placement) -> AsyncGenerator[Progress, None]:
        self.requests.append(request)
        placement.accepted = True
        try:
            for progress in self.script(request):
                await asyncio.sleep(self.pause_s)
                yield progress
                if progress.finish is not None:
                    self.finished.append(request.id)
        finally:
            if request.id not in self.finished:
                self.aborted.append(request.id)

    async def stats(self) -> EngineStats:
        if self.unwell is not None:
            raise self.unwell
        return self.figures


def busy_stats() -> EngineStats:
    speculation = Speculation(10, 25, 30, 15, (10, 9, 8), (9, 4, 2), (10, 9, 4))
    counters = Counters(steps=12, rows=52, prompt_tokens=40, output_tokens=27, speculation=speculation)
    return EngineStats(2, 1, 64, 10, 54, 7, 0, 0, 0, counters, prices=Prices({1: 0.03}, {1: {2: 0.01}}))


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for knows no events
            await asyncio.sleep(0.002)


def agreement(
    verifier: ScriptedVerifier,
    capacity: int = 100,
    replicas: int = 1,
    aggregate: Aggregate | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Agreement:
    """By default with an aggregator of its own."""
    aggregate = aggregate or AtHand(Aggregator(replicas, DRAFT.max_draft, clock))
    admission, guide = Admission(capacity, replicas, clock), DraftGuide(clock)
    return Agreement(aggregate, admission, guide, verifier.stats, "ngram", clock)


def service(verifier: ScriptedVerifier, keys: KeyRing | None = None, agreed: Agreement | None = None) -> Service:
    limits = Limits(MAX_MODEL_LEN, VOCAB_SIZE, frozenset({END}))
    router = Router(verifier, TEXT, limits)
    return Service(MODEL, router, verifier, TEXT, DRAFT, agreed or agreement(verifier), keys or KeyRing({}))
