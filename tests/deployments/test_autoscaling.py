"""Scaling by load: the policies as pure functions, as Serve will call them, and on a clock whose loads are scripted."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from ray.serve.autoscaling_policy import _apply_delay_logic
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from deployments import autoscaling
from deployments.autoscaling import (
    BUSY,
    DRAFTER,
    MISSED,
    PAGES,
    VERIFIER,
    WORK,
    Band,
    DrafterReport,
    DrafterScaling,
    FleetScaling,
    Reports,
    VerifierReport,
    VerifierScaling,
    drafter_load,
    verifier_load,
)
from tests.deployments.fakes import busy_stats
from workers.stats import RemoteFigures

ROOT = Path(__file__).parents[2]


@dataclass
class Situation:
    """A `deployments.autoscaling.Context`."""

    current_num_replicas: int
    target_num_replicas: int
    aggregated_metrics: Reports | None = None


def of(num_replicas: int, **kinds: float) -> Situation:
    """Each replica reports the same."""
    reports = {kind: dict.fromkeys(range(num_replicas), value) for kind, value in kinds.items()}
    return Situation(num_replicas, num_replicas, reports)


@pytest.mark.parametrize(
    ("load", "current", "wanted"),
    [
        (0.0, 1, 0),
        (0.1, 1, 1),
        (0.8, 1, 1),
        (0.81, 1, 2),
        (0.56, 2, 2),  # one alone would be busier than it should be
        (0.55, 2, 1),
        (4.0, 1, 5),
        (4.0, 7, 7),
        (4.0, 9, 8),
    ],
)
def test_between_the_marks_nothing_changes(load: float, current: int, wanted: int) -> None:
    assert Band(0.55, 0.8).replicas(load, current) == wanted


def test_no_load_moves_the_number_twice() -> None:
    """Whatever the number was, one step takes it to where it stays."""
    for load in (step / 50 for step in range(400)):
        for current in range(12):
            wanted = Band().replicas(load, current)
            assert Band().replicas(load, wanted) == wanted


def test_verifiers_follow_what_is_scarcer() -> None:
    policy = VerifierScaling()
    assert verifier_load({WORK: {"a": 1.5, "b": 0.5}, PAGES: {"a": 0.2, "b": 0.3}}) == 2.0
    assert verifier_load({WORK: {"a": 0.1, "b": 0.1}, PAGES: {"a": 0.9, "b": 0.8}}) == pytest.approx(1.7)
    assert policy(of(2, work=1.0, pages=0.1)) == (3, {})
    assert policy(of(2, work=0.1, pages=0.9)) == (3, {})
    assert policy(of(2, work=0.1, pages=0.1)) == (1, {})
    assert policy(of(2, work=0.0, pages=0.0)) == (0, {})  # which Serve raises to the least that is allowed


def test_who_has_not_reported_yet_may_be_busy() -> None:
    """A replica that had just started counted as idle, and the load that it was started for seemed to be gone."""
    policy = VerifierScaling()
    assert policy(Situation(2, 2, {WORK: {"a": 0.3}, PAGES: {"a": 0.0}})) == (2, {})
    assert policy(Situation(1, 1, None)) == (1, {})
    assert policy(Situation(0, 1, {})) == (0, {})


def test_drafters_follow_their_busy_share_and_their_misses() -> None:
    assert drafter_load({BUSY: {"a": 0.5, "b": 0.2}, MISSED: {"a": 0.0, "b": 0.0}}) == pytest.approx(0.7)
    assert drafter_load({BUSY: {"a": 0.5}, MISSED: {"a": 0.1}}) == pytest.approx(1.0)
    assert drafter_load({BUSY: {"a": 0.5}, MISSED: {"a": 1.0}}) == pytest.approx(2.0)
    assert DrafterScaling()(of(2, busy=0.95, missed=0.0)) == (3, {})
    assert DrafterScaling()(of(2, busy=0.2, missed=0.0)) == (1, {})


@pytest.mark.parametrize(
    ("verifiers", "drafters", "wanted"),
    [
        (of(4, work=0.7, pages=0.1, missed=0.0), of(1, busy=0.1, missed=0.0), (4, 2)),  # at least one for two
        (of(4, work=1.6, pages=0.1, missed=0.0), of(2, busy=0.7, missed=0.0), (8, 4)),  # along, not afterwards
        (of(2, work=0.7, pages=0.1, missed=0.0), of(1, busy=1.0, missed=1.0), (2, 2)),  # at most one each
        (of(4, work=0.7, pages=0.1, missed=0.3), of(2, busy=0.7, missed=0.0), (4, 4)),  # verifiers have waited in vain
        (of(2, work=0.1, pages=0.1, missed=0.0), of(2, busy=0.7, missed=0.0), (1, 2)),  # until Serve stops one
        (of(0), of(1, busy=0.0, missed=0.0), (0, 0)),
    ],
)
def test_the_fleet_keeps_its_proportions(verifiers: Situation, drafters: Situation, wanted: tuple[int, int]) -> None:
    decisions, _ = FleetScaling(least=0.5, most=1.0)({VERIFIER: verifiers, DRAFTER: drafters})
    assert (decisions[VERIFIER], decisions[DRAFTER]) == wanted


def test_a_fleet_of_one_kind_scales_too() -> None:
    policy = FleetScaling()
    assert policy({VERIFIER: of(1, work=1.0, pages=0.0)}) == ({VERIFIER: 2}, {})
    assert policy({DRAFTER: of(1, busy=1.0, missed=0.0)}) == ({DRAFTER: 2}, {})
    assert policy({}) == ({}, {})


def test_what_replicas_report() -> None:
    remote = RemoteFigures(asked=10, missed=1)
    report = VerifierReport(max_running=4)
    assert report(busy_stats(), None) == {WORK: 3 / 4, PAGES: 10 / 64}
    assert report(busy_stats(), remote)[MISSED] == 0.1
    assert report(busy_stats(), remote)[MISSED] == 0.0  # nothing was asked since
    drafter = DrafterReport(now=100.0)
    assert drafter(110.0, busy_s=5.0, hurried=1, asked=4) == {BUSY: 0.5, MISSED: 0.25}
    assert drafter(120.0, busy_s=6.0, hurried=1, asked=8) == {BUSY: 0.1, MISSED: 0.0}


def test_the_controller_needs_nothing_of_ours(tmp_path: Path) -> None:
    """Serve ships this one module by value; an import of another of ours would fail on a head where none is."""
    for policy in (VerifierScaling, DrafterScaling, FleetScaling):
        path = f"{autoscaling.__name__}:{policy.__name__}"
        shipped: Any = AutoscalingPolicy.model_validate({"policy_function": path})
        (tmp_path / policy.__name__).write_bytes(shipped.get_serialized_policy_def())
    code = """
