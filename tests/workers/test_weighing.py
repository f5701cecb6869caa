"""Which form a step takes, and that prices which are wrong do not stay so for want of being looked at."""

from __future__ import annotations

import pytest

from tests.workers.worlds import World, by_level
from workers.costs import WELL_KNOWN, Costs, Work
from workers.forms import Drafters, Form
from workers.policy import Load
from workers.weighing import MOST_SAVED, TRIAL_INTERVAL, TRIAL_SHARE, Weighing

PLAIN, DEAR = Form(0.0, 0, 0.0), Form(1.0, 1, 0.0)
NOBODY = Drafters((), 0)
FORMS = {PLAIN: NOBODY, DEAR: NOBODY}
ALONE = Load(1, Work(1), 0)


def costs_of(**seconds_by_rows: float) -> Costs:
    """Of which the plain pass is known for certain."""
    costs = Costs(lambda rows: rows, max_rows=8)
    for name, seconds in seconds_by_rows.items():
        costs.observe_verifying(Work(int(name[1:])), seconds)
    for _ in range(WELL_KNOWN + 1):
        costs.observe_verifying(Work(1), seconds_by_rows["r1"])
    return costs


def steps(weighing: Weighing, costs: Costs, load: Load, count: int, true_s: dict[int, float]) -> int:
    """Takes so many steps; returns how many of them were dear."""
    trials = 0
    for _ in range(count):
        weighing.before_drafts(FORMS, load)
        form = weighing.after_drafts(list(FORMS), load)
        trials += form == DEAR
        costs.observe_verifying(load.work.with_guesses(form.rows, 0), true_s[load.work.rows + form.rows])
    return trials


def test_a_row_count_that_is_held_to_be_too_dear_is_tried_and_taken() -> None:
    costs = costs_of(r1=1.0, r2=2.2)
    weighing = Weighing(costs, max_stretch=100.0)
    steps(weighing, costs, ALONE, 300, {1: 1.0, 2: 1.6})
    assert costs.verifying(Work(2)) == pytest.approx(1.6, rel=0.1)
    assert steps(weighing, costs, ALONE, 100, {1: 1.0, 2: 1.6}) >= 90


@pytest.mark.parametrize("seconds", [2.1, 2.5])
def test_trials_lose_a_small_share_of_the_time(seconds: float) -> None:
    costs = costs_of(r1=1.0, r2=seconds)
    weighing = Weighing(costs, max_stretch=100.0)
    trials = steps(weighing, costs, ALONE, 4000, {1: 1.0, 2: seconds})
    lost = trials * (seconds - 2.0)  # two tokens take two seconds anyway
    assert 0 < lost <= 1.1 * (TRIAL_SHARE * 4000 + MOST_SAVED)


def test_what_cannot_be_the_best_is_not_tried() -> None:
    costs = costs_of(r1=1.0, r2=3.1)
    assert not steps(Weighing(costs, max_stretch=100.0), costs, ALONE, 1000, {1: 1.0, 2: 3.1})


def test_the_bound_holds_for_trials_too() -> None:
    costs = costs_of(r1=1.0, r2=2.2)
    assert not steps(Weighing(costs, max_stretch=2.1), costs, ALONE, 1000, {1: 1.0, 2: 2.2})


@pytest.mark.parametrize("load", [Load(1, Work(2), 0), Load(1, Work(1), 0, lanes=2)])
def test_steps_that_tell_nothing_about_a_row_count_are_no_trials(load: Load) -> None:
    """Chunks of prompts take rows of their own; in two lanes passes are not timed."""
    costs = costs_of(r1=1.0, r2=2.2, r3=3.4)
    assert not steps(Weighing(costs, max_stretch=100.0), costs, load, 1000, {1: 1.0, 2: 2.2, 3: 3.4})


def test_a_step_in_which_nobody_decodes_is_no_trial() -> None:
    """As where all that did have just ended: a token had no worth, and was divided by."""
    weighing = Weighing(costs_of(r1=1.0, r2=2.2), max_stretch=100.0)
    for _ in range(2 * TRIAL_INTERVAL):
        assert weighing.before_drafts(FORMS, Load(0, Work(0), 0)) in FORMS


def test_what_is_saved_does_not_grow_for_ever() -> None:
    """A day without trials would be followed by an hour of them."""
    costs = costs_of(r1=1.0, r2=9.0)
    weighing = Weighing(costs, max_stretch=100.0)
    assert not steps(weighing, costs, ALONE, 20_000, {1: 1.0, 2: 9.0})
    assert weighing._saved <= MOST_SAVED


def test_a_trial_that_is_not_asked_for_in_the_end_costs_nothing_after_it() -> None:
    costs = costs_of(r1=1.0, r2=2.2)
    weighing = Weighing(costs, max_stretch=100.0)
    for _ in range(50 * TRIAL_INTERVAL):
        if weighing.before_drafts(FORMS, ALONE) == DEAR:
            break
    assert weighing.after_drafts([PLAIN], ALONE) == PLAIN
    assert weighing.before_drafts(FORMS, ALONE) == PLAIN
    assert weighing.after_drafts(list(FORMS), ALONE) == PLAIN


@pytest.mark.parametrize("wrong", [1.4, 1.7])
def test_an_engine_that_was_slow_while_it_was_measured_finds_its_depth(wrong: float) -> None:
    """Where passes over many rows were held to be too dear, it never guessed deeper: 0.78 of what depth 3 brings."""

    def price(rows: int) -> float:
        return 0.05 + 0.0012 * rows

    def tokens_per_s(*, adaptive: bool) -> float:
        world = World.measured(
            lambda rows: price(rows) * (wrong if rows > 24 else 1.0),
            p=0.9,
            drafting=by_level(0.0),
            depth=3,
            adaptive=adaptive,
            padded=lambda rows: -(-rows // 12) * 12,
        )
        world.price = price
        world.tokens_per_s(12, 60)
        return world.tokens_per_s(12, 120)

    assert tokens_per_s(adaptive=True) >= 0.95 * tokens_per_s(adaptive=False)
