"""Rank 0 of a tensor-parallel verifier: finds places for the others, loads with them, leads them.

In Ray, where there is a bundle for each rank, they are actors; anywhere else processes. Knows nothing of engines.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.distributed_c10d import Store

from verifier.collectives import ProcessRanks, open_store
from verifier.device import choose_device
from verifier.errors import RankLost
from verifier.lead import END_S, Followers, Leader
from verifier.verifier import Verifier
from workers.config import EngineConfig
from workers.ranks.actors import RankActors, reserved_group
from workers.ranks.processes import RankProcesses
from workers.ranks.rank import RankJob, load_verifier

UP_S = 180.0  # for the slowest process to start and to import torch
LOOK_S = 0.1


def load_ranks(path: Path, config: EngineConfig) -> Verifier:
    """A verifier on as many ranks as ``config`` says. Every rank gets an equal share of this process's threads.

    On GPUs each has its own: the one that its bundle gives it, or else the one with its number.

    Raises:
        RankLost: a rank could not be started or has failed while it loaded; says why.
        DraftreeError: rank 0 could not load its own part, or there are fewer GPUs than ranks.
    """
    size = config.tensor_parallel
    if size == 1:
        return load_verifier(path, config)
    threads = max(1, torch.get_num_threads() // size)
    torch.set_num_threads(threads)
    group = reserved_group(size)
    if group is None:
        choose_device(config.device, num_gpus=size)
    store, port = open_store()
    jobs = [RankJob(rank, path, config, threads, port, gpu=0 if group else rank) for rank in range(1, size)]
    followers = RankProcesses(jobs) if group is None else RankActors(jobs, group)
    try:
        await_signs(store, jobs, followers)
        ranks = ProcessRanks(store, 0, size)
        verifier = load_verifier(path, config, ranks)
        verifier.lead = Leader(ranks, followers)
    except BaseException as error:
        reason = followers.fault(END_S) if isinstance(error, RankLost) else None
        followers.stop(0)
        if reason:
            raise RankLost(reason) from error
        raise
    return verifier


def await_signs(store: Store, jobs: Sequence[RankJob], followers: Followers) -> None:
    """Returns when all processes are up. Who waits in a collective would not see one that fails before it gets there.

    Raises:
        RankLost: one has ended, or is not up within `UP_S`.
    """
    deadline = time.monotonic() + UP_S
    while not store.check([job.sign for job in jobs]):
        if fault := followers.fault(LOOK_S):
            raise RankLost(fault)
        if time.monotonic() > deadline:
            raise RankLost(f"the other ranks were not up within {UP_S:.0f} seconds")