import sys, types
from ray import cloudpickle
verifier, drafter, fleet = (cloudpickle.load(open(name, "rb"))() for name in sys.argv[1:])
idle = types.SimpleNamespace(current_num_replicas=1, target_num_replicas=1, aggregated_metrics={})
print(verifier(idle)[0], drafter(idle)[0], fleet({"VerifierReplica": idle})[0], "deployments" in sys.modules)
"""
    names = ["VerifierScaling", "DrafterScaling", "FleetScaling"]
    result = subprocess.run([sys.executable, "-c", code, *names], cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout.strip() == "1 1 {'VerifierReplica': 1} False", result.stderr


# ── on a clock ───────────────────────────────────────────────────────────────────────────────────────────────────────

TICK_S, REPORT_S = 2.5, 10.0  # a sample each tick


@dataclass
class Replica:
    """Decodes up to ``room`` requests at a time; the rest waits."""

    ready_at: float
    room: int
    left: list[float] = field(default_factory=list)  # seconds of work, of each request
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=5))  # of its work, over the look-back period
    reported: float | None = None  # their mean

    def work(self, now: float) -> None:
        self.left = [left - TICK_S for left in self.left[: self.room]] + self.left[self.room :]
        self.left = [left for left in self.left if left > 0]
        self.samples.append(len(self.left) / self.room)
        if now % REPORT_S == 0:
            self.reported = sum(self.samples) / len(self.samples)


class Fleet:
    """Verifiers under Serve's own delays. Clients ask again as soon as they are answered, after a pause of chance."""

    def __init__(
        self, config: AutoscalingConfig, start_s: float, seed: int, policy: VerifierScaling | None = None
    ) -> None:
        self.config, self.start_s, self.random = config, start_s, Random(seed)
        self.now, self.target, self.finished = 0.0, 1, 0
        self.replicas, self.leaving = [Replica(0.0, 16)], list[Replica]()
        self._state: dict[str, Any] = {}
        self._policy = policy or VerifierScaling()

    def run(self, clients: int, seconds: float) -> list[int]:
        """The targets decided on, one a tick."""
        targets = []
        for _ in range(int(seconds / TICK_S)):
            self.now += TICK_S
            self._serve(clients)
            self._scale()
            targets.append(self.target)
        return targets

    @property
    def in_flight(self) -> int:
        return sum(len(replica.left) for replica in self.replicas + self.leaving)

    def _serve(self, clients: int) -> None:
        ready = [replica for replica in self.replicas if replica.ready_at <= self.now]
        for _ in range(clients - self.in_flight):
            if ready and self.random.random() < 0.7:
                least = min(ready, key=lambda replica: len(replica.left))
                least.left.append(self.random.expovariate(1 / 20))
        for replica in ready + self.leaving:
            before = len(replica.left)
            replica.work(self.now)
            self.finished += before - len(replica.left)
        self.leaving = [replica for replica in self.leaving if replica.left]

    def _scale(self) -> None:
        ready = [replica for replica in self.replicas if replica.ready_at <= self.now]
        reports = {place: each.reported for place, each in enumerate(ready) if each.reported is not None}
        wanted, _ = self._policy(Situation(len(ready), self.target, {WORK: reports}))
        decided, self._state = _apply_delay_logic(wanted, self.target, self.config, self._state, _now=self.now)
        self.target = max(self.config.min_replicas, min(decided, self.config.max_replicas))
        self.replicas += [Replica(self.now + self.start_s, 16) for _ in range(self.target - len(self.replicas))]
        self.leaving += self.replicas[self.target :]
        del self.replicas[self.target :]


