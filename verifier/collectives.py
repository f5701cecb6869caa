"""`Ranks` in processes of their own on one machine: gloo between CPUs, NCCL between GPUs.

Knows torch's process groups, and turns whatever they raise into `RankLost`. Groups are objects here and not torch's
global one, so that a process may be a rank of several verifiers, one after the other or at once. Knows no commands, and
not how the processes came about.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    BroadcastOptions,
    GatherOptions,
    Store,
    Work,
)

from verifier.errors import RankLost
from verifier.ranks import add_in_order

LOOPBACK = "127.0.0.1"  # what ranks say to one another is neither encrypted nor signed, and never leaves the machine
MEET_S = 60.0  # for all to find one another
LOAD_S = 1800.0  # for the slowest to read its part of the weights
HEADER = 1024  # numbers that go along with a message's length; longer messages take a second collective


def open_store() -> tuple[Store, int]:
    """Where ranks learn one another's addresses, in this process, and the port at which others find it.

    The port is one that was free and is held from then on.
    """
    listener = socket.create_server((LOOPBACK, 0))
    port = int(listener.getsockname()[1])
    limit = timedelta(seconds=MEET_S)
    store = TCPStore(
        LOOPBACK, port, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def find_store(port: int) -> Store:
    """The store that another process of this machine has opened."""
    return TCPStore(LOOPBACK, port, timeout=timedelta(seconds=MEET_S), wait_for_workers=False)


class ProcessRanks:
    """See `verifier.ranks.Ranks`. Returns from the constructor when all ``size`` ranks have met in ``store``.

    Attributes:
        limit_s: `LOAD_S` at first; whoever has loaded all sets a shorter one.

    Raises:
        RankLost: they have not within `MEET_S`.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank, self.size, self.limit_s = rank, size, LOAD_S
        self._store = store
        self._groups = {"cpu": _meet(lambda: _gloo(store, rank, size))}

    def sum(self, part: Tensor) -> Tensor:
        parts = list(part.new_empty(self.size, *part.shape).unbind())
        options = self._limited(AllgatherOptions())
        self._finish(lambda: self._group(part).allgather([parts], [part.contiguous()], options))
        return add_in_order(parts)

    def gather(self, part: Tensor) -> Tensor:
        parts = list(part.new_empty(self.size, *part.shape).unbind()) if self.rank == 0 else []
        options = self._limited(GatherOptions())
        options.rootRank = 0
        targets = [parts] if parts else []
        self._finish(lambda: self._group(part).gather(targets, [part.contiguous()], options))
        return torch.cat(parts, dim=1) if parts else part

    def broadcast(self, numbers: Sequence[int], limit_s: float | None = None) -> Sequence[int]:
        first = torch.zeros(HEADER + 1, dtype=torch.int64)
        if self.rank == 0:
            first[0] = len(numbers)
            first[1 : len(numbers) + 1] = torch.tensor(numbers[:HEADER], dtype=torch.int64)
        self._send(first, limit_s)
        length = int(first[0])
        if length <= HEADER:
            return cast(list[int], first[1 : length + 1].tolist())
        rest = torch.tensor(numbers[HEADER:]) if self.rank == 0 else torch.empty(length - HEADER, dtype=torch.int64)
        self._send(rest, limit_s)
        return cast(list[int], first[1:].tolist() + rest.tolist())

    def _group(self, tensor: Tensor) -> dist.ProcessGroup:
        """The one for the tensor's device; as all enter the same collectives, all make it at the same time."""
        kind = tensor.device.type
        if kind not in self._groups:
            self._groups[kind] = _meet(lambda: _nccl(self._store, self.rank, self.size))
        return self._groups[kind]

    def _send(self, numbers: Tensor, limit_s: float | None) -> None:
        options = self._limited(BroadcastOptions(), limit_s)
        options.rootRank = options.rootTensor = 0
        self._finish(lambda: self._groups["cpu"].broadcast([numbers], options))

    def _limited(self, options: Any, limit_s: float | None = None) -> Any:
        options.timeout = timedelta(seconds=self.limit_s if limit_s is None else limit_s)
        return options

    def _finish(self, start: Callable[[], Work]) -> None:
        try:
            start().wait()
        except RuntimeError as error:  # torch has no exception of its own for this
            raise RankLost(f"another rank is gone or silent: {_first_line(error)}") from error


def _meet(connect: Callable[[], dist.ProcessGroup]) -> dist.ProcessGroup:
    try:
        return connect()
    except RuntimeError as error:
        raise RankLost(f"the ranks have not found one another: {_first_line(error)}") from error


def _gloo(store: Store, rank: int, size: int) -> dist.ProcessGroup:
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = timedelta(seconds=MEET_S)
    group: Any = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)
    return cast(dist.ProcessGroup, group)


def _nccl(store: Store, rank: int, size: int) -> dist.ProcessGroup:
    """Its collectives return before they are done; its own watchdog ends the process when one takes too long."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=MEET_S)
    group: Any = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
    return cast(dist.ProcessGroup, group)


def _first_line(error: RuntimeError) -> str:
    return str(error).split("\n", 1)[0].split(". This is typically", 1)[0]
