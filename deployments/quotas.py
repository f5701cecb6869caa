"""Limits that several ingress replicas share, without asking one another before each request.

Each replica may use up to its part of a limit, and counts what it uses by itself. The parts never add up to more than
the limit, so it holds wherever requests arrive; only before anything was told are they rounded up. Parts follow demand:
`divide` says how, `deployments.aggregator` asks. Knows counts and seconds, of an injected clock. Knows no keys, no
requests and no Ray.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from typing import Literal, NamedTuple

MINUTE_S = 60.0
EXCHANGE_S = 1.0  # between two looks at how parts should be cut
UNKNOWN_WAIT_S = 10.0  # told while nothing has been measured

Clock = Callable[[], float]
Kind = Literal["requests", "tokens", "concurrent"]


class QuotaId(NamedTuple):
    """Whose limit, and of what. The service itself is called ""."""

    holder: str
    kind: Kind


class Part(NamedTuple):
    """What a replica is told about a limit."""

    limit: int
    allowed: int  # its part, what it has used already included
    free: int  # that others hold and do not use at the moment: it may yet come here


class Use(NamedTuple):
    """What a replica tells about a limit."""

    limit: int
    allowed: int  # the part that it goes by
    used: int
    asked: int  # attempts in the last minute, refused ones included


def fair_part(limit: int, replicas: int) -> int:
    """What a replica allows itself before it has been told anything."""
    return -(-limit // replicas)


def divide(replica: str, uses: Mapping[str, Use], granted: Mapping[str, int], replicas: int) -> Part:
    """The part of ``replica``.

    What is free goes half in equal shares, so that no replica has to refuse its first request, and half by demand.
    Nothing is given that another one may still use: it must have told first that it goes by a smaller part.

    Args:
        uses: what each replica has told last, ``replica`` among them.
        granted: what each was answered.
        replicas: how many there should be; those that have told nothing yet go by their fair part.
    """
    mine, silent = uses[replica], max(0, replicas - len(uses))
    fair = fair_part(mine.limit, replicas)
    held = sum(max(use.used, use.allowed, granted.get(name, 0)) for name, use in uses.items() if name != replica)
    free = max(0, mine.limit - sum(use.used for use in uses.values()))
    equal = free // (2 * (len(uses) + silent))
    demand = sum(use.asked + 1 for use in uses.values()) + silent
    wanted = mine.used + equal + int((free - equal * (len(uses) + silent)) * (mine.asked + 1) / demand + 0.5)
    allowed = max(0, min(wanted, mine.limit - held - silent * fair))
    return Part(mine.limit, allowed, max(0, free - max(0, allowed - mine.used)))


class Window:
    """Amounts within the last minute: a log of them, so that nothing is ever rounded or drifts."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._log: deque[tuple[float, int]] = deque()
        self._total = 0

    def __len__(self) -> int:
        return len(self._log)

    def add(self, amount: int) -> None:
        self._forget()  # whoever adds may never ask
        self._log.append((self._clock(), amount))
        self._total += amount

    @property
    def total(self) -> int:
        self._forget()
        return self._total

    def until_below(self, total: int) -> float:
        """Seconds until less than ``total`` is left, if nothing is added; infinite for 0."""
        self._forget()
        left, now = self._total, self._clock()
        if left < total:
            return 0.0
        for time, amount in self._log:
            left -= amount
            if left < total:
                return time + MINUTE_S - now
        return math.inf

    def rate(self) -> float:
        """Per second, since the oldest that is in the log; 0 before there are two."""
        total = self.total
        if len(self._log) < 2:
            return 0.0
        return total / max(self._clock() - self._log[0][0], 1e-3)

    def _forget(self) -> None:
        oldest = self._clock() - MINUTE_S
        while self._log and self._log[0][0] <= oldest:
            self._total -= self._log.popleft()[1]


class RateMeter:
    """A limit a minute. What is counted after the fact, as tokens are, may go beyond it and is waited off."""

    def __init__(self, part: Part, clock: Clock) -> None:
        self.part = part
        self._window = Window(clock)

    @property
    def used(self) -> int:
        return self._window.total

    @property
    def is_full(self) -> bool:
        return self.used >= self.part.allowed

    def add(self, amount: int) -> None:
        self._window.add(amount)

    def wait_s(self) -> float:
        """Seconds until there is room, if there is none."""
        if self.part.free:
            return 2 * EXCHANGE_S
        return self._window.until_below(self.part.allowed)


class RoomMeter:
    """A limit at any time. How soon there is room again, the rate tells at which requests have ended.

    Those who were told to wait are taken to come back: whoever is refused after them is told to wait for one more end.

    Attributes:
        ended: requests that have ended.
    """

    def __init__(self, part: Part, clock: Clock) -> None:
        self.part = part
        self.used = 0
        self._clock = clock
        self.ended = Window(clock)
        self._promised: list[float] = []  # when those who wait were told to come back, as a heap

    @property
    def is_full(self) -> bool:
        return self.used >= self.part.allowed

    def enter(self) -> None:
        self.used += 1

    def leave(self) -> None:
        self.used -= 1
        self.ended.add(1)

    def wait_s(self) -> float:
        """Seconds until there will probably be room, if there is none."""
        rate, now = self.ended.rate(), self._clock()
        while self._promised and self._promised[0] <= now:
            heappop(self._promised)
        behind = len(self._promised) - self.part.free
        if behind < 0:  # there is room elsewhere, which comes here when it is asked for
            wait = 2 * EXCHANGE_S
        elif rate:
            wait = (behind + 1) / rate
        else:
            return UNKNOWN_WAIT_S
        if wait < MINUTE_S:
            heappush(self._promised, now + wait)
        return wait
