"""How deep kinds of requests may guess: in worlds of known acceptance and known prices."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.speculation import (
    PATIENCE_S,
    PROBE_EVERY,
    PROBE_S,
    DraftControl,
    DraftGuide,
    Evidence,
    Kind,
    useful_depth,
    within,
)
from drafter.base import DraftLimits
from tests.workers.test_policy import make_world
from tests.workers.worlds import memory_bound
from workers.costs import Prices
from workers.measuring.clockwork import ManualClock
from workers.stats import Speculation

KIND = Kind.of("chat", 0.0)
ALLOWED = DraftLimits(8, 1, 8)
PASS_S = 0.03


def prices(per_level: float, begin: float = 0.0) -> Prices:
    """A pass takes 30 ms, however many its rows; a draft ``begin`` and so much for each level."""
    return Prices({1: PASS_S, 16: PASS_S}, {1: {depth: begin + per_level * depth for depth in range(1, 9)}})


class World:
    """Requests of one kind, answered by an engine that goes as deep as it may and as pays; one a second."""

    def __init__(self, rates: list[float], price: Prices, seed: int = 0) -> None:
        self.rates, self.price = rates, price
        self.clock = ManualClock()
        self.control = DraftControl(ALLOWED.max_draft, self.clock)
        self.control.learn_drafter("d", price)
        self.guide = DraftGuide(self.clock)
        self.depths: list[int] = []
        self._random = Random(seed)

    def best_depth(self) -> int:
        """The depth of most tokens a second, by the truth."""
        best, most, tokens, reached = 0, 1 / PASS_S, 1.0, 1.0
        for depth, rate in enumerate(self.rates, start=1):
            reached *= rate
            tokens += reached
            speed = tokens / (PASS_S + self.price.drafting[1][depth])
            if speed > most:
                best, most = depth, speed
        return best

    def run(self, requests: int, steps: int = 50) -> None:
        for _ in range(requests):
            self.clock.now += 1
            depth = self.guide.limits(KIND, ALLOWED).max_draft
            self.depths.append(depth)
            done = Speculation()
            for _ in range(steps):
                done += self._step(depth)
            self.guide.observe(KIND, done)
            for kind, (seen, count) in self.guide.take().items():
                self.control.observe(kind, seen, count)
            self.control.decide()
            self.guide.obey(self.control.choices())

    @property
    def choice(self) -> int:
        return self.control.choices()[KIND].max_draft

    def _step(self, depth: int) -> Speculation:
        accepted = 0
        while accepted < depth and self._random.random() < self.rates[accepted]:
            accepted += 1
        tried = min(accepted + 1, depth)
        return Speculation(
            1,
            accepted + 1,
            depth,
            accepted,
            (1,) * depth,
            (1,) * accepted + (0,) * (depth - accepted),
            (1,) * tried + (0,) * (depth - tried),
        )


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.floats(0, 1), min_size=8, max_size=8),
    st.floats(0, PASS_S),
    st.floats(0, PASS_S),
    st.integers(0, 2**32),
)
def test_it_never_settles_below_the_best_depth(rates: list[float], per_level: float, begin: float, seed: int) -> None:
    world = World(rates, prices(per_level, begin), seed)
    world.run(100, steps=10)
    assert world.choice >= world.best_depth()


def test_what_never_fits_is_cut_to_nothing_after_a_while_only() -> None:
    world = World([0.01] * 8, prices(0.005))
    world.run(int(PATIENCE_S) - 5)
    assert world.choice == 8
    world.run(15)
    choice = world.control.choices()[KIND]
    assert (choice.max_draft, choice.cuts, choice.openings) == (0, 1, 0)
    assert "at depth 1 are right, which does not pay" in choice.why


def test_only_useless_depths_are_cut() -> None:
    """Two levels are good, the third never is; the fourth and those beyond were never put to the test."""
    world = World([0.9, 0.8, 0.0, 0.9, 0.9, 0.9, 0.9, 0.9], prices(0.003))
    world.run(100)
    assert world.best_depth() == world.choice == 2


def test_cheap_guesses_are_not_cut_however_bad() -> None:
    """n-grams cost next to nothing; the engine leaves them alone by itself where they are no good."""
    world = World([0.02] * 8, prices(0.00001))
    world.run(100)
    assert world.choice == 8


def test_without_prices_nothing_is_cut() -> None:
    assert useful_depth([0.0] * 8, None) == 8
    assert useful_depth([0.0] * 8, Prices({}, {})) == 8
    assert useful_depth([0.0] * 8, Prices({1: PASS_S}, {})) == 8
    assert useful_depth([0.0] * 8, Prices({}, {1: {1: 0.01}})) == 8


def test_a_large_batch_that_pays_keeps_a_depth_open() -> None:
    """Drafting for sixteen takes little longer than for one, and their pass four times as long."""
    price = Prices({1: 0.03, 16: 0.12}, {1: {1: 0.02}, 16: {1: 0.03}})
    assert useful_depth([0.2], Prices(price.verifying, {1: {1: 0.02}})) == 0
    assert useful_depth([0.2], price) == 1


@pytest.mark.parametrize("useless_for", [60, 600])
def test_it_recovers_when_guesses_become_good(useless_for: int) -> None:
    """Also when nothing is guessed any more, since some requests go on trying; and it is opened at once."""
    world = World([0.0] * 8, prices(0.005))
    world.run(useless_for)
    assert world.choice == 0
    world.rates = [0.9] * 8
    world.run(3 * PROBE_EVERY)
    assert world.choice == 8
    assert world.depths[-5:] == [8] * 5


@pytest.mark.parametrize(("p", "per_level"), [(0.0, 0.003), (0.9, 0.012)])
def test_an_engine_that_weighs_each_step_loses_nothing_by_it(p: float, per_level: float) -> None:
    """Promise 3 holds with both scales at work, and where guesses never fit, the slow one spares the probes."""
    speeds: list[float] = []
    for slow_scale in (False, True):
        world = make_world(memory_bound, p, per_level, 8, adaptive=True)
        control, guide = DraftControl(8, world.clock), DraftGuide(world.clock)
        tokens, seconds = 0, 0.0
        for _ in range(5):
            world.clock.now += PATIENCE_S
            limits = [guide.limits(KIND, ALLOWED) if slow_scale else ALLOWED for _ in range(2)]
            requests = [replace(each, limits=limit) for each, limit in zip(world.requests(2, 60), limits, strict=True)]
            began = world.clock()
            results = world.engine.run(requests)
            tokens, seconds = tokens + 2 * 60, seconds + world.clock() - began
            control.learn_drafter("d", world.engine.costs.prices())
            for result in results:
                control.observe(KIND, result.usage)
            control.decide()
            guide.obey(control.choices())
        speeds.append(tokens / seconds)
    assert speeds[1] >= 0.99 * speeds[0]


def test_it_does_not_swing() -> None:
    """A rate beside the threshold: half an hour of it brings a few changes, not hundreds."""
    world = World([0.083] * 8, prices(0.005), seed=3)
    world.run(1800, steps=5)
    choice = world.control.choices()[KIND]
    assert choice.cuts + choice.openings < 20


def test_another_drafter_begins_anew() -> None:
    world = World([0.0] * 8, prices(0.005))
    world.run(60)
    assert world.choice == 0
    world.control.learn_drafter("another", prices(0.005))
    assert world.control.choices() == {}
    world.guide.obey(world.control.choices())
    assert world.guide.limits(KIND, ALLOWED) == ALLOWED


def test_kinds_are_judged_apart() -> None:
    control = DraftControl(8)
    control.observe(Kind.of("chat", 0.0), Speculation())
    control.observe(Kind.of("completions", 1.0), Speculation())
    assert set(control.choices()) == {("chat", "zero"), ("completions", "warm")}
    assert Kind.of("chat", 0.7).temperature == "cool"


def test_one_request_in_some_goes_further_and_one_now_and_then_in_any_case() -> None:
    clock = ManualClock()
    control, guide = DraftControl(8, clock), DraftGuide(clock)
    control.learn_drafter("d", prices(0.005))
    for _ in range(40):
        clock.now += 1
        control.observe(KIND, Speculation(100, 100, 800, 0, (100,) * 8, (0,) * 8, (100,) + (0,) * 7))
        control.decide()
    guide.obey(control.choices())
    depths = [guide.limits(KIND, ALLOWED).max_draft for _ in range(10 * PROBE_EVERY)]
    assert (depths.count(8), depths.count(0), guide.probes) == (10, 10 * (PROBE_EVERY - 1), 10)
    clock.now += PROBE_S
    assert guide.limits(KIND, ALLOWED) == ALLOWED


def test_a_request_that_wants_less_gets_less() -> None:
    guide = DraftGuide(ManualClock())
    assert guide.limits(KIND, DraftLimits(1, 2, 8)) == DraftLimits(1, 2, 8)
    assert within(DraftLimits(5, 2, 8), 9) == DraftLimits(5, 2, 8)
    assert within(DraftLimits(5, 2, 8), 2) == DraftLimits(2, 2, 6)
    assert within(DraftLimits(5, 1, 5), 3) == DraftLimits(3, 1, 3)
    assert within(DraftLimits(5, 2, 8), 0) == DraftLimits(0, 2, 0)


def test_evidence_fades_by_what_comes_after_it() -> None:
    evidence = Evidence()
    assert evidence.at_most(1) == 1.0
    evidence.add(Speculation(1000, 1000, 1000, 0, (1000,), (0,), (1000,)))
    assert evidence.at_most(1) < 0.02
    assert evidence.at_most(2) == 1.0
    evidence.add(Speculation(1000, 2000, 1000, 1000, (1000,), (1000,), (1000,)))
    assert 0.7 < evidence.rates[0] < evidence.at_most(1)
