"""Three nodes on one machine with the service on them: what runs where, whether all of it does, what stays behind.

The head has the ingress, the controller and the way in; the other two have verifiers and drafters. Knows Ray and Serve,
at two places through their private doors: which process a replica or a rank is, they tell only their own tools.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from deployments.autoscaling import DRAFTER, VERIFIER
from deployments.bench import free_port
from deployments.build import LEAN_SERVE, ONE_LOOP, STERN_SERVE
from deployments.launch import QUIET
from deployments.settings import Settings
from workers.stats import EngineStats

APP, INGRESS, CONTROLLER, RANK = "draftree", "Ingress", "Controller", "VerifierRank"
WORKERS, WORKER_CPUS = 2, 4
HEAD_ONLY = "node:__internal_head__"  # Ray gives every head one of these
RUNNING = "RUNNING"
SERVING = (RUNNING, "RECOVERING", "UPDATING", "PENDING_MIGRATION")
LOOK_S = 0.3
ANSWER_S = 30.0  # of replicas that are asked for figures
END_S = 60.0  # for a process to end that was told to, and for Ray to notice


@dataclass(frozen=True, slots=True)
class Part:
    """A replica, or the controller."""

    name: str
    deployment: str
    pid: int
    node: str
    state: str  # Serve's word
    ranks: tuple[int, ...] = ()  # processes of a verifier's other ranks

    @property
    def serves(self) -> bool:
        """Whether requests are sent there, as to those that a new controller has yet to look at."""
        return self.state in SERVING

    @property
    def pids(self) -> tuple[int, ...]:
        return self.pid, *self.ranks


class Site:
    """
    Attributes:
        url: of the service.
        parts: as they were when somebody last looked.
    """

    def __init__(self, cluster: Any, settings: Settings, port: int) -> None:
        self.url, self.parts = f"http://127.0.0.1:{port}", list[Part]()
        self.settings = settings
        self._cluster = cluster
        self._suspects: dict[int, str] = {}  # processes that have no business any more, and what they were

    @property
    def head(self) -> str:
        return str(self._cluster.address)

    def deploy(self, settings: Settings) -> None:
        """Tells Serve to run the service with these settings, as ``serve deploy`` does. Does not wait."""
        from ray.serve.schema import ServeDeploySchema

        self.settings = settings
        ingress = {"num_cpus": 0, "resources": {HEAD_ONLY: 0.001}}
        application = {
            "name": APP,
            "route_prefix": "/",
            "import_path": "deployments:app",
            "args": settings.model_dump(exclude_defaults=True),
            "deployments": [{"name": INGRESS, "ray_actor_options": ingress}],
            "logging_config": QUIET.model_dump(),
        }
        _serve().deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))

    # ── what there is ────────────────────────────────────────────────────────────────────────────────────────────────

    def look(self) -> list[Part]:
        """All parts; waits while there is no controller to ask.

        One that has just come back knows of none, and so does one that builds an application anew: that is no news.
        """
        import ray

        details = _serve().get_serve_details()
        deployments = details["applications"].get(APP, {}).get("deployments")
        if not deployments:
            return self.parts
        actors = ray._private.state.actors(actor_state_name="ALIVE")
        owners = {_address(actor, "Address"): name for name, actor in actors.items()}
        ranks: dict[str, list[int]] = {}
        for actor in actors.values():
            if actor["ActorClassName"] == RANK:
                ranks.setdefault(owners.get(_address(actor, "OwnerAddress"), ""), []).append(actor["Pid"])
        controller = actors.get(details["controller_info"]["actor_id"])
        found = []
        if controller:
            pid = controller["Pid"]
            found.append(Part(f"controller {pid}", CONTROLLER, pid, controller["Address"]["NodeID"], RUNNING))
        for deployment, each in deployments.items():
            for replica in each["replicas"]:
                pid, node = replica.get("pid", 0), replica.get("node_id", "")  # not there from the first
                others = tuple(sorted(ranks.get(replica.get("actor_id", ""), ())))
                found.append(Part(replica["replica_id"], deployment, pid, node, replica["state"], others))
        self.parts = found
        return found

    def nodes(self) -> list[str]:
        """The workers' node ids."""
        return sorted(node.node_id for node in self._cluster.worker_nodes)

    def able(self) -> frozenset[str]:
        """Verifiers that could answer now: those that served at the last look, if their processes still can."""
        return frozenset(
            part.name
            for part in self.parts
            if part.deployment == VERIFIER and part.serves and all(is_awake(pid) for pid in part.pids)
        )

    def is_full(self, gone: frozenset[str] = frozenset()) -> bool:
        """Whether all that should run does, none of it called as in ``gone``, and drafters draft for all verifiers."""
        settings, parts = self.settings, self.look()
        wanted = {
            CONTROLLER: 1,
            INGRESS: settings.ingress_replicas,
            VERIFIER: settings.verifier_replicas,
            DRAFTER: settings.drafter_replicas,
        }
        there = {name: sum(part.deployment == name for part in parts) for name in wanted}
        ranks = settings.verifier_replicas * (settings.tensor_parallel - 1)
        return (
            there == wanted
            and all(part.state == RUNNING and part.name not in gone for part in parts)
            and sum(len(part.ranks) for part in parts) == ranks
            and sum(node["Alive"] for node in _nodes()) >= 1 + WORKERS  # one that is drained may still be there
            and _serve().get_serve_details()["applications"][APP]["status"] == RUNNING
            and all(stats.remote and stats.remote.connected for stats in self._stats())
        )

    def await_full(self, gone: frozenset[str], within_s: float) -> bool:
        """Returns as soon as it `is_full`; False if it was not in time."""
        return waited(lambda: self.is_full(gone), within_s)

    # ── what is done to it ───────────────────────────────────────────────────────────────────────────────────────────

    def suspect(self, part: Part) -> None:
        """From now on its processes should end, sooner or later."""
        self._suspects.update(dict.fromkeys(part.pids, part.name))

    def end_node(self, node_id: str, *, gracefully: bool) -> None:
        node = next(node for node in self._cluster.worker_nodes if node.node_id == node_id)
        self._cluster.remove_node(node, allow_graceful=gracefully)

    def add_node(self) -> None:
        self._cluster.add_node(num_cpus=WORKER_CPUS)

    # ── what it says ─────────────────────────────────────────────────────────────────────────────────────────────────

    def metric(self, name: str) -> float:
        """The sum over its labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=ANSWER_S).text
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    def leftovers(self) -> list[str]:
        """What is there that should not be when nobody asks anything any more, after a while for it to go."""
        waited(lambda: not self._leftovers(), END_S)
        return self._leftovers()

    def _leftovers(self) -> list[str]:
        import ray

        found: list[str] = []

        def expect(what: str, number: float, wanted: float) -> None:
            if round(number, 3) != round(wanted, 3):
                found.append(f"{number:g} {what} instead of {wanted:g}")

        for stats in self._stats():
            expect("running requests of a verifier", stats.running, 0)
            expect("waiting requests of a verifier", stats.waiting, 0)
            expect("pages in use of a verifier", stats.pages_used, 0)
        for sessions in self._ask(DRAFTER, "num_sessions"):
            expect("sessions of a drafter", sessions, 0)
        expect("requests in flight", self.metric("draftree_in_flight"), 0)
        groups = ray.util.placement_group_table().values()
        num_groups = self.settings.verifier_replicas if self.settings.tensor_parallel > 1 else 0
        expect("placement groups", sum(group["state"] != "REMOVED" for group in groups), num_groups)
        found += [f"process {pid} of {name}" for pid, name in self._suspects.items() if is_alive(pid)]
        return found

    def _stats(self) -> list[EngineStats]:
        return self._ask(VERIFIER, "stats")

    def _ask(self, deployment: str, method: str) -> list[Any]:
        """All replicas' answers."""
        from ray import serve

        handle = serve.get_deployment_handle(deployment, APP)
        return list(handle.broadcast(method).results(timeout_s=ANSWER_S))


