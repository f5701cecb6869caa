"""The composition root: from settings to the Serve application. The only place where the deployments meet.

`Settings` must stand here as a class, not as a string: Ray looks at ``app``'s annotation to decide how to validate the
command line's arguments. Hence no ``from __future__ import annotations``.
"""

import os
import sys

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import BackpressureConfig
from ray.serve.schema import LoggingConfig

from deployments.aggregator import AggregatorReplica
from deployments.autoscaling import DRAFTER, VERIFIER
from deployments.checks import engine_spec, served_model
from deployments.drafter import DrafterReplica
from deployments.ingress import Ingress
from deployments.keys import KeyRing
from deployments.replicas import drafter_options, verifier_options
from deployments.routing import routing
from deployments.settings import RefusedSettings, Settings
from deployments.verifier import VerifierReplica
from verifier.config import ModelConfig
from verifier.errors import DraftreeError
from workers.build import openmp_environment
from workers.machine import available_memory, check_memory
from workers.remote.placement import remote_part

MAX_ONGOING = 1024  # calls at a replica, besides the requests that were let in; this only bounds memory
INGRESS_CPUS, AGGREGATOR_CPUS = 0.1, 0.1  # shares of a core, see deployments/replicas.py
HEALTH_S = 5.0  # between two looks at a replica, and the time it has to answer: one that is frozen is soon replaced
INGRESS_DRAIN_S = 600.0  # for the answers it is giving; nobody else could go on with them
TRIES = 1  # a model that does not load once will not load the next time either
# Serve's switches for fewer threads and fewer copies on a request's way. They make an event of a stream three times
# cheaper, and the cores that pays for are the verifier's. Our replicas keep their event loop free, so that Serve's part
# needs no loop of its own.
ONE_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}
# The same for the proxies; and the controller, which else looks after everything ten times a second and is the greatest
# consumer in an idle service.
LEAN_SERVE = {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "1", "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5"}
# A replica that is ill cannot finish anything; others do. Waiting for it would only keep what its successor needs.
STERN_SERVE = {"RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1"}


def app(args: Settings) -> Application:
    """The application for ``serve run deployments:app``, with or without ``name=value`` arguments, and for Serve YAML.

    Runs where the application is built: before any replica and, under ``serve run``, before Ray. Fetches the default
    model on its first use.

    Raises:
        RefusedSettings: the settings cannot work here, in one sentence.
    """
    try:
        model = served_model(args, report=_say)
        KeyRing.load(args.api_keys)
        if runs_here() and model.engine.device == "cpu":  # else each replica looks at its own machine, or GPU
            check_memory(model.config, model.engine, model.drafter, available_memory())
        verifiers = verifier_options(args, ONE_LOOP | _openmp(args))
        drafters = _drafters(args, model.config)
    except DraftreeError as error:
        raise RefusedSettings(str(error)) from None
    for name, value in (ONE_LOOP | LEAN_SERVE | STERN_SERVE).items():
        os.environ.setdefault(name, value)  # for the processes of a Ray that is yet to be started from here
    # At each replica, since it may be the only one that is left; whoever asks it how it does must come in, too.
    held = args.capacity + MAX_ONGOING
    verifier = serve.deployment(
        name=VERIFIER,
        max_ongoing_requests=held,
        max_constructor_retry_count=TRIES,
        health_check_period_s=HEALTH_S,
        health_check_timeout_s=HEALTH_S,
        graceful_shutdown_timeout_s=args.drain_timeout_s,
        request_router_config=routing(),
        **verifiers,
    )(VerifierReplica)
    ingress = serve.deployment(
        name="Ingress",
        num_replicas=args.ingress_replicas,
        max_ongoing_requests=held,  # in a flood of what is to be refused here, Serve refuses the rest
        max_queued_requests=MAX_ONGOING,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        max_constructor_retry_count=TRIES,
        graceful_shutdown_timeout_s=INGRESS_DRAIN_S,
        ray_actor_options={"num_cpus": INGRESS_CPUS, "runtime_env": {"env_vars": ONE_LOOP}},
    )(serve.ingress()(Ingress))
    drafter = drafters[0] if drafters else None
    return ingress.bind(args, verifier.bind(args, *drafters), drafter, _aggregator(args))


def _drafters(args: Settings, model: ModelConfig) -> list[Application]:
    """The deployment of the draft network, if it has one of its own."""
    if args.drafter_placement == "local" or remote_part(args.draft_model, model) is None:
        return []
    drafter = serve.deployment(
        name=DRAFTER,
        max_ongoing_requests=MAX_ONGOING,
        health_check_period_s=HEALTH_S,
        health_check_timeout_s=HEALTH_S,
        **drafter_options(args, ONE_LOOP | {"OMP_NUM_THREADS": "1"}),
    )(DrafterReplica)
    return [drafter.bind(args)]


def _aggregator(args: Settings) -> Application | None:
    """The deployment in which several ingresses agree; one alone does so with itself."""
    if args.ingress_replicas == 1:
        return None
    aggregator = serve.deployment(
        name="Aggregator",
        max_ongoing_requests=MAX_ONGOING,
        health_check_period_s=HEALTH_S,
        health_check_timeout_s=HEALTH_S,
        ray_actor_options={"num_cpus": AGGREGATOR_CPUS, "runtime_env": {"env_vars": ONE_LOOP}},
        logging_config=LoggingConfig(enable_access_log=False),  # of a line a second for each ingress
    )(AggregatorReplica)
    return aggregator.bind(args.ingress_replicas, args.max_draft)


def runs_here() -> bool:
    """Whether replicas can only come to this machine: there is no Ray yet, or one of a single node that takes any.

    A fleet's head builds the application and has neither the memory for a model nor a CPU for a replica.
    """
    if not ray.is_initialized():
        return True
    nodes, resources = ray.nodes(), ray.cluster_resources()  # type: ignore[no-untyped-call]
    return len(nodes) == 1 and resources.get("CPU", 0) > 0


def _openmp(settings: Settings) -> dict[str, str]:
    """OpenMP reads these when a process starts; Ray would set one thread."""
    return {"OMP_NUM_THREADS": str(engine_spec(settings).threads)} | openmp_environment()


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