def turns(targets: list[int]) -> int:
    """How often the number went the other way."""
    steps = [after - before for before, after in pairwise(targets) if after != before]
    return sum((a > 0) != (b > 0) for a, b in pairwise(steps))


def moves(targets: list[int]) -> int:
    return sum(a != b for a, b in pairwise(targets))


@pytest.mark.parametrize("start_s", [5.0, 240.0])
@pytest.mark.parametrize("seed", range(3))
def test_replicas_follow_the_load_and_then_stay(start_s: float, seed: int) -> None:
    """Loads go up and down in steps, replicas take their time to load; no steady load turns the number twice."""
    config = AutoscalingConfig(min_replicas=1, max_replicas=8, upscale_delay_s=10, downscale_delay_s=300)
    fleet = Fleet(config, start_s, seed)
    for clients, least, most in ((8, 1, 1), (40, 3, 5), (90, 7, 8), (40, 3, 5), (8, 1, 1)):
        fleet.run(clients, 900.0)
        steady = fleet.run(clients, 1800.0)
        assert least <= steady[-1] <= most, clients
        assert turns(steady) <= 2, clients
        assert moves(steady) <= 2, clients
    assert fleet.finished > 1000


def test_no_load_lies_on_a_mark() -> None:
    """Where there was one mark for more and for fewer, chance crossed it all the time at some loads."""

    def most_turns(low: float) -> int:
        config = AutoscalingConfig(min_replicas=1, max_replicas=8, upscale_delay_s=10, downscale_delay_s=30)
        counts = []
        for clients in range(12, 60, 4):
            fleet = Fleet(config, 30.0, clients, VerifierScaling(low=low))
            fleet.run(clients, 900.0)
            counts.append(turns(fleet.run(clients, 1800.0)))
        return max(counts)

    assert most_turns(Band.low) <= 2
    assert most_turns(Band.high) > 2
