"""The verifier's deployment: an engine on its own thread, and the bridge from that thread to asyncio.

`EngineHost` is a plain class round anything shaped like an engine; `VerifierReplica` builds the real engine and is what
Serve places, watches and replaces. Knows ids, never text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from ray.exceptions import RayActorError

from deployments.autoscaling import VerifierReport
from deployments.checks import engine_spec, fingerprint
from deployments.exchange import ClusterChoice, Exchange, with_choice
from deployments.fleet import Placement
from deployments.rendezvous import ServeFinder
from deployments.routing import FINGERPRINT
from deployments.settings import Settings
from drafter.base import Drafter
from drafter.factory import spelled_out
from verifier.errors import DraftreeError
from workers.build import build_engine
from workers.inbox import EngineDead
from workers.remote.placement import Elsewhere, check_needs_no_drafters
from workers.sequence import Listener, Progress, Request
from workers.stats import EngineStats

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

log = logging.getLogger("ray.serve")
BEAT_S = 1.0  # between two signs of life of an engine that makes steps and has nothing to say to a request


class Engine(Protocol):
    """What is used of a `workers.engine.Engine`."""

    @property
    def dead(self) -> str | None: ...

    def submit(self, request: Request, listener: Listener) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def stats(self) -> EngineStats: ...


class EngineHost:
    """An engine that runs on another thread, offered to coroutines."""

    def __init__(
        self, engine: Engine, stall_s: float, beat_s: float = BEAT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``stall_s``: with requests to run and no step for so long, the engine is given up for lost."""
        self.engine = engine
        self._stall_s, self._beat_s, self._clock = stall_s, beat_s, clock
        self._steps, self._moved_at = -1, clock()

    async def generate(self, request: Request) -> AsyncGenerator[Progress, None]:
        """The request's progress until its finish. Closed or cancelled before that, the request is aborted.

        While there is none but the engine makes steps, an empty one comes now and then: so whoever waits can tell a
        request that has to wait its turn from an engine that is stuck.

        Raises:
            EngineDead: the engine failed, not this request.
        """
        mailbox = Mailbox()
        self.engine.submit(request, mailbox.post)
        finished = False
        try:
            while not finished:
                progress = await self._word(request, mailbox)
                finished = progress.finish is not None
                if progress.finish == "error" and self.engine.dead is not None:
                    raise EngineDead(self.engine.dead)
                yield progress
        finally:
            if not finished:
                self.engine.abort(request.id)

    async def _word(self, request: Request, mailbox: Mailbox) -> Progress:
        steps = self._counted_steps
        while True:
            try:
                async with asyncio.timeout(self._beat_s):
                    return await mailbox.take()
            except TimeoutError:
                if self._counted_steps != steps:
                    return Progress(request.id, ())

    @property
    def _counted_steps(self) -> int:
        return self.engine.stats().counters.steps

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def check(self) -> None:
        """To be called now and then.

        Raises:
            DraftreeError: the engine serves no more, or has not made a step for ``stall_s`` although it had work.
        """
        if self.engine.dead is not None:
            raise DraftreeError(self.engine.dead)
        stats, now = self.engine.stats(), self._clock()
        if stats.counters.steps != self._steps or not stats.running + stats.waiting:
            self._steps, self._moved_at = stats.counters.steps, now
        if now - self._moved_at > self._stall_s:
            raise DraftreeError(f"the engine has made no step for {now - self._moved_at:.0f} seconds")


class Mailbox:
    """Carries one request's progress from the engine's thread to a coroutine.

    What piles up while the coroutine is busy is handed over as one run: a slow reader costs less, not more.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._letters: deque[Progress] = deque()
        self._ready = asyncio.Event()

    def post(self, progress: Progress) -> None:
        """Called on the engine's thread. Wakes the coroutine unless an earlier letter has done so already."""
        self._letters.append(progress)
        if len(self._letters) == 1:
            self._loop.call_soon_threadsafe(self._ready.set)

    async def take(self) -> Progress:
        while not self._letters:
            self._ready.clear()
            await self._ready.wait()
        last = self._letters.popleft()
        tokens = list(last.tokens)
        while last.finish is None and self._letters:
            last = self._letters.popleft()
            tokens.extend(last.tokens)
        return Progress(last.request_id, tuple(tokens), last.finish, last.usage, last.error)


class ReplicaLost(RayActorError):
    """An engine that is dead or stuck, so called that Serve replaces its replica at once.

    Of other errors of a health check it waits for three in a row. But no engine comes back to life.
    """


class VerifierReplica:
    """Loads the model and serves it; the engine's thread is this process's heart."""

    def __init__(self, settings: Settings, drafter: DeploymentHandle[Any] | None = None) -> None:
        """``drafter``: the deployment in which the draft network runs; None: it runs here, if there is one."""
        choice = ClusterChoice(settings)
        chosen = choice.read()
        spec = engine_spec(with_choice(settings, chosen))
        self._elsewhere = Elsewhere(ServeFinder(drafter)) if drafter else None
        engine, _ = build_engine(spec, log.info, self._elsewhere)
        self._config = engine.config
        self._fingerprint = fingerprint(settings) + engine.verifier.fingerprint
        engine.start()
        self._engine, self._spec = engine, spec
        self._has_drafters = drafter is not None or settings.drafter_placement == "local"
        self._exchange = Exchange(spec.draft_model, choice, chosen, self._load, engine.exchange_drafter)
        self._exchange.start()
        self._host = EngineHost(engine, settings.stall_timeout_s)
        self._report = VerifierReport(engine.config.max_running)

    async def generate(self, request: Request, _: Placement) -> AsyncGenerator[Progress, None]:
        """Placements were for those who chose this replica."""
        async with aclosing(self._host.generate(request)) as runs:
            async for progress in runs:
                yield progress

    async def check_draft_model(self, draft_model: str) -> str:
        """Why it could not guess here, in a sentence; "" if it could."""
        return await self._exchange.check(draft_model)

    async def take_up_draft_model(self, draft_model: str, number: str) -> str:
        """As `check_draft_model`, and lets it guess if it can."""
        return await self._exchange.take_up(draft_model, number)

    async def stats(self, _: Placement | None = None) -> EngineStats:
        self._host.check()
        remote = replace(self._elsewhere.figures) if self._elsewhere else None
        draft_model = spelled_out(self._exchange.draft_model, self._engine.verifier.config)
        return replace(self._host.stats(), remote=remote, draft_model=draft_model)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve's policy goes by (`deployments.autoscaling`)."""
        return self._report(self._host.stats(), self._elsewhere.figures if self._elsewhere else None)

    def record_replica_metadata(self) -> dict[str, str]:
        """Asked once by Serve, for `deployments.routing`."""
        return {FINGERPRINT: self._fingerprint}

    def record_routing_stats(self) -> dict[str, int]:
        """Asked now and then by Serve, for `deployments.routing`: the fields of a `deployments.fleet.Report`."""
        stats = self._host.stats()
        return {
            "requests": stats.running + stats.waiting,
            "max_running": self._config.max_running,
            "free_tokens": stats.pages_free * self._config.page_size,
        }

    def check_health(self) -> None:
        """
        Raises:
            ReplicaLost: this replica will serve no more.
        """
        try:
            self._host.check()
        except DraftreeError as error:
            raise ReplicaLost(error_msg=str(error)) from None

    def _load(self, draft_model: str) -> Drafter:
        from workers.exchange import load_drafter

        if not self._has_drafters:
            check_needs_no_drafters(draft_model, self._engine.verifier.config)
        return load_drafter(draft_model, self._engine, self._spec, self._elsewhere)
