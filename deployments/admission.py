"""Who may come in now: what the service can hold, and what each key may take. The others are told when to come back.

One for each ingress replica; `deployments.quotas` says how they agree. What was let in is never thrown out again.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping

from deployments.errors import ApiError
from deployments.keys import ApiKey
from deployments.quotas import MINUTE_S, Clock, Part, QuotaId, RateMeter, RoomMeter, Use, Window, fair_part

SERVICE = QuotaId("", "concurrent")
_WORDS = {
    "requests": "This API key may make {limit} requests a minute",
    "tokens": "This API key may use {limit} tokens a minute",
    "concurrent": "This API key may make {limit} requests at a time",
}


class Admission:
    """Counts requests and tokens against this replica's parts of the limits.

    Args:
        capacity: requests that the service may hold, served and waiting, all ingress replicas together.
        replicas: how many of these there are.

    Attributes:
        refused: how often, by what was full: "service", or the kind of a key's limit.
    """

    def __init__(self, capacity: int, replicas: int = 1, clock: Clock = time.monotonic) -> None:
        self.refused: Counter[str] = Counter({"service": 0, **dict.fromkeys(_WORDS, 0)})
        self._replicas, self._clock = replicas, clock
        self._rates: dict[QuotaId, RateMeter] = {}
        self._rooms: dict[QuotaId, RoomMeter] = {}
        self._asked: dict[QuotaId, Window] = {}
        self._open(SERVICE, capacity)

    @property
    def num_admitted(self) -> int:
        """Requests that are being served, or wait for it."""
        return self._rooms[SERVICE].used

    @property
    def num_admissible(self) -> int:
        """How many it may have."""
        return self._rooms[SERVICE].part.allowed

    def admit(self, key: ApiKey, num_prompt: int) -> Ticket:
        """Counts a request with a prompt of so many tokens. The tokens of its answer count when it ends.

        Raises:
            ApiError: 429, saying when to come back; nothing is counted.
        """
        ids = [SERVICE, *self._quotas(key)]
        for quota in ids:
            self._asked[quota].add(1)
        full = [quota for quota in ids if self._meter(quota).is_full]
        if full:
            raise self._refusal(full)
        rates = {quota.kind: self._rates[quota] for quota in ids if quota in self._rates}
        if "requests" in rates:
            rates["requests"].add(1)
        ticket = Ticket([self._rooms[quota] for quota in ids if quota in self._rooms], rates.get("tokens"))
        ticket.spend(num_prompt)
        return ticket

    def uses(self) -> dict[QuotaId, Use]:
        """What is to be told to the aggregator."""
        found: dict[QuotaId, Use] = {}
        for quota, asked in self._asked.items():
            meter = self._meter(quota)
            found[quota] = Use(meter.part.limit, meter.part.allowed, meter.used, asked.total)
        return found

    def obey(self, parts: Mapping[QuotaId, Part]) -> None:
        """Goes by these parts from now on. Also by those of keys that have not come here yet."""
        for quota, part in parts.items():
            self._open(quota, part.limit)
            self._meter(quota).part = part

    def _quotas(self, key: ApiKey) -> Iterable[QuotaId]:
        limits = key.limits
        for quota, limit in (
            (QuotaId(key.name, "requests"), limits.requests_per_minute),
            (QuotaId(key.name, "tokens"), limits.tokens_per_minute),
            (QuotaId(key.name, "concurrent"), limits.concurrent),
        ):
            if limit is not None:
                self._open(quota, limit)
                yield quota

    def _open(self, quota: QuotaId, limit: int) -> None:
        if quota in self._asked:
            return
        self._asked[quota] = Window(self._clock)
        part = Part(limit, fair_part(limit, self._replicas), 0)
        if quota.kind == "concurrent":
            self._rooms[quota] = RoomMeter(part, self._clock)
        else:
            self._rates[quota] = RateMeter(part, self._clock)

    def _meter(self, quota: QuotaId) -> RateMeter | RoomMeter:
        return self._rooms[quota] if quota.kind == "concurrent" else self._rates[quota]

    def _refusal(self, full: Iterable[QuotaId]) -> ApiError:
        """The answer, for the limit that takes longest."""
        waits = {quota: math.ceil(min(max(self._meter(quota).wait_s(), 1.0), MINUTE_S)) for quota in full}
        quota = max(waits, key=lambda each: waits[each])
        self.refused["service" if quota == SERVICE else quota.kind] += 1
        seconds = waits[quota]
        again = f"try again in {seconds} second{'s' * (seconds > 1)}."
        headers = {"Retry-After": str(seconds)}
        if quota == SERVICE:
            return ApiError(429, f"Too many requests are waiting; {again}", code="overloaded", headers=headers)
        limit = _WORDS[quota.kind].format(limit=self._meter(quota).part.limit)
        return ApiError(429, f"{limit}; {again}", code="rate_limit_exceeded", headers=headers)


class Ticket:
    """One request's place. To be closed however the request ends; the second time does nothing."""

    def __init__(self, rooms: Iterable[RoomMeter], tokens: RateMeter | None) -> None:
        self.num_written = 0  # tokens of the answer so far
        self._rooms: tuple[RoomMeter, ...] | None = tuple(rooms)
        self._tokens = tokens
        for room in self._rooms:
            room.enter()

    def spend(self, num_tokens: int) -> None:
        if self._tokens is not None:
            self._tokens.add(num_tokens)

    def close(self) -> None:
        rooms, self._rooms = self._rooms or (), None
        for room in rooms:
            room.leave()
        if rooms:
            self.spend(self.num_written)
