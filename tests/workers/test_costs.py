"""Prices follow what is measured, and what has not been measured looks worth a try."""

from __future__ import annotations

import pytest

from workers.costs import MEMORY, WELL_KNOWN, Costs, Work


def make_costs(**seconds_by_rows: float) -> Costs:
    costs = Costs(lambda rows: rows if rows != 2 else 3, max_rows=64)
    for name, seconds in seconds_by_rows.items():
        costs.observe_verifying(Work(int(name[1:])), seconds)
    return costs


def test_nothing_is_known_at_first() -> None:
    costs = make_costs()
    assert costs.verifying(Work(5, 0, 100, 1000)) == 0.0
    assert costs.drafting(3, 4) == 0.0


def test_a_pass_costs_what_its_padded_rows_cost() -> None:
    costs = make_costs(r1=1.0, r3=2.0)
    assert costs.verifying(Work(2)) == costs.verifying(Work(3)) == 2.0


def test_unmeasured_counts_lie_on_a_line_or_beyond_it_level() -> None:
    costs = make_costs(r4=2.0, r8=4.0)
    assert [costs.verifying(Work(rows)) for rows in (1, 4, 5, 7, 8, 60)] == pytest.approx(
        [2.0, 2.0, 2.5, 3.5, 4.0, 4.0]
    )


def test_more_rows_than_a_pass_takes_are_priced_like_the_most() -> None:
    costs = Costs([0, 1, 2, 3].__getitem__, max_rows=3)
    costs.observe_verifying(Work(3), 2.0)
    assert costs.verifying(Work(9)) == 2.0


def test_keys_are_read_once_for_all_rows_of_a_sequence_and_attended_to_by_each() -> None:
    """Reading was left out: with a long context every price was found to be wrong, and that of one row count most."""
    costs = make_costs(r1=1.0, r4=2.0)
    costs.learn_keys(1000, 1.0 + 1000 * 0.002 + 1000 * 0.0001, 4, 2.0 + 1000 * 0.002 + 4000 * 0.0001)
    assert costs.verifying(Work(4, 0, 2000, 8000)) == pytest.approx(2.0 + 4.0 + 0.8)
    assert costs.verifying(Work.of_roots(4, 500)) == pytest.approx(2.0 + 4.0 + 0.2)
    costs.observe_verifying(Work(8, 0, 1000, 8000), 6.8)
    assert costs.verifying(Work(8)) == pytest.approx(4.0), "of a count first seen with keys, they are taken off"


def test_rows_that_nothing_is_drawn_after_are_cheaper() -> None:
    """Guesses looked as cheap as prompts, whose rows have no use for the vocabulary."""
    costs = make_costs(r4=2.0)
    costs.learn_unscored(4, 1.4)
    assert costs.verifying(Work(4, unscored=3)) == pytest.approx(1.4)
    assert costs.verifying(Work(4)) == 2.0
    costs.observe_verifying(Work(8, unscored=5), 3.0)
    assert costs.verifying(Work(8)) == pytest.approx(4.0), "of a count first seen with them, they are added"


def test_passes_over_keys_or_without_draws_that_were_slow_or_quick_by_chance_make_no_negative_price() -> None:
    costs = make_costs(r1=1.0, r4=2.0)
    costs.learn_keys(1000, 0.9, 4, 1.0)
    costs.learn_unscored(4, 3.0)
    assert costs.verifying(Work(4, 4, 1000, 4000)) == 2.0
    costs.learn_keys(1000, 1.1, 4, 9.0)
    assert costs.verifying(Work(1, read=1000)) == 1.0


def test_a_lasting_change_is_followed_and_shared_by_other_counts() -> None:
    costs = make_costs(r1=1.0, r8=2.0)
    for _ in range(60):
        costs.observe_verifying(Work(1), 3.0)
    assert costs.verifying(Work(1)) == pytest.approx(3.0, rel=0.01)
    assert costs.verifying(Work(8)) > 3.0, "a machine that has become slow is slow for all"


def test_a_hiccup_is_no_price() -> None:
    costs = make_costs(r1=1.0)
    costs.observe_verifying(Work(1), 100.0)
    assert costs.verifying(Work(1)) < 1.2


def test_drafting_is_priced_by_depth_and_batch() -> None:
    costs = make_costs()
    costs.observe_drafting(2, 1, 0.2)
    assert costs.drafting(4, 1) == pytest.approx(0.4), "in proportion to a measured depth"
    assert costs.drafting(2, 16) == pytest.approx(0.2), "like the nearest smaller batch"
    costs.observe_drafting(4, 1, 0.3)
    costs.observe_drafting(2, 9, 1.0)
    assert costs.drafting(4, 1) == pytest.approx(0.3)
    assert costs.drafting(2, 16) == pytest.approx(1.0)
    assert costs.drafting(0, 4) == costs.drafting(4, 0) == 0.0


def test_what_is_measured_again_and_again_counts_for_more_than_bounds() -> None:
    """A shallower depth had been priced too low once; deeper drafts took longer than that allowed."""
    costs = make_costs()
    costs.observe_drafting(3, 16, 0.01)
    for _ in range(100):
        costs.observe_drafting(4, 16, 0.064)
    assert costs.drafting(4, 16) == pytest.approx(0.064, rel=0.02)


