"""The ingress's deployment: OpenAI's interface and the router in one replica, which talks to the verifier by handle.

Importing this is light: the HTTP application comes with OpenAI's types and is loaded in the replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextvars import Context
from dataclasses import replace
from typing import Any, cast

from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.types import ASGIApp

from deployments.admission import Admission
from deployments.aggregator import Aggregator, AggregatorHandle
from deployments.agreement import Aggregate, Agreement, AtHand
from deployments.checks import fingerprint, served_model
from deployments.errors import ApiError
from deployments.exchange import ClusterChoice, FleetExchange, with_choice
from deployments.fleet import Fleet, Placement
from deployments.handles import direct
from deployments.keys import KeyRing
from deployments.metrics import RequestMetrics
from deployments.replay import Patience
from deployments.router import Limits, Router
from deployments.settings import Settings
from deployments.speculation import DraftGuide
from deployments.totals import Totals
from drafter.factory import parts_of
from workers.sequence import Progress, Request
from workers.stats import Counters, EngineStats

ANSWER_S = 2.0  # for a verifier to say how it does; those that do not answer are left out
LEAVE_S = 0.5  # from the end of a call, because the client has left, to word of that
NOBODY = ApiError(503, "No replica of the model is there.", code="no_replica")
ASLEEP = EngineStats(0, 0, 0, 0, 0, 0, 0, 0, 0, Counters())  # the figures of no verifier


class VerifierHandle:
    """A `deployments.replay.Verifier` that lives in other processes.

    Args:
        may_sleep: whether having no replica is as it should be. Asking for figures then wakes none.
    """

    def __init__(self, handle: DeploymentHandle[Any], *, may_sleep: bool = False) -> None:
        self._handle, self._may_sleep = handle, may_sleep
        self._generate = direct(handle).options(method_name="generate", stream=True)
        self._stats = direct(handle).options(method_name="stats")
        self._fleet: Fleet | None = None
        self._totals = Totals()

    async def generate(self, request: Request, placement: Placement) -> AsyncGenerator[Progress, None]:
        runs = cast("DeploymentResponseGenerator[Progress]", self._generate.remote(request, placement))
        try:
            async for run in runs:
                yield run
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) and task.cancelling():
                raise
            # When a client leaves, Serve cancels all calls of its request, at times before it cancels us.
            await asyncio.sleep(LEAVE_S)
            raise ConnectionError("the call was cancelled, and not from here") from None
        finally:
            runs.cancel()  # type: ignore[no-untyped-call]  # leaving the loop alone would let the verifier run to the end

    async def stats(self) -> EngineStats:
        """Of all verifiers that answer."""
        if self._may_sleep and await asyncio.to_thread(is_asleep, self._handle.app_name, self._handle.deployment_name):
            return ASLEEP
        if self._fleet is None:
            self._fleet = await self._found()
        names = self._fleet.names if self._fleet else []
        answers = await asyncio.gather(*(self._answer(Placement(only=name)) for name in names), return_exceptions=True)
        found = {name: each for name, each in zip(names, answers, strict=True) if isinstance(each, EngineStats)}
        if not found:
            raise next(iter(answers), NOBODY)  # type: ignore[misc]  # all of them are exceptions
        return self._totals.update(found)

    async def _found(self) -> Fleet | None:
        """The fleet, which is known as soon as one replica is asked; whether that one answers does not matter."""
        placement = Placement()
        try:
            await self._answer(placement)
        except Exception:
            if placement.fleet is None:
                raise
        return placement.fleet

    async def _answer(self, placement: Placement) -> EngineStats:
        """In a context of its own: Serve's router would take two calls within one HTTP request for the same call."""

        async def ask() -> EngineStats:
            return cast(EngineStats, await self._stats.remote(placement))

        async with asyncio.timeout(ANSWER_S):
            return await asyncio.create_task(ask(), context=Context())


def is_asleep(application: str, deployment: str) -> bool:
    """Whether a deployment has no replica, and nothing is wrong with that."""
    found = serve.status().applications[application].deployments[deployment]
    runs = any(count for state, count in found.replica_states.items() if state == "RUNNING")
    return not runs and found.status not in ("UNHEALTHY", "DEPLOY_FAILED")


class Ingress:
    """Loads the tokenizer, then serves the application."""

    def __init__(
        self,
        settings: Settings,
        verifier: DeploymentHandle[Any],
        drafter: DeploymentHandle[Any] | None = None,
        aggregator: DeploymentHandle[Any] | None = None,
    ) -> None:
        """
        Args:
            drafter: the deployment of the draft network, where it has one of its own.
            aggregator: None where this is the only ingress, which then agrees with itself.
        """
        choice = ClusterChoice(settings)
        self._settings = settings
        self._model, self._keys = served_model(with_choice(settings, choice.read())), KeyRing.load(settings.api_keys)
        self._exchange = FleetExchange(verifier, drafter, choice)
        self._aggregator = aggregator
        self._fingerprint = fingerprint(settings)
        self._patience = Patience(settings.stall_timeout_s, settings.replica_timeout_s)
        self._verifier = VerifierHandle(verifier, may_sleep=settings.verifier_replicas == 0)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        from deployments.api import create_app
        from deployments.service import Service

        model = self._model
        limits = Limits(model.engine.max_model_len, model.config.vocab_size, frozenset(model.config.eos_token_ids))
        metrics = RequestMetrics()
        router = Router(self._verifier, model.text, limits, metrics, self._patience, self._fingerprint)
        service = Service(
            model.name,
            router,
            self._verifier,
            model.text,
            model.engine.limits,
            self._agreement(),
            self._keys,
            exchange=self._exchange,
            metrics=metrics,
        )
        return create_app(service)

    def _agreement(self) -> Agreement:
        settings, max_draft = self._settings, self._model.engine.limits.max_draft
        replicas = settings.ingress_replicas
        aggregate: Aggregate = (
            AggregatorHandle(self._aggregator) if self._aggregator else AtHand(Aggregator(replicas, max_draft))
        )
        admission = Admission(settings.capacity, replicas)
        return Agreement(aggregate, admission, DraftGuide(), self._figures, self._model.drafter.name)

    async def _figures(self) -> EngineStats:
        """The verifiers', with the draft model by the names of its parts."""
        stats = await self._verifier.stats()
        name = stats.draft_model
        return replace(stats, draft_model="+".join(parts_of(name, self._model.config)) if name else "")
