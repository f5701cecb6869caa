"""What several ingress replicas have to agree about, kept in one place: parts of limits, and how far to guess.

Ingress replicas tell it about once a second what they see and get back what to go by. Nothing here cannot be built
again from what they tell, and nothing waits for it: without it they go on as they were told last. So it needs no more
than to be there most of the time. Knows no requests.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from deployments.handles import direct
from deployments.quotas import EXCHANGE_S, Clock, Part, QuotaId, Use, divide, fair_part
from deployments.speculation import DraftChoice, DraftControl, Kind
from workers.costs import Prices
from workers.stats import Speculation

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

GONE_S = 10.0  # a replica that was not heard of for so long is taken to be no more
LISTEN_S = 3 * EXCHANGE_S  # at its start an aggregator only listens: others may hold what a former one gave them


@dataclass(frozen=True, slots=True)
class Report:
    """What an ingress replica tells."""

    ingress: str  # its name, of its own choice
    uses: Mapping[QuotaId, Use]
    drafter: str = ""  # "": nothing new
    prices: Prices | None = None  # None: nothing new
    done: Mapping[Kind, tuple[Speculation, int]] = field(default_factory=dict)  # since the last report; of how many


@dataclass(frozen=True, slots=True)
class Decisions:
    """What it goes by from then on."""

    parts: Mapping[QuotaId, Part]
    choices: Mapping[Kind, DraftChoice]
    drafter: str
    prices: Prices | None
    num_ingresses: int  # that were heard of lately


@dataclass(slots=True)
class _Member:
    """An ingress replica."""

    heard: float  # when the last report came
    uses: Mapping[QuotaId, Use] = field(default_factory=dict)
    granted: Mapping[QuotaId, int] = field(default_factory=dict)


class Aggregator:
    """
    Args:
        replicas: how many ingress replicas there should be.
        max_draft: how deep the service lets guess.
    """

    def __init__(self, replicas: int, max_draft: int, clock: Clock = time.monotonic) -> None:
        self._replicas, self._clock = replicas, clock
        self._born = clock()
        self._members: dict[str, _Member] = {}
        self._control = DraftControl(max_draft, clock)

    def exchange(self, report: Report) -> Decisions:
        """To be called by each ingress replica about once a second."""
        self._control.learn_drafter(report.drafter, report.prices)
        for kind, (done, requests) in report.done.items():
            self._control.observe(kind, done, requests)
        self._control.decide()
        parts = self._parts(report)
        control = self._control
        return Decisions(parts, control.choices(), control.drafter, control.prices, len(self._members))

    def _parts(self, report: Report) -> dict[QuotaId, Part]:
        now = self._clock()
        self._members = {name: each for name, each in self._members.items() if now - each.heard < GONE_S}
        member = self._members.setdefault(report.ingress, _Member(now))
        member.heard, member.uses = now, report.uses
        limits = {quota: use.limit for each in self._members.values() for quota, use in each.uses.items()}
        # Should the limits just be changing, its own count.
        limits.update({quota: use.limit for quota, use in report.uses.items()})
        parts = {quota: self._part(report.ingress, quota, limit) for quota, limit in limits.items()}
        member.granted = {quota: part.allowed for quota, part in parts.items()}
        return parts

    def _part(self, ingress: str, quota: QuotaId, limit: int) -> Part:
        unasked = Use(limit, fair_part(limit, self._replicas), 0, 0)
        uses = {name: member.uses.get(quota, unasked) for name, member in self._members.items()}
        granted = {name: member.granted.get(quota, 0) for name, member in self._members.items()}
        part = divide(ingress, uses, granted, self._replicas)
        if self._clock() - self._born < LISTEN_S:
            return part._replace(allowed=uses[ingress].allowed)
        return part


class AggregatorReplica:
    """The aggregator as a deployment with one replica: Serve replaces it when it or its node is lost."""

    def __init__(self, replicas: int, max_draft: int) -> None:
        self._aggregator = Aggregator(replicas, max_draft)

    async def exchange(self, report: Report) -> Decisions:
        return self._aggregator.exchange(report)


class AggregatorHandle:
    """That deployment, from an ingress."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._exchange = direct(handle).options(method_name="exchange")

    async def exchange(self, report: Report) -> Decisions:
        return cast(Decisions, await self._exchange.remote(report))
