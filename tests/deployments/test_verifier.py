"""The bridge between an engine's thread and coroutines, with an engine of a few lines."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import replace

import pytest

from deployments.verifier import EngineHost, Mailbox
from tests.deployments.fakes import IDLE, until, usage
from verifier.errors import BadRequest, DraftreeError
from verifier.sampling import SamplingParams
from workers.inbox import EngineDead
from workers.sequence import Listener, Progress, Request
from workers.stats import Counters, EngineStats

STALL_S = 60.0
REQUEST = Request("r", (1, 2), SamplingParams(), 100)


class ManualEngine:
    """Says what the test tells it to, on whatever thread the test likes."""

    def __init__(self) -> None:
        self.dead: str | None = None
        self.figures = IDLE
        self.listeners: dict[str, Listener] = {}
        self.aborted: list[str] = []

    def submit(self, request: Request, listener: Listener) -> None:
        if request.max_tokens < 1:
            raise BadRequest("max_tokens", request.max_tokens, "at least 1")
        self.listeners[request.id] = listener

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def stats(self) -> EngineStats:
        return self.figures

    def tell(self, *runs: Progress) -> None:
        for run in runs:
            self.listeners[run.request_id](run)


def run_on_thread(engine: ManualEngine, *runs: Progress) -> None:
    thread = threading.Thread(target=engine.tell, args=runs)
    thread.start()
    thread.join()


async def collect(host: EngineHost) -> list[Progress]:
    return [progress async for progress in host.generate(REQUEST)]


async def test_progress_crosses_the_threads_in_order() -> None:
    engine = ManualEngine()
    task = asyncio.create_task(collect(EngineHost(engine, STALL_S)))
    await until(lambda: bool(engine.listeners))
    for token in range(50):
        run_on_thread(engine, Progress("r", (token,)))
        if token % 7 == 0:
            await asyncio.sleep(0)
    run_on_thread(engine, Progress("r", (50,), "stop", usage(REQUEST)))
    runs = await asyncio.wait_for(task, 5)
    assert [token for run in runs for token in run.tokens] == list(range(51))
    assert [run.finish for run in runs] == [None] * (len(runs) - 1) + ["stop"]
    assert runs[-1].usage == usage(REQUEST)
    assert engine.aborted == []


async def test_what_piles_up_is_one_run() -> None:
    engine = ManualEngine()
    runs = EngineHost(engine, STALL_S).generate(REQUEST)
    first = asyncio.ensure_future(anext(runs))
    await until(lambda: bool(engine.listeners))
    run_on_thread(engine, Progress("r", (1, 2)), Progress("r", (3,)), Progress("r", (4,), "length", usage(REQUEST)))
    assert await first == Progress("r", (1, 2, 3, 4), "length", usage(REQUEST))
    assert [run async for run in runs] == []


async def test_no_letter_is_lost_between_two_busy_threads() -> None:
    """A wake-up that came too early or too late would leave the reader waiting for ever."""
    mailbox = Mailbox()
    count = 20_000
    letters = [Progress("r", (token,), "stop" if token == count - 1 else None) for token in range(count)]
    writer = threading.Thread(target=lambda: deque(map(mailbox.post, letters), 0))
    writer.start()
    tokens: list[int] = []
    async with asyncio.timeout(30):
        while len(tokens) < count:
            tokens.extend((await mailbox.take()).tokens)
    writer.join()
    assert tokens == list(range(count))


async def test_a_cancelled_reader_aborts() -> None:
    engine = ManualEngine()
    task = asyncio.create_task(collect(EngineHost(engine, STALL_S)))
    await until(lambda: bool(engine.listeners))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert engine.aborted == ["r"]


async def test_a_closed_generator_aborts() -> None:
    engine = ManualEngine()
    runs = EngineHost(engine, STALL_S).generate(REQUEST)
    first = asyncio.ensure_future(anext(runs))
    await until(lambda: bool(engine.listeners))
    run_on_thread(engine, Progress("r", (1,)))
    await first
    await runs.aclose()
    assert engine.aborted == ["r"]


async def test_a_refused_request_is_raised_and_not_aborted() -> None:
    engine = ManualEngine()
    with pytest.raises(BadRequest):
        await anext(EngineHost(engine, STALL_S).generate(replace(REQUEST, max_tokens=0)))
    assert engine.aborted == []


async def test_a_request_that_waits_hears_of_the_steps_that_others_get() -> None:
    """Or whoever watches could not tell a busy engine from one that is stuck."""
    engine = ManualEngine()
    runs = EngineHost(engine, STALL_S, beat_s=0.005).generate(REQUEST)
    word = asyncio.ensure_future(anext(runs))
    await until(lambda: bool(engine.listeners))
    await asyncio.sleep(0.05)
    assert not word.done(), "no steps, no word"
    engine.figures = replace(IDLE, running=1, waiting=1, counters=Counters(steps=1))
    assert await asyncio.wait_for(word, 5) == Progress("r", ())
    run_on_thread(engine, Progress("r", (1,), "stop", usage(REQUEST)))
    assert [run.tokens async for run in runs if run.tokens] == [(1,)]


async def test_the_end_of_an_engine_is_not_the_requests_fault() -> None:
    engine = ManualEngine()
    word = asyncio.ensure_future(anext(EngineHost(engine, STALL_S).generate(REQUEST)))
    await until(lambda: bool(engine.listeners))
    engine.dead = "the verifier is broken: RuntimeError: boom"
    run_on_thread(engine, Progress("r", (), "error", error=engine.dead))
    with pytest.raises(EngineDead, match="boom"):
        await asyncio.wait_for(word, 5)


def test_a_dead_engine_is_unhealthy() -> None:
    engine = ManualEngine()
    host = EngineHost(engine, STALL_S)
    host.check()
    engine.dead = "the engine failed: RuntimeError: boom"
    with pytest.raises(DraftreeError, match="boom"):
        host.check()


def test_an_engine_that_stalls_is_unhealthy_and_an_idle_one_is_not() -> None:
    engine = ManualEngine()
    now = 0.0
    host = EngineHost(engine, STALL_S, clock=lambda: now)

    def check(steps: int, running: int, at: float) -> None:
        nonlocal now
        now = at
        engine.figures = replace(IDLE, running=running, counters=Counters(steps=steps))
        host.check()

    check(steps=5, running=0, at=10)
    check(steps=5, running=0, at=1000)  # nothing to do
    check(steps=6, running=1, at=1010)
    check(steps=6, running=1, at=1010 + STALL_S - 1)  # a long step
    check(steps=7, running=1, at=1010 + STALL_S + 1)
    with pytest.raises(DraftreeError, match="no step"):
        check(steps=7, running=1, at=1010 + 2 * STALL_S + 2)