def test_a_part_of_a_batch_may_cost_its_part() -> None:
    costs = make_costs()
    costs.observe_drafting(2, 8, 0.8)
    assert costs.drafting(2, 4) == pytest.approx(0.4)
    costs.observe_drafting(2, 1, 0.6)
    assert costs.drafting(2, 4) == pytest.approx(0.6), "no less than fewer do"


def test_a_depth_that_was_slow_by_chance_at_first_is_tried_again() -> None:
    """Its first price stayed, since at that price nobody drafted so deep any more."""
    costs = make_costs()
    costs.observe_drafting(5, 1, 3.0)
    costs.observe_drafting(1, 1, 0.01)
    assert costs.drafting(5, 1) == pytest.approx(0.05)
    assert costs.drafting(4, 1) == pytest.approx(0.04)


def test_a_drafter_that_has_become_slow_is_slow_at_every_depth() -> None:
    """Each depth had to be found out by itself, at the drafter's new price every time."""
    costs = make_costs()
    costs.observe_drafting(1, 1, 0.01)
    costs.observe_drafting(3, 4, 0.02)
    for _ in range(60):
        costs.observe_drafting(1, 1, 0.5)
    assert costs.drafting(1, 1) == pytest.approx(0.5, rel=0.01)
    assert costs.drafting(3, 4) > 0.1


def test_reading_is_priced_by_the_token() -> None:
    costs = make_costs()
    assert costs.reading(100) == 0.0
    costs.observe_drafting(1, 1, 0.1)
    costs.observe_reading(1, 1, 100, 0.3)
    assert costs.reading(1000) == pytest.approx(2.0)
    for _ in range(60):
        costs.observe_reading(1, 1, 50, 0.3)
    assert costs.reading(100) == pytest.approx(0.4, rel=0.01)


def test_what_many_drafts_take_is_not_taken_for_the_price_of_reading() -> None:
    """It was wherever many began at once, and was believed for thousands of steps, in which they were not asked."""
    costs = make_costs()
    costs.observe_drafting(1, 1, 0.001)
    costs.observe_reading(1, 16, 1000, 0.036)
    assert costs.reading(1000) == pytest.approx(0.035), "a guess, for want of better"
    costs.observe_reading(1, 1, 100, 0.003)
    assert costs.reading(1000) == pytest.approx(0.020), "told by what is known"
    costs.observe_reading(1, 1, 100, 0.011)
    assert costs.reading(1000) < 0.022, "and no guess any more"


def test_a_guess_may_be_wrong_by_much_but_no_hiccup_makes_it_so_again() -> None:
    costs = make_costs()
    costs.observe_reading(1, 1, 100, 0.001)
    costs.observe_reading(1, 1, 100, 1.0)
    assert costs.reading(100) == pytest.approx(0.002)
    costs.observe_drafting(1, 1, 0.0)
    for _ in range(12):
        costs.observe_reading(1, 1, 100, 1.0)
    assert costs.reading(100) == pytest.approx(1.0, rel=0.1)


def test_another_drafter_reads_at_a_price_of_its_own() -> None:
    costs = make_costs()
    costs.observe_drafting(1, 1, 0.001)
    costs.observe_reading(1, 1, 100, 1.0)
    costs.forget_drafting()
    assert costs.reading(100) == 0.0


def test_a_clock_that_stands_still_or_goes_back_makes_no_price_that_cannot_be_corrected() -> None:
    costs = make_costs(r1=0.0)
    costs.observe_drafting(1, 1, -1.0)
    costs.observe_reading(1, 1, 10, -1.0)
    for _ in range(400):
        costs.observe_verifying(Work(1), 1.0)
        costs.observe_drafting(1, 1, 1.0)
        costs.observe_reading(1, 1, 10, 2.0)
    assert (costs.verifying(Work(1)), costs.drafting(1, 1), costs.reading(10)) == pytest.approx((1, 1, 1), rel=0.01)


def test_what_is_hardly_known_is_learnt_soon() -> None:
    """A price that was wrong when it was measured first stayed so for dozens of passes."""
    costs = make_costs(r1=1.0, r8=2.0)
    for _ in range(3):
        costs.observe_verifying(Work(8), 1.2)
    assert costs.verifying(Work(8)) == pytest.approx(1.2, rel=0.1)
    assert costs.verifying(Work(1)) > 0.85, "that says little about others"


def test_a_count_between_others_is_no_worse_known_than_by_them() -> None:
    """One that was seen first in a quick pass looked cheap, and was taken from then on."""
    costs = make_costs(r1=1.0, r8=2.4, r16=4.0)
    costs.observe_verifying(Work(12), 1.8)
    assert 2.2 < costs.verifying(Work(12)) < 3.0


def test_what_is_hardly_known_or_was_long_ago_may_cost_less() -> None:
    costs = make_costs(r1=1.0, r8=2.0)
    assert costs.verifying_at_best(Work(8)) < 0.75 * 2.0
    for _ in range(WELL_KNOWN):
        costs.observe_verifying(Work(8), 2.0)
    assert costs.verifying_at_best(Work(8)) == pytest.approx(2.0, rel=0.01)
    for _ in range(3 * MEMORY):
        costs.observe_verifying(Work(1), 1.0)
    assert costs.verifying_at_best(Work(8)) < 0.75 * 2.0
    assert costs.verifying_at_best(Work(1)) == pytest.approx(1.0, rel=0.01)
