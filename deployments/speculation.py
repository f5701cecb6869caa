"""How far requests of a kind may guess: the slow scale, over minutes and all replicas.

Within these limits the engine weighs every step by itself (`workers.adaptive`), sequence by sequence; it is good at
that and is not to be hindered. So only depths are cut that are clearly useless: even if guesses there are as good as
could still be believed, and a token is worth as much as it ever is, they earn less than half of what drafting them
costs. What is not known is not cut. A depth is cut after a while and opened at once, and some requests go as far as the
service allows all the time (`DraftGuide`), so that it is seen when a cut is no longer right.

Knows kinds, counts and prices, and time from an injected clock. Knows no requests, no trees and no Ray.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from deployments.quotas import Clock
from drafter.base import DraftLimits
from workers.costs import Prices
from workers.stats import Speculation

MEMORY = 500.0  # walks that count at a depth; older ones fade, since drafters and traffic change
CERTAINTY = 2.0  # standard deviations
SAFETY = 0.5  # what guesses must earn of their price, for their depth to stay open
PATIENCE_S = 30.0  # for so long a depth must have been useless, before it is cut
PROBE_EVERY = 20  # requests of a kind whose depth is cut, of which one goes as far as the service allows
PROBE_S = 60.0  # after so long one does in any case
COOL = 0.7  # temperatures above are warm


class Kind(NamedTuple):
    """Requests whose guesses are likely to fare alike, by what is known before they begin."""

    endpoint: str
    temperature: str

    @classmethod
    def of(cls, endpoint: str, temperature: float) -> Kind:
        return cls(endpoint, "zero" if temperature == 0 else "cool" if temperature <= COOL else "warm")


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """How far a kind may guess, and what for."""

    max_draft: int
    why: str
    since_s: float  # seconds ago
    cuts: int  # how often it was lowered
    openings: int  # how often raised
    requests: int
    steps: int
    mean_acceptance_length: float | None  # over all requests
    acceptance_by_position: tuple[float, ...]  # lately, of the walks that came to guesses at a depth
    at_most_by_position: tuple[float, ...]  # what could still be believed


def within(limits: DraftLimits, max_draft: int) -> DraftLimits:
    """``limits``, no deeper than that, and without nodes that no tree of that depth could have."""
    depth = min(limits.max_draft, max_draft)
    most = 0
    for _ in range(depth):
        most = (most + 1) * limits.draft_top_k
        if most >= limits.max_nodes:
            break
    return replace(limits, max_draft=depth, max_nodes=min(limits.max_nodes, most))


class Evidence:
    """How guesses of a kind fared at each depth, given that all before them were right."""

    def __init__(self) -> None:
        self.accepted: list[float] = []
        self.tried: list[float] = []

    def add(self, done: Speculation) -> None:
        for depth, (accepted, tried) in enumerate(zip(done.accepted_by_position, done.tried_by_position, strict=True)):
            if depth == len(self.tried):
                self.accepted.append(0.0)
                self.tried.append(0.0)
            kept = math.exp(-tried / MEMORY)
            weight = (1 - kept) * MEMORY / tried if tried else 0.0  # as if they had come one by one
            self.accepted[depth] = self.accepted[depth] * kept + accepted * weight
            self.tried[depth] = self.tried[depth] * kept + tried * weight

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(a / t if t else 0.0 for a, t in zip(self.accepted, self.tried, strict=True))

    def at_most(self, depth: int) -> float:
        """What the rate at ``depth`` of 1 and more could still be: Wilson's upper bound. 1 where nothing is known."""
        if depth > len(self.tried) or not self.tried[depth - 1]:
            return 1.0
        n, rate, z = self.tried[depth - 1], self.accepted[depth - 1] / self.tried[depth - 1], CERTAINTY
        spread = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
        return min(1.0, (rate + z * z / (2 * n) + spread) / (1 + z * z / n))

    def reach_at_most(self, depth: int) -> list[float]:
        """What the chances could still be that all guesses down to depth 1, 2, … ``depth`` are right."""
        chances: list[float] = []
        for level in range(1, depth + 1):
            chances.append((chances[-1] if chances else 1.0) * self.at_most(level))
        return chances


def is_useless(chance: float, depth: int, prices: Prices) -> bool:
    """Whether guesses at ``depth`` do not earn their price in a batch of any size that has been measured.

    A token is worth at most a sequence's share of a pass without guesses: where guessing pays, tokens are cheaper.
    """
    return bool(prices.verifying and prices.drafting) and all(
        chance * prices.verifying_s(batch) < SAFETY * level_price(by_depth, depth)
        for batch, by_depth in prices.drafting.items()
    )


def level_price(by_depth: Mapping[int, float], depth: int) -> float:
    """Of drafting to ``depth`` beyond what one level less takes, in seconds; in doubt too low."""

    def price(levels: int) -> float:
        nearest = min(by_depth, key=lambda known: abs(known - levels))
        return by_depth[nearest] * levels / nearest

    return min(price(depth) / depth, max(0.0, price(depth) - price(depth - 1)))