@contextmanager
def three_nodes(settings: Settings) -> Iterator[Site]:
    """The service on a Ray cluster of its own; everything ends when it is left."""
    os.environ.update(ONE_LOOP | LEAN_SERVE | STERN_SERVE)  # for the processes of the nodes
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    port = free_port()
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        site = Site(cluster, settings, port)
        for _ in range(WORKERS):
            site.add_node()
        ray.init(cluster.address, namespace="serve", logging_level=logging.ERROR, log_to_driver=False)
        http = {"host": "127.0.0.1", "port": port}
        serve.start(proxy_location="HeadOnly", http_options=http, logging_config=QUIET)
        site.deploy(settings)
        yield site
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]


def waited(condition: Callable[[], bool], within_s: float) -> bool:
    """Returns as soon as the condition holds, faults while it is looked at aside; False: it did not in time."""
    began = time.monotonic()
    while time.monotonic() - began < within_s:
        try:
            if condition():
                return True
        except (RayError, RayServeException, httpx.HTTPError, TimeoutError):
            pass  # whoever was asked may be what was just killed
        time.sleep(LOOK_S)
    return False


def is_alive(pid: int) -> bool:
    return _state(pid) not in ("", "Z", "X")


def is_awake(pid: int) -> bool:
    return is_alive(pid) and _state(pid) not in ("T", "t")


def _state(pid: int) -> str:
    """Linux's letter for what the process does; "" for none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _address(actor: Any, which: str) -> tuple[str, int]:
    return actor[which]["IPAddress"], actor[which]["Port"]


def _nodes() -> list[dict[str, Any]]:
    import ray

    return list(ray.nodes())  # type: ignore[no-untyped-call]


def _serve() -> Any:
    from ray.serve.context import _get_global_client

    return _get_global_client()
