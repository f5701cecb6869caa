"""A rank of a tensor-parallel verifier that is not rank 0: what it is given, and its whole life.

Knows how a verifier is loaded from an engine's settings. Knows not who started its process, nor in what.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from verifier.collectives import ProcessRanks, find_store
from verifier.device import use_gpu
from verifier.errors import DraftreeError
from verifier.lead import follow
from verifier.ranks import ALONE, Ranks
from verifier.verifier import Verifier
from workers.config import EngineConfig


@dataclass(frozen=True)
class RankJob:
    """All that a rank needs to know."""

    rank: int
    path: Path  # of the model
    config: EngineConfig
    threads: int  # for its arithmetic
    port: int  # of rank 0's store
    gpu: int = 0  # of those that its process sees, if it is to compute on one

    @property
    def sign(self) -> str:
        """What the rank leaves in the store to say that its process is up."""
        return f"rank {self.rank} is up"


def run_rank(job: RankJob) -> None:
    """Returns when rank 0 says stop.

    Raises:
        RankLost: rank 0 or another rank is gone or silent.
        DraftreeError: the model could not be loaded.
    """
    torch.set_num_threads(job.threads)
    store = find_store(job.port)
    store.set(job.sign, "")
    ranks = ProcessRanks(store, job.rank, job.config.tensor_parallel)
    follow(ranks, load_verifier(job.path, job.config, ranks, job.gpu))


def load_verifier(path: Path, config: EngineConfig, ranks: Ranks = ALONE, gpu: int = 0) -> Verifier:
    """The model at ``path``, or a rank's part of it."""
    return Verifier.load(
        path,
        num_pages=config.num_pages,
        page_size=config.page_size,
        exact=config.exact,
        max_rows=config.max_rows,
        device=use_gpu(config.device, gpu),
        ranks=ranks,
    )


def in_words(error: BaseException) -> str:
    """An exception for whoever reads of it in another process."""
    return str(error) if isinstance(error, DraftreeError) else f"{type(error).__name__}: {error}"