def useful_depth(chances: Sequence[float], prices: Prices | None) -> int:
    """The greatest depth that is not clearly useless. ``chances``: that guesses are right down to depth 1, 2, …"""
    depth = len(chances)
    while prices and depth and is_useless(chances[depth - 1], depth, prices):
        depth -= 1
    return depth


@dataclass(slots=True)
class _Record:
    """What is known and decided about one kind."""

    max_draft: int
    since: float
    evidence: Evidence = field(default_factory=Evidence)
    total: Speculation = field(default_factory=Speculation)
    requests: int = 0
    useless_since: float | None = None  # what lies beyond ``useful``
    useful: int = 0  # the greatest depth that was of use since then
    cuts: int = 0
    openings: int = 0
    why: str = "nothing speaks against it"


class DraftControl:
    """Decides for each kind how deep its requests may guess.

    Args:
        allowed: how deep the service allows.
    """

    def __init__(self, allowed: int, clock: Clock = time.monotonic) -> None:
        self.drafter = ""
        self.prices: Prices | None = None
        self._allowed, self._clock = allowed, clock
        self._records: dict[Kind, _Record] = {}

    def learn_drafter(self, drafter: str, prices: Prices | None) -> None:
        """Who drafts now, and what the replicas have measured; "" and None are no news. Of another drafter nothing is
        known yet.
        """
        if drafter and drafter != self.drafter:
            self._records.clear()
            self.drafter = drafter
        self.prices = prices or self.prices

    def observe(self, kind: Kind, done: Speculation, requests: int = 1) -> None:
        record = self._of(kind)
        record.evidence.add(done)
        record.total += done
        record.requests += requests

    def decide(self) -> None:
        """To be called about once a second."""
        for record in self._records.values():
            self._decide(record)

    def choices(self) -> dict[Kind, DraftChoice]:
        return {kind: self._choice(record) for kind, record in self._records.items()}

    def _of(self, kind: Kind) -> _Record:
        return self._records.setdefault(kind, _Record(self._allowed, self._clock()))

    def _decide(self, record: _Record) -> None:
        now = self._clock()
        useful = useful_depth(record.evidence.reach_at_most(self._allowed), self.prices)
        if useful >= record.max_draft:
            record.useless_since = None
            if useful > record.max_draft:
                record.openings += 1
                self._set(record, useful, f"guesses at depth {record.max_draft + 1} may be worth their price again")
            return
        if record.useless_since is None:
            record.useless_since, record.useful = now, useful
        record.useful = max(record.useful, useful)
        if now - record.useless_since >= PATIENCE_S:
            record.cuts += 1
            self._set(record, record.useful, self._reason(record, record.useful + 1))

    def _set(self, record: _Record, max_draft: int, why: str) -> None:
        record.max_draft, record.why, record.since, record.useless_since = max_draft, why, self._clock(), None

    def _reason(self, record: _Record, depth: int) -> str:
        chance = record.evidence.reach_at_most(depth)[-1]
        return f"at most {chance:.1%} of the guesses at depth {depth} are right, which does not pay for drafting them"

    def _choice(self, record: _Record) -> DraftChoice:
        evidence = record.evidence
        return DraftChoice(
            max_draft=record.max_draft,
            why=record.why,
            since_s=self._clock() - record.since,
            cuts=record.cuts,
            openings=record.openings,
            requests=record.requests,
            steps=record.total.steps,
            mean_acceptance_length=record.total.mean_acceptance_length,
            acceptance_by_position=evidence.rates,
            at_most_by_position=tuple(evidence.at_most(depth) for depth in range(1, len(evidence.tried) + 1)),
        )


class DraftGuide:
    """An ingress replica's side: goes by what was decided last, lets some requests go further, keeps what they did.

    Attributes:
        probes: how many requests were let go further.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.probes = 0
        self._clock = clock
        self._depths: dict[Kind, int] = {}
        self._since_probe: dict[Kind, tuple[int, float]] = {}  # requests, and when it was
        self._done: dict[Kind, tuple[Speculation, int]] = {}

    def obey(self, choices: Mapping[Kind, DraftChoice]) -> None:
        self._depths = {kind: choice.max_draft for kind, choice in choices.items()}

    def limits(self, kind: Kind, allowed: DraftLimits) -> DraftLimits:
        """For the next request of that kind, of which not more than ``allowed`` is wanted."""
        depth = self._depths.get(kind, allowed.max_draft)
        if depth >= allowed.max_draft:
            return allowed
        count, last = self._since_probe.setdefault(kind, (0, self._clock()))
        if count + 1 >= PROBE_EVERY or self._clock() - last >= PROBE_S:
            self._since_probe[kind] = 0, self._clock()
            self.probes += 1
            return allowed
        self._since_probe[kind] = count + 1, last
        return within(allowed, depth)

    def observe(self, kind: Kind, done: Speculation) -> None:
        """How guessing went for one request."""
        sum_so_far, requests = self._done.get(kind, (Speculation(), 0))
        self._done[kind] = sum_so_far + done, requests + 1

    def take(self) -> dict[Kind, tuple[Speculation, int]]:
        """What was observed since the last time, and of how many requests."""
        done, self._done = self._done, {}
        return done
