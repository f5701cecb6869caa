"""A request outlives its replica: one attempt after the other, and tokens without a seam.

What a request will say depends on its prompt, its sampling, its seed and what it has said so far, all of which are held
here; so any verifier of the same model can go on with it. Knows ids, and when to give a replica up. Knows no text, no
HTTP, and not how replicas are chosen.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from ray.serve.exceptions import BackPressureError

from deployments.errors import ApiError
from deployments.fleet import Fleet, Placement
from deployments.metrics import RequestMetrics
from verifier.errors import BadRequest
from workers.inbox import EngineDead
from workers.sequence import Progress, Request
from workers.stats import EngineStats, Speculation, Usage

log = logging.getLogger("ray.serve")
MAX_REPLAYS = 2  # since a request may be what its replicas die of; those of replicas told to stop do not count
LOOK_S = 0.2  # between two looks for a replica

Reason = Literal["lost", "broken", "stalled", "unfinished", "drained"]


class Verifier(Protocol):
    """All verifier replicas, from here. Tests put a script in their place."""

    def generate(self, request: Request, placement: Placement) -> AsyncGenerator[Progress, None]:
        """Runs of tokens until one has a finish; an empty one says that the engine goes on. Fills ``placement`` in.

        Closing the generator before its end aborts the request.
        """
        ...

    async def stats(self) -> EngineStats:
        """The engines' figures.

        Raises:
            Exception: no replica can work; the text says why.
        """
        ...


@dataclass(frozen=True, slots=True)
class Patience:
    """How long is waited, in seconds."""

    stall_s: float = 30.0  # for a word from a replica that has the request
    replica_s: float = 300.0  # for a replica that can take it
    settle_s: float = 2.0  # before a replica that has just failed is asked again, for want of others


class NoReplica(Exception):
    """There was none for too long."""


class Stalled(Exception):
    """A replica said nothing for too long."""


class Unfinished(Exception):
    """The stream ended before the request."""


class Replays:
    """Runs requests on replicas that may be lost.

    Args:
        fingerprint: how a replica's must begin, for it to be asked at all.
    """

    def __init__(self, verifier: Verifier, metrics: RequestMetrics, patience: Patience, fingerprint: str = "") -> None:
        self._verifier, self._metrics = verifier, metrics
        self._patience, self._fingerprint = patience, fingerprint

    async def generate(self, request: Request) -> AsyncGenerator[Progress, None]:
        """The request's runs until one has a finish, as a verifier that is never lost would give them.

        Closing the generator before that aborts the request.

        Raises:
            ApiError: it was lost too often, or no replica can take it.
            Exception: what a replica refused it with.
        """
        story = _Story(request, self._fingerprint)
        with self._metrics.in_flight.track_inprogress():
            while True:
                attempt, placement = story.attempt()
                try:
                    await self._room(story, placement)
                    async with aclosing(self._runs(attempt, placement, story.since)) as runs:
                        async for run in runs:
                            yield story.told(run)
                            if run.finish is not None:
                                return
                except (ApiError, BadRequest, BackPressureError):
                    raise
                except NoReplica as error:
                    raise _no_replica(story) from error
                except Exception as error:
                    await self._look_on(story, placement, error)
                finally:
                    placement.end(attempt, story.ids)

    async def _room(self, story: _Story, placement: Placement) -> None:
        """Returns when there is a replica for a replay. Before a request's first one Serve waits, for all alike."""
        fleet, began = story.fleet, _now()
        while fleet and not fleet.can_place(placement, settled=_now() - began > self._patience.settle_s):
            if _now() - story.since > self._patience.replica_s:
                raise NoReplica
            await asyncio.sleep(LOOK_S)

    async def _runs(self, request: Request, placement: Placement, since: float) -> AsyncGenerator[Progress, None]:
        """An attempt's runs, the empty ones left out.

        Raises:
            Exception: whatever broke it.
        """
        async with aclosing(self._verifier.generate(request, placement)) as runs:
            run = await self._first(runs, placement, since)
            while run is not None:
                placement.heard()
                if run.tokens or run.finish is not None:
                    yield run
                run = await self._next(runs)
        raise Unfinished("the stream ended before the request")

    async def _first(self, runs: AsyncGenerator[Progress, None], placement: Placement, since: float) -> Progress | None:
        """Until a replica is chosen, waiting for one is all there is; from then on the replica has to say something."""
        try:
            async with asyncio.timeout_at(since + self._patience.replica_s) as limit:

                def chosen() -> None:
                    if not limit.expired():
                        limit.reschedule(_now() + self._patience.stall_s)

                placement.when_chosen = chosen
                return await anext(runs, None)
        except TimeoutError:
            if placement.replica is None:
                raise NoReplica from None
            raise Stalled(f"no word for {self._patience.stall_s:g} s") from None
        finally:
            placement.when_chosen = lambda: None

    async def _next(self, runs: AsyncGenerator[Progress, None]) -> Progress | None:
        try:
            async with asyncio.timeout(self._patience.stall_s):
                return await anext(runs, None)
        except TimeoutError:
            raise Stalled(f"no word for {self._patience.stall_s:g} s") from None

    async def _look_on(self, story: _Story, placement: Placement, error: Exception) -> None:
        """The attempt is broken. Returns if there may be another one.

        Raises:
            ApiError: there may not.
        """
        reason = "drained" if placement.leaving else _reason(error)
        name = placement.replica.name if placement.replica else "no replica"
        if reason == "stalled":
            self._metrics.stalled.inc()
        if reason == "broken" and placement.fleet:
            placement.fleet.condemn(name)
        story.broken(placement, strikes=reason != "drained")
        log.warning("request %s, attempt %d on %s: %s: %s", story.request.id, story.attempts, name, reason, error)
        if not placement.accepted:  # it has got nowhere yet, and done no harm
            if _now() - story.since > self._patience.replica_s:
                raise _no_replica(story) from error
            await asyncio.sleep(LOOK_S)
            return
        if story.strikes > MAX_REPLAYS:
            self._metrics.given_up.inc()
            lost = f"The model's replica was lost {story.strikes} times over this request, which is given up."
            raise ApiError(503, lost, code="replica_lost") from error
        self._metrics.replays.labels(reason).inc()


