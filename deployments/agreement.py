"""An ingress replica's side of what replicas agree about: it tells what it has seen, and goes by what it hears.

Once a second, beside the requests; none waits for it. When the aggregator is gone or slow, the replica goes on by what
it was told last and by its own counts.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from deployments.admission import Admission
from deployments.aggregator import Aggregator, Decisions, Report
from deployments.quotas import EXCHANGE_S, Clock
from deployments.speculation import DraftGuide
from workers.stats import EngineStats

log = logging.getLogger("ray.serve")
TIMEOUT_S = 3.0  # of an exchange
LOOK_S = 10.0  # between two looks at what a verifier has measured, while there are requests


class Aggregate(Protocol):
    """The aggregator, from here."""

    async def exchange(self, report: Report) -> Decisions: ...


class AtHand:
    """An aggregator in this process, for an ingress that is the only one."""

    def __init__(self, aggregator: Aggregator) -> None:
        self._aggregator = aggregator

    async def exchange(self, report: Report) -> Decisions:
        return self._aggregator.exchange(report)


class Agreement:
    """
    Args:
        figures: the verifiers'; may raise.
        drafter: who guesses, until the figures say.

    Attributes:
        drafter: who guesses.
        decisions: the last ones; None before the first.
    """

    def __init__(
        self,
        aggregate: Aggregate,
        admission: Admission,
        guide: DraftGuide,
        figures: Callable[[], Awaitable[EngineStats]],
        drafter: str,
        clock: Clock = time.monotonic,
    ) -> None:
        self.admission, self.guide, self.drafter = admission, guide, drafter
        self.decisions: Decisions | None = None
        self._aggregate, self._figures, self._clock = aggregate, figures, clock
        self._name = uuid.uuid4().hex
        self._reached_at = clock()
        self._looked_at = -LOOK_S
        self._trouble = ""

    @property
    def age_s(self) -> float:
        """Seconds since the last answer; before the first, since the start."""
        return self._clock() - self._reached_at

    async def exchange(self) -> None:
        """Once. What goes wrong is logged, once as well."""
        done = self.guide.take()
        stats = (await self._look()) if done else None
        if stats is not None:
            self.drafter = stats.draft_model or self.drafter
        news = (self.drafter, stats.prices) if stats else ("", None)
        report = Report(self._name, self.admission.uses(), *news, done)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                decisions = await self._aggregate.exchange(report)
        except Exception as error:
            trouble = f"{type(error).__name__}: {error}"
            if trouble != self._trouble:
                log.warning("the aggregator does not answer, its last word is gone by: %s", trouble)
            self._trouble = trouble
            return
        self.decisions, self._reached_at, self._trouble = decisions, self._clock(), ""
        self.admission.obey(decisions.parts)
        self.guide.obey(decisions.choices)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self.exchange()
            await asyncio.sleep(EXCHANGE_S)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs beside whatever is done within."""
        task = asyncio.create_task(self.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _look(self) -> EngineStats | None:
        """A verifier's figures, if it is time to ask for them and they are to be had."""
        if self._clock() - self._looked_at < LOOK_S:
            return None
        self._looked_at = self._clock()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._figures()
        except Exception as error:
            log.info("the verifiers' figures are not to be had at the moment: %s", error)
            return None
