"""Ranks as threads of one process: the collectives without sockets, and verifiers that share a tiny model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from verifier.errors import RankLost
from verifier.lead import Leader, follow
from verifier.ranks import Ranks, add_in_order
from verifier.verifier import Verifier

T = TypeVar("T")


class Table:
    """Where threads lay their parts down for one another."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)


class ThreadRanks:
    """See `verifier.ranks.Ranks`."""

    def __init__(self, table: Table, rank: int) -> None:
        self.rank, self.size, self.limit_s = rank, table.size, 60.0
        self._table = table

    def sum(self, part: Tensor) -> Tensor:
        return add_in_order(self._exchange(part, self.limit_s))

    def gather(self, part: Tensor) -> Tensor:
        parts = self._exchange(part, self.limit_s)
        return torch.cat(parts, dim=1) if self.rank == 0 else part

    def broadcast(self, numbers: Sequence[int], limit_s: float | None = None) -> Sequence[int]:
        said: Sequence[int] = self._exchange(numbers, self.limit_s if limit_s is None else limit_s)[0]
        return said

    def _exchange(self, part: Any, limit_s: float) -> list[Any]:
        """All ranks' parts. Nobody goes on before all have read them."""
        self._table.parts[self.rank] = part
        try:
            self._table.barrier.wait(limit_s)
            parts = list(self._table.parts)
            self._table.barrier.wait(limit_s)
        except threading.BrokenBarrierError as error:
            raise RankLost("another thread is gone or silent") from error
        return parts


class ThreadFollowers:
    """The other ranks' threads, as rank 0 holds them. Nobody can kill a thread: ``kill`` makes it end somehow."""

    def __init__(self, table: Table, kill: Callable[[], None] = lambda: None) -> None:
        self.table, self.kill = table, kill
        self.threads: list[threading.Thread] = []
        self.ended: list[str] = []

    def start(self, live: Callable[[], None]) -> None:
        def run() -> None:
            try:
                live()
            except Exception as error:
                self.ended.append(f"{threading.current_thread().name}: {error}")

        self.threads.append(threading.Thread(target=run, daemon=True, name=f"rank {len(self.threads) + 1}"))
        self.threads[-1].start()

    def fault(self, within_s: float) -> str | None:
        return "; ".join(self.ended) or None

    def stop(self, within_s: float) -> None:
        for thread in self.threads:
            thread.join(within_s)
        self.table.barrier.abort()
        self.kill()
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive(), "a follower goes on"


def on_all(size: int, work: Callable[[Ranks], T]) -> list[T]:
    """What ``work`` gives on each rank."""
    table = Table(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(ThreadRanks(table, rank)), range(size)))


@contextmanager
def leading(folder: Path, size: int, **settings: Any) -> Iterator[Verifier]:
    """Rank 0's verifier of ``size``, its followers as threads that end with it."""
    table = Table(size)
    followers = ThreadFollowers(table)

    def live(rank: int) -> None:
        ranks = ThreadRanks(table, rank)
        follow(ranks, Verifier.load(folder, ranks=ranks, **settings), limit_s=60)

    for rank in range(1, size):
        followers.start(lambda rank=rank: live(rank))  # type: ignore[misc]
    ranks = ThreadRanks(table, 0)
    verifier = Verifier.load(folder, ranks=ranks, **settings)
    verifier.lead = Leader(ranks, followers, limit_s=60)
    try:
        yield verifier
    finally:
        verifier.close()
        assert not followers.ended
