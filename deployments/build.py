"""The composition root: from settings to the Serve application. The only place where the deployments meet.

`Settings` must stand here as a class, not as a string: Ray looks at ``app``'s annotation to decide how to validate the
command line's arguments. Hence no ``from __future__ import annotations``.
"""

import sys

from ray import serve
from ray.serve import Application

from deployments.checks import available_memory, check_memory, engine_spec, served_model
from deployments.ingress import Ingress
from deployments.settings import RefusedSettings, Settings
from deployments.verifier import VerifierReplica
from verifier.errors import DraftreeError

MAX_ONGOING = 1024  # requests at a replica; the engine queues what it cannot run, so this only bounds memory
# Shares of a core for Ray's bookkeeping, so small that everything fits on a machine with one core. What the replicas
# really use is set by their threads.
INGRESS_CPUS, VERIFIER_CPUS = 0.1, 0.5
TRIES = 1  # a model that does not load once will not load the next time either


def app(args: Settings) -> Application:
    """The application for ``serve run deployments:app``, with or without ``name=value`` arguments, and for Serve YAML.

    Runs where the application is built: before any replica and, under ``serve run``, before Ray. Fetches the default
    model on its first use.

    Raises:
        RefusedSettings: the settings cannot work here, in one sentence.
    """
    try:
        check_memory(served_model(args, report=_say), available_memory())
    except DraftreeError as error:
        raise RefusedSettings(str(error)) from None
    verifier = serve.deployment(
        max_ongoing_requests=MAX_ONGOING,
        max_constructor_retry_count=TRIES,
        ray_actor_options={"num_cpus": VERIFIER_CPUS, "runtime_env": {"env_vars": _environment(args)}},
    )(VerifierReplica)
    ingress = serve.deployment(
        name="Ingress",
        max_ongoing_requests=MAX_ONGOING,
        max_constructor_retry_count=TRIES,
        ray_actor_options={"num_cpus": INGRESS_CPUS},
    )(serve.ingress()(Ingress))
    return ingress.bind(args, verifier.bind(args))


def _environment(settings: Settings) -> dict[str, str]:
    """OpenMP reads this when a process starts, and Ray would set one thread."""
    return {"OMP_NUM_THREADS": str(engine_spec(settings).threads)}


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
