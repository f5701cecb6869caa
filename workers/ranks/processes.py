"""Ranks as processes of this machine, started by rank 0 and ending with it.

Knows pipes, signals and exit codes. Knows nothing of what a rank does.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from threading import Lock, Thread

from verifier.errors import DraftreeError
from workers.ranks.rank import RankJob, in_words, run_rank

logger = logging.getLogger(__name__)


class RankProcesses:
    """See `verifier.lead.Followers`. Spawned, not forked: torch's threads and Ray's do not survive a fork."""

    def __init__(self, jobs: Sequence[RankJob]) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes = {}
        self._reports: dict[int, Connection] = {}
        self._reasons: dict[int, str] = {}
        self._reading = Lock()  # a report can be read once
        for job in jobs:
            report, sender = context.Pipe(duplex=False)
            process = context.Process(target=_live, args=(job, sender), name=f"draftree-rank-{job.rank}", daemon=True)
            process.start()
            sender.close()  # so that the child's end is the only one, and closes with it
            self._processes[job.rank], self._reports[job.rank] = process, report

    def fault(self, within_s: float) -> str | None:
        wait(list(self._reports.values()), within_s)  # a report, or the end of one that could make none
        with self._reading:
            for rank, report in self._reports.items():
                if rank not in self._reasons and report.poll():
                    self._reasons[rank] = self._read(rank, report)
        return "; ".join(f"rank {rank} {reason}" for rank, reason in self._reasons.items()) or None

    def stop(self, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()

    def _read(self, rank: int, report: Connection) -> str:
        try:
            return f"failed: {report.recv()}"
        except EOFError:
            process = self._processes[rank]
            process.join()
            code = process.exitcode or 0
            return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _live(job: RankJob, report: Connection) -> None:
    """The child's main function."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's affair, and may end no more than an answer
    Thread(target=_end_with_parent, daemon=True).start()
    try:
        run_rank(job)
    except Exception as error:
        if not isinstance(error, DraftreeError):
            logger.exception("rank %d failed", job.rank)
        report.send(in_words(error))
        sys.exit(1)


def _end_with_parent() -> None:
    """At any moment, while weights are read too."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
