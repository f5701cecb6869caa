"""What the ingress knows of verifiers that it has to ask Serve for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray import serve
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger, ReplicaState
from ray.serve.context import _get_serve_request_context, _RequestContext, _serve_request_context
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview, ServeStatus

from deployments.errors import ApiError
from deployments.fleet import Fleet, Placement, Report
from deployments.ingress import ASLEEP, VerifierHandle, is_asleep
from deployments.verifier import ReplicaLost
from tests.deployments.fakes import IDLE, busy_stats
from verifier.sampling import SamplingParams
from workers.sequence import Progress, Request
from workers.stats import EngineStats


def status(deployment: DeploymentStatus, replicas: dict[ReplicaState, int]) -> ServeStatus:
    verifiers = DeploymentStatusOverview(deployment, DeploymentStatusTrigger.UNSPECIFIED, replicas, "")
    application = ApplicationStatusOverview(ApplicationStatus.RUNNING, "", 0.0, {"Verifiers": verifiers})
    return ServeStatus(applications={"app": application})


class Handle:
    """A Serve handle over replicas with these figures; None: it does not answer. Counts the questions."""

    app_name, deployment_name = "app", "Verifiers"

    def __init__(self, **figures: EngineStats | None) -> None:
        self.calls = 0
        self.callers = set[str]()  # the HTTP requests, by Serve's ids, in whose course it was asked
        self.figures = figures
        self.fleet = Fleet()
        self.fleet.update([Report(name, "fake|") for name in figures])

    def options(self, **_: object) -> Handle:
        return self

    async def remote(self, placement: Placement) -> EngineStats:
        self.calls += 1
        self.callers.add(_get_serve_request_context()._internal_request_id)
        placement.fleet = self.fleet
        answer = self.figures[placement.only or next(iter(self.figures))]
        if answer is None:
            raise ReplicaLost(error_msg="the engine is dead")
        return answer


@pytest.mark.parametrize(
    ("found", "asleep"),
    [
        (status(DeploymentStatus.HEALTHY, {}), True),
        (status(DeploymentStatus.UPSCALING, {ReplicaState.STARTING: 1}), True),
        (status(DeploymentStatus.HEALTHY, {ReplicaState.RUNNING: 1}), False),
        (status(DeploymentStatus.UNHEALTHY, {ReplicaState.STARTING: 1}), False),
    ],
)
async def test_asking_for_figures_wakes_no_verifier(
    found: ServeStatus, asleep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever watched the service's health kept a verifier running that was to stop while nobody asks."""
    monkeypatch.setattr(serve, "status", lambda: found)
    assert is_asleep("app", "Verifiers") == asleep
    handle: Any = Handle(a=IDLE)
    assert await VerifierHandle(handle, may_sleep=True).stats() == (ASLEEP if asleep else IDLE)
    assert (handle.calls == 0) == asleep


async def test_where_verifiers_never_sleep_serve_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(serve, "status")
    handle: Any = Handle(a=IDLE)
    assert await VerifierHandle(handle).stats() == IDLE


async def test_figures_are_those_of_all_verifiers_that_answer() -> None:
    """They were one's, another one's each time; and one that is frozen made the whole service look ill."""
    handle: Any = Handle(a=busy_stats(), b=busy_stats(), c=None)
    assert (await VerifierHandle(handle).stats()).counters.steps == 2 * busy_stats().counters.steps


class Cancelled:
    """What a Serve handle gives for a call that streams, and that Serve has cancelled."""

    def __init__(self, *_: object) -> None: ...

    def __aiter__(self) -> Cancelled:
        return self

    async def __anext__(self) -> Progress:
        raise asyncio.CancelledError

    def cancel(self) -> None: ...


async def generated(monkeypatch: pytest.MonkeyPatch) -> list[Progress]:
    monkeypatch.setattr(Handle, "remote", Cancelled)
    handle: Any = Handle(a=IDLE)
    request = Request("", (1,), SamplingParams(), 1)
    return [run async for run in VerifierHandle(handle).generate(request, Placement())]


async def test_a_call_that_is_cancelled_because_the_client_left_is_no_lost_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Serve cancelled the call at times before the ingress: that took its verifier for lost, counted a replay and began
    another attempt."""
    task = asyncio.create_task(generated(monkeypatch))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_call_that_is_cancelled_otherwise_is_a_lost_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.ingress.LEAVE_S", 0.01)
    with pytest.raises(ConnectionError):
        await generated(monkeypatch)


async def test_all_verifiers_are_asked_though_one_http_request_wants_to_know() -> None:
    """Serve knows calls by the HTTP request that they belong to: of two at the same time it routed one, for `/health`
    and `/metrics` only the first verifier answered, and when that was frozen, none."""
    of_request: Any = _RequestContext(_internal_request_id="a client's")
    before = _serve_request_context.set(of_request)
    handle: Any = Handle(a=busy_stats(), b=busy_stats())
    await VerifierHandle(handle).stats()
    _serve_request_context.reset(before)
    assert (handle.calls, handle.callers) == (3, {""})


async def test_that_the_first_one_asked_is_broken_does_not_make_the_service_ill() -> None:
    """A new ingress said 503 for as long as it asked a broken verifier first, though others were well."""
    handle: Any = Handle(a=None, b=busy_stats())
    assert (await VerifierHandle(handle).stats()).counters.steps == busy_stats().counters.steps


async def test_when_none_answers_the_first_trouble_is_told() -> None:
    handle: Any = Handle(a=IDLE)
    verifiers = VerifierHandle(handle)
    await verifiers.stats()
    handle.figures["a"] = None
    with pytest.raises(ReplicaLost, match="dead"):
        await verifiers.stats()
    handle.fleet.update([])
    with pytest.raises(ApiError, match="No replica"):
        await verifiers.stats()