class _Story:
    """A request, whoever runs it: what it has said, what that took, and how it has fared.

    Attributes:
        ids: its output so far.
        since: when it began to be without a replica, by the loop's clock.
        strikes: attempts that took a replica along, perhaps.
    """

    def __init__(self, request: Request, fingerprint: str) -> None:
        self.request = request
        self.ids = list(request.output_ids)
        self.attempts = self.strikes = 0
        self.since = _now()
        self.fleet: Fleet | None = None
        self._fingerprint = fingerprint
        self._avoid: frozenset[str] = frozenset()
        self._usage = Usage()  # of all attempts
        self._earlier = Usage()  # of all but the last

    def attempt(self) -> tuple[Request, Placement]:
        """The next one, which goes on where the last one ended, under an id of its own."""
        self.attempts += 1
        self._earlier = self._usage
        request = replace(self.request, id=f"{self.request.id}.{self.attempts}", output_ids=tuple(self.ids))
        return request, Placement(self._fingerprint, avoid=self._avoid)

    def told(self, run: Progress) -> Progress:
        """An attempt's run, as the request's."""
        self.ids += run.tokens
        if run.usage is not None:
            self._usage = replace(_together(self._earlier, run.usage), replays=self.attempts - 1)
        return replace(run, request_id=self.request.id, usage=run.usage and self._usage)

    def broken(self, placement: Placement, *, strikes: bool) -> None:
        self.fleet = placement.fleet or self.fleet
        if placement.replica:
            self._avoid |= {placement.replica.name}
            if self.ids:  # whoever goes on must be like the one who began
                self._fingerprint = placement.replica.fingerprint
        if placement.accepted:
            self.strikes += strikes
            self.since = _now()


def _together(earlier: Usage, now: Usage) -> Usage:
    """What all attempts took. The prompt counts once, as it was found the first time; so does the output."""
    return Usage(
        **vars(Speculation.__add__(earlier, now)),
        prompt_tokens=now.prompt_tokens,
        cached_tokens=earlier.cached_tokens if earlier.prompt_tokens else now.cached_tokens,
        output_tokens=now.output_tokens,
        preemptions=earlier.preemptions + now.preemptions,
    )


def _reason(error: Exception) -> Reason:
    match error:
        case Stalled():
            return "stalled"
        case Unfinished():
            return "unfinished"
        case EngineDead():
            return "broken"
        case _:
            return "lost"


def _no_replica(story: _Story) -> ApiError:
    waited = f"in {_now() - story.since:.0f} seconds"
    if story.ids and story.fleet and story.fleet.names:
        message = f"The service was given other settings; no replica that could finish this answer was there {waited}."
        return ApiError(503, message, code="redeployed")
    return ApiError(503, f"No replica of the model was there {waited}.", code="no_replica")


def _now() -> float:
    return asyncio.get_running_loop().time()
