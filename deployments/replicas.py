"""What Serve is told of the replicas: how many, what they reserve, on which nodes. From settings alone.

Knows no model and loads nothing; how many there should be at a moment is `deployments.autoscaling`'s.
"""

from __future__ import annotations

from typing import Any

from deployments.settings import Settings
from verifier.errors import BadSetting

# Shares of a core for Ray's bookkeeping, so small that everything fits on a machine with one core. What the replicas
# really use is set by their threads.
VERIFIER_CPUS, RANK_CPUS, DRAFTER_CPUS = 0.5, 0.1, 0.1
LOOK_BACK_S = 12.0  # at least, over which loads are averaged; Serve warns of less than its reports' interval
ROLE = "role"  # the label of nodes that are meant for one kind of replica
VERIFIER_ROLE, DRAFTER_ROLE = "verifier", "drafter"


def verifier_options(settings: Settings, environment: dict[str, str]) -> dict[str, Any]:
    """Of a verifier: a bundle for each rank, all on one node; rank 0, the replica itself, sits in the first.

    Raises:
        BadSetting: the most replicas are fewer than the least.
    """
    gpus = {"GPU": settings.verifier_num_gpus} if settings.verifier_num_gpus else {}
    labels = {ROLE: VERIFIER_ROLE} if settings.node_roles else {}
    actor = _actor(VERIFIER_CPUS, settings.verifier_num_gpus, environment)
    number = _number("verifier", settings.verifier_replicas, settings.verifier_max_replicas, settings)
    if settings.tensor_parallel == 1:
        return {"ray_actor_options": actor | _selector(labels), **number}
    ranks = [{"CPU": VERIFIER_CPUS, **gpus}] + [{"CPU": RANK_CPUS, **gpus}] * (settings.tensor_parallel - 1)
    bundles: dict[str, Any] = {"placement_group_bundles": ranks, "placement_group_strategy": "STRICT_PACK"}
    if labels:
        bundles["placement_group_bundle_label_selector"] = [labels]
    return {"ray_actor_options": actor, **bundles, **number}


def drafter_options(settings: Settings, environment: dict[str, str]) -> dict[str, Any]:
    """Of a drafter in a deployment of its own; raises as `verifier_options`."""
    labels = {ROLE: DRAFTER_ROLE} if settings.node_roles else {}
    return {
        "ray_actor_options": _actor(DRAFTER_CPUS, settings.drafter_num_gpus, environment) | _selector(labels),
        **_number("drafter", settings.drafter_replicas, settings.drafter_max_replicas, settings),
    }


def _actor(cpus: float, gpus: float, environment: dict[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = {"num_cpus": cpus, "runtime_env": {"env_vars": environment}}
    return options | ({"num_gpus": gpus} if gpus else {})


def _selector(labels: dict[str, str]) -> dict[str, Any]:
    return {"label_selector": labels} if labels else {}


def _number(kind: str, least: int, most: int, settings: Settings) -> dict[str, Any]:
    """A fixed number, or as many as the policy says."""
    if 0 < most < least:
        raise BadSetting(f"{kind}_max_replicas", most, f"0, or {kind}_replicas, {least}, and more")
    most = max(most, least, 1)
    if most == least:
        return {"num_replicas": least}
    scaling = {
        "min_replicas": least,
        "max_replicas": most,
        "upscale_delay_s": settings.upscale_delay_s,
        "downscale_delay_s": settings.downscale_delay_s,
        "look_back_period_s": max(LOOK_BACK_S, settings.upscale_delay_s),
        "policy": {"policy_function": f"deployments.autoscaling:{kind.capitalize()}Scaling"},
    }
    return {"autoscaling_config": scaling}
