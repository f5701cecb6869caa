"""Ranks as Ray actors, one in each further bundle of the placement group that rank 0's process is in.

A rank takes all that its bundle holds, so that whoever reserves the bundles decides on CPUs and GPUs. Its actor belongs
to rank 0's process: Ray ends it with that, however it ends. Knows Ray, but not Serve.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from verifier.errors import BadSetting, RankLost
from workers.ranks.rank import RankJob, in_words, run_rank


def reserved_group(size: int) -> Any:
    """The placement group of this process, if it has a bundle for each of ``size`` ranks; else None.

    Raises:
        BadSetting: its bundles are on several nodes.
    """
    if "ray" not in sys.modules:  # no worker of Ray's
        return None
    import ray

    group = ray.util.get_current_placement_group() if ray.is_initialized() else None
    if group is None or len(group.bundle_specs) < size:
        return None
    nodes = set(ray.util.placement_group_table(group)["bundles_to_node_id"].values())
    if len(nodes) > 1:
        raise BadSetting("placement_group_strategy", f"{len(nodes)} nodes", "STRICT_PACK: all ranks on one node")
    return group


class RankActors:
    """See `verifier.lead.Followers`."""

    def __init__(self, jobs: Sequence[RankJob], group: Any) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ray = ray
        self._actors: list[Any] = []
        self._lives: dict[Any, int] = {}  # the calls that last as long as the ranks
        for job in jobs:
            bundle = group.bundle_specs[job.rank]
            place = PlacementGroupSchedulingStrategy(group, job.rank)
            create: Any = ray.remote(num_cpus=bundle.get("CPU", 0), num_gpus=bundle.get("GPU", 0))(VerifierRank)
            actor = create.options(scheduling_strategy=place, max_restarts=0).remote()
            self._actors.append(actor)
            self._lives[actor.live.remote(job)] = job.rank

    def fault(self, within_s: float) -> str | None:
        lives = list(self._lives)
        if not self._ray.wait(lives, timeout=within_s)[0]:
            return None
        ended, _ = self._ray.wait(lives, num_returns=len(lives), timeout=0)
        return "; ".join(f"rank {self._lives[life]} {self._reason(life)}" for life in ended)

    def stop(self, within_s: float) -> None:
        self._ray.wait(list(self._lives), num_returns=len(self._lives), timeout=within_s)
        for actor in self._actors:
            self._ray.kill(actor)

    def _reason(self, life: Any) -> str:
        try:
            reason = self._ray.get(life)
        except self._ray.exceptions.RayError:
            return "is gone, and its process"
        return f"failed: {reason}" if reason else "has ended"


class VerifierRank:
    """The actor. Its one call lasts as long as the rank."""

    def live(self, job: RankJob) -> str | None:
        """Why it failed, for rank 0. When that is lost itself nobody listens, and the process ends."""
        try:
            run_rank(job)
        except RankLost:
            from ray.actor import exit_actor

            exit_actor()  # type: ignore[no-untyped-call]
        except Exception as error:
            return in_words(error)
        return None
