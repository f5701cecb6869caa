"""Real engines that are lost at every point of a text; what they say depends on all of it, as with a model."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from ray.exceptions import ActorUnavailableError

from deployments.fleet import Fleet, Placement, Report
from deployments.metrics import RequestMetrics
from deployments.replay import Patience, Replays
from deployments.verifier import EngineHost
from drafter.ngram import NgramDraft
from tests.deployments.fakes import IDLE, until
from tests.fakes import FakeVerifier, plain_decoding
from verifier.sampling import SamplingParams
from workers.config import EngineConfig
from workers.engine import Engine
from workers.sequence import Progress, Request
from workers.stats import EngineStats

PROMPT = (3, 4, 5, 3, 4, 5, 3, 4)
LENGTH = 12
PATIENCE = Patience(stall_s=0.2, replica_s=5, settle_s=0.01)
SAMPLINGS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0, seed=7),
    SamplingParams(temperature=0.7, top_k=8, top_p=0.9, seed=3),
]


class TwoEngines:
    """Replicas a and b. An attempt on a is cut off after so many tokens."""

    def __init__(self) -> None:
        self.verifiers = {name: FakeVerifier(num_pages=32, page_size=4) for name in "ab"}
        self.engines = {
            name: Engine(verifier, NgramDraft(), EngineConfig(num_pages=32, page_size=4))
            for name, verifier in self.verifiers.items()
        }
        self.hosts = {name: EngineHost(engine, 60, beat_s=0.02) for name, engine in self.engines.items()}
        self.fleet = Fleet()
        self.fleet.update([Report(name, "fake|", max_running=8, free_tokens=100) for name in self.hosts])
        self.cut: int | None = None

    async def generate(self, request: Request, placement: Placement) -> AsyncGenerator[Progress, None]:
        first = request.id.endswith(".1")
        name = self.fleet.choose(request, placement, "a" if first else "b")
        assert name is not None
        placement.accepted = True
        said = 0
        if first and self.cut == 0:
            raise ActorUnavailableError("gone", b"")
        async for progress in self.hosts[name].generate(request):
            yield progress
            said += len(progress.tokens)
            if first and self.cut is not None and said >= self.cut:
                raise ActorUnavailableError("gone", b"")

    async def stats(self) -> EngineStats:
        return IDLE


@contextmanager
def two_engines() -> Iterator[TwoEngines]:
    pair = TwoEngines()
    for engine in pair.engines.values():
        engine.start()
    try:
        yield pair
    finally:
        for engine in pair.engines.values():
            engine.stop()
            engine.check_integrity()


async def written(pair: TwoEngines, number: int, sampling: SamplingParams, patience: Patience = PATIENCE) -> list[int]:
    replays = Replays(pair, RequestMetrics(), patience)
    request = Request(f"r{number}", PROMPT, sampling, LENGTH)
    return [token async for run in replays.generate(request) for token in run.tokens]


def idle(engine: Engine) -> bool:
    stats = engine.stats()
    return stats.running + stats.waiting + stats.pages_used == 0


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_wherever_an_engine_is_lost_another_writes_the_same(sampling: SamplingParams) -> None:
    truth = list(plain_decoding(PROMPT, sampling, LENGTH))
    with two_engines() as pair:
        for cut in range(LENGTH):
            pair.cut = cut
            assert await written(pair, cut, sampling) == truth
        await until(lambda: all(map(idle, pair.engines.values())))


async def test_a_frozen_engine_that_wakes_finds_its_request_gone() -> None:
    """Somebody else has finished it; what it has to say itself is heard by nobody, and nothing stays allocated."""
    frozen, wake = threading.Event(), threading.Event()
    with two_engines() as pair:

        def freeze(_: object) -> None:
            if len(pair.verifiers["a"].plans) == 3:
                frozen.set()
                wake.wait(10)

        pair.verifiers["a"].on_forward = freeze
        assert await written(pair, 0, SAMPLINGS[1], replace(PATIENCE, stall_s=1)) == list(
            plain_decoding(PROMPT, SAMPLINGS[1], LENGTH)
        )
        assert frozen.is_set()
        assert not idle(pair.engines["a"])
        wake.set()
        await until(lambda: idle(pair.engines["a"]))
        assert pair.engines["a"].stats().counters.finished["abort"] == 1
