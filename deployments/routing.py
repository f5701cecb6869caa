"""How Serve chooses a verifier replica: through `deployments.fleet`.

Serve makes the router itself, in each process that has a handle of the verifiers. Importing this is light.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments.fleet import Fleet, Placement, Report
from workers.sequence import Request

REPORT_S = 2.0  # between two reports of a replica
FINGERPRINT = "fingerprint"  # in a replica's metadata


class VerifierRouter(RequestRouter):
    """Sends attempts where the fleet says, questions to whom they are meant for.

    It offers Serve one replica at a time: so that it is known where an attempt is before the replica has taken it, and
    since Serve's queue lengths know nothing of pages and prefixes. Without Serve's mixin for order of arrival, an
    attempt's replica is never given to another request.
    """

    def initialize_state(self, **_: Any) -> None:
        self._fleet = Fleet()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._fleet.update(map(report_of, replicas))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else Serve would ask again without a pause
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        match pending_request.args:
            case [Request() as request, Placement() as placement]:
                name = self._fleet.choose(request, placement, by_name)
                return [[by_name[name]]] if name else []
            case [Placement() as placement]:
                placement.fleet = self._fleet
                names = {placement.only} if placement.only else by_name.keys()
                return [[by_name[name] for name in names & by_name.keys()]]
        return [candidate_replicas]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        match pending_request.args:
            case [*_, Placement() as placement]:
                placement.accepted = True


def report_of(replica: RunningReplica) -> Report:
    """What Serve has of the replica's metadata, which never change, and of its last statistics."""
    return Report(replica.replica_id.unique_id, replica.replica_metadata.get(FINGERPRINT, ""), **replica.routing_stats)


def routing() -> dict[str, Any]:
    """A deployment's ``request_router_config``."""
    return {
        "request_router_class": f"{__name__}:{VerifierRouter.__name__}",
        "request_routing_stats_period_s": REPORT_S,
    }
