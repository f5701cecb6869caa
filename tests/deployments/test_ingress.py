"""What the ingress knows of verifiers that it has to ask Serve for."""

from __future__ import annotations

from typing import Any

import pytest
from ray import serve
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger, ReplicaState
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview, ServeStatus

from deployments.ingress import ASLEEP, VerifierHandle, is_asleep


def status(deployment: DeploymentStatus, replicas: dict[ReplicaState, int]) -> ServeStatus:
    verifiers = DeploymentStatusOverview(deployment, DeploymentStatusTrigger.UNSPECIFIED, replicas, "")
    application = ApplicationStatusOverview(ApplicationStatus.RUNNING, "", 0.0, {"Verifiers": verifiers})
    return ServeStatus(applications={"app": application})


class Handle:
    """A Serve handle whose every call is counted, and comes to nothing."""

    app_name, deployment_name = "app", "Verifiers"

    def __init__(self) -> None:
        self.calls = 0

    def options(self, **_: object) -> Handle:
        return self

    async def remote(self) -> str:
        self.calls += 1
        return "figures"


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
    handle: Any = Handle()
    assert await VerifierHandle(handle, may_sleep=True).stats() == (ASLEEP if asleep else "figures")
    assert handle.calls == (not asleep)


async def test_where_verifiers_never_sleep_serve_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(serve, "status")
    handle: Any = Handle()
    await VerifierHandle(handle).stats()
    assert handle.calls == 1
