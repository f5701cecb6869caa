"""How many replicas there should be: by what verifiers and drafters report of themselves.

Loads are counted in replicas: 1.5 keeps one replica busy and another one half. The functions are pure; the classes are
what Serve's controller calls about once a second. It gets this module by value, where nothing else of ours need be
installed, so nothing but the standard library is imported. Knows no engine, no settings and no clock: how long a wish
must last before it is followed, Serve sees to, and it keeps to the least and the most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from workers.stats import EngineStats, RemoteFigures

VERIFIER, DRAFTER = "VerifierReplica", "Drafter"  # the deployments' names
WORK, PAGES, BUSY, MISSED = "work", "pages", "busy", "missed"  # what is reported, each as a share
FULL_MISSES = 0.1  # with this share of questions unanswered in time, drafters are as good as fully busy
MOST_WANTED = 2.0  # replicas that misses can make of one: how far beyond its power a drafter is asked, nobody knows
ROUNDING = 1e-9

Reports = Mapping[str, Mapping[Any, float]]  # by kind and replica; the mean over Serve's look-back period
Id = TypeVar("Id", bound=Hashable)
State = dict[str, Any]


class Context(Protocol):
    """What is used of Serve's `AutoscalingContext`."""

    current_num_replicas: int  # that run
    target_num_replicas: int  # that were decided on

    @property
    def aggregated_metrics(self) -> Reports | None: ...


@dataclass(frozen=True)
class Band:
    """More replicas when these are busier than ``high``, fewer when the others would then be no busier than ``low``.

    Between the two nothing changes, so a steady load cannot drive the number up and down.
    """

    low: float = 0.55
    high: float = 0.8

    def replicas(self, load: float, current: int) -> int:
        """How many to have, for ``load`` and ``current`` replicas."""
        at_least, enough = (math.ceil(load / share - ROUNDING) for share in (self.high, self.low))
        return max(at_least, min(current, enough))


def verifier_load(reports: Reports) -> float:
    """Whatever is scarcer: places for running requests, waiting ones counted, or pages."""
    return max(sum(reports.get(kind, {}).values()) for kind in (WORK, PAGES))


def drafter_load(reports: Reports) -> float:
    """The time that drafters are busy; more where they leave questions unanswered."""
    missed = reports.get(MISSED, {})
    return sum(max(busy, _load_of_misses(missed.get(replica, 0.0))) for replica, busy in reports.get(BUSY, {}).items())


def _load_of_misses(share: float) -> float:
    return min(share / FULL_MISSES, MOST_WANTED)


class _Scaling:
    """By what a deployment's own replicas report."""

    load: Callable[[Reports], float]

    def __init__(self, low: float = Band.low, high: float = Band.high) -> None:
        self._band = Band(low, high)

    def __call__(self, context: Context) -> tuple[int, State]:
        return _replicas(context, self._band, type(self).load(context.aggregated_metrics or {})), {}


class VerifierScaling(_Scaling):
    """Serve's policy for verifiers."""

    load = staticmethod(verifier_load)


class DrafterScaling(_Scaling):
    """Serve's policy for drafters, as far as they know themselves how they do."""

    load = staticmethod(drafter_load)


class FleetScaling:
    """Serve's policy for an application: verifiers as ever, and drafters in proportion to them.

    So drafters come and go with verifiers, not after them; within ``least`` and ``most`` for each verifier their own
    load decides, and the answers that verifiers waited for in vain.
    """

    def __init__(self, least: float = 0.25, most: float = 1.0, low: float = Band.low, high: float = Band.high) -> None:
        self._least, self._most, self._band = least, most, Band(low, high)

    def __call__(self, contexts: Mapping[Id, Context]) -> tuple[dict[Id, int], dict[Id, State]]:
        by_name = {getattr(key, "name", key): (key, context) for key, context in contexts.items()}
        decisions: dict[Id, int] = {}
        if VERIFIER in by_name:
            key, verifiers = by_name[VERIFIER]
            decisions[key] = _replicas(verifiers, self._band, verifier_load(verifiers.aggregated_metrics or {}))
        if DRAFTER in by_name:
            key, drafters = by_name[DRAFTER]
            load = drafter_load(drafters.aggregated_metrics or {})
            if VERIFIER not in by_name:  # of a number that is fixed
                decisions[key] = _replicas(drafters, self._band, load)
            else:
                other, verifiers = by_name[VERIFIER]
                load = max(load, drafters.current_num_replicas * _vain(verifiers.aggregated_metrics or {}))
                wanted = _replicas(drafters, self._band, load)
                # Verifiers that are to go are there until Serve says so, those that are to come will be.
                decisions[key] = self._in_proportion(wanted, max(decisions[other], verifiers.target_num_replicas))
        return decisions, {}

    def _in_proportion(self, wanted: int, num_verifiers: int) -> int:
        least, most = (math.ceil(share * num_verifiers - ROUNDING) for share in (self._least, self._most))
        return min(max(wanted, least), max(most, least))


def _replicas(context: Context, band: Band, load: float) -> int:
    """As `Band.replicas`; while there are replicas that have not reported yet, no fewer than there are."""
    wanted = band.replicas(load, context.target_num_replicas)
    heard = max(map(len, (context.aggregated_metrics or {}).values()), default=0)
    return wanted if heard >= context.current_num_replicas else max(wanted, context.target_num_replicas)


def _vain(reports: Reports) -> float:
    """How busy drafters are by what verifiers have missed."""
    missed = reports.get(MISSED, {}).values()
    return _load_of_misses(sum(missed) / len(missed)) if missed else 0.0


# ── what replicas report ─────────────────────────────────────────────────────────────────────────────────────────────


class Growth:
    """How much of one counter's growth another's makes, since it was last asked."""

    def __init__(self) -> None:
        self._part = self._whole = 0.0

    def share(self, part: float, whole: float) -> float:
        grown, of = part - self._part, whole - self._whole
        self._part, self._whole = part, whole
        return grown / of if of > 0 else 0.0


class VerifierReport:
    """A verifier's account of itself.

    Args:
        max_running: requests that it decodes at a time.
    """

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._missed = Growth()

    def __call__(self, stats: EngineStats, remote: RemoteFigures | None) -> dict[str, float]:
        report = {
            WORK: (stats.running + stats.waiting) / self._max_running,
            PAGES: stats.pages_used / stats.pages_total,
        }
        if remote:
            report[MISSED] = self._missed.share(remote.missed, remote.asked)
        return report


class DrafterReport:
    """A drafter's account of itself."""

    def __init__(self, now: float) -> None:
        self._busy, self._missed = Growth(), Growth()
        self._busy.share(0.0, now)

    def __call__(self, now: float, busy_s: float, hurried: int, asked: int) -> dict[str, float]:
        """
        Args:
            now: in seconds, of the clock by which ``busy_s`` was counted.
            hurried: of the questions ``asked``, those that there was no time to answer in full.
        """
        return {BUSY: self._busy.share(busy_s, now), MISSED: self._missed.share(hurried, asked)}
