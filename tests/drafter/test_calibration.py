"""Shares become probabilities: what is learnt, how fast it is unlearnt, and what always holds."""

from __future__ import annotations

import json
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.calibration import KNOTS, NUM_DEPTHS, Calibration, Curve, Kind

SHARES = st.floats(0, 1)


def learn(curve: Curve, share: float, truth: float, times: int, seed: int = 0) -> None:
    random = Random(seed)
    for _ in range(times):
        curve.observe(share, random.random() < truth)


@given(SHARES)
def test_a_drafter_is_believed_until_outcomes_are_known(share: float) -> None:
    assert Curve()(share) == pytest.approx(share)


@given(st.lists(st.tuples(SHARES, st.booleans()), max_size=200), st.lists(SHARES, min_size=2))
def test_a_curve_never_falls_and_stays_a_probability(outcomes: list[tuple[float, bool]], shares: list[float]) -> None:
    curve = Curve()
    for share, accepted in outcomes:
        curve.observe(share, accepted)
    values = [curve(share) for share in sorted(shares)]
    assert all(low <= high + 1e-12 for low, high in pairwise(values))
    assert all(0 <= value <= 1 for value in values)


@pytest.mark.parametrize("truth", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("share", [0.0, 0.07, 0.5, 0.96, 1.0])
def test_what_a_share_is_worth_is_learnt(share: float, truth: float) -> None:
    """To within a bit more than three standard deviations, at 0.5, of the last outcomes that count."""
    curve = Curve()
    learn(curve, share, truth, 600)
    assert curve(share) == pytest.approx(truth, abs=0.12)


def test_a_curve_is_learnt_over_all_shares() -> None:
    """A drafter that overrates all of its guesses, as those do that were trained on other texts."""
    random, curve = Random(1), Curve()
    for _ in range(6000):
        share = random.random()
        curve.observe(share, random.random() < share**2)
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        assert curve(share) == pytest.approx(share**2, abs=0.1)


def test_a_drafter_that_turns_bad_and_good_again_is_found_out_both_times() -> None:
    curve = Curve()
    for truth in (0.8, 0.05, 0.8):
        learn(curve, 0.6, truth, 600)
        assert curve(0.6) == pytest.approx(truth, abs=0.12)


def test_shares_that_contradict_one_another_are_taken_together() -> None:
    """Where guesses with a greater share came true less often, neither is preferred."""
    curve = Curve()
    learn(curve, 0.2, 0.7, 600)
    learn(curve, 0.5, 0.3, 600)
    assert curve(0.2) == curve(0.5) == pytest.approx(0.5, abs=0.1)


def test_kinds_are_judged_apart_and_great_depths_together() -> None:
    calibration = Calibration()
    for _ in range(100):
        calibration.observe(Kind("head", False, NUM_DEPTHS + 1), 0.5, False)
    for other in (Kind("ngram", False, NUM_DEPTHS), Kind("head", True, NUM_DEPTHS), Kind("head", False, 1)):
        assert calibration.estimate(other, 0.5) == 0.5
    assert calibration.estimate(Kind("head", False, NUM_DEPTHS), 0.5) < 0.1
    assert calibration.estimate(Kind("head", False, NUM_DEPTHS + 7), 0.5) < 0.1


def test_what_was_learnt_can_be_told_in_plain_numbers() -> None:
    calibration = Calibration()
    calibration.observe(Kind("head", False, 1), KNOTS[6], True)
    (learnt,) = json.loads(json.dumps(calibration.numbers()))
    assert (learnt["who"], learnt["sampled"], learnt["depth"]) == ("head", False, 1)
    assert learnt["accepted"] == learnt["seen"] == [float(knot == 6) for knot in range(len(KNOTS))]
