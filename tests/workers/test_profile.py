"""What is measured before the first request, and that nothing stays behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fakes import FAKE_MODEL, FakeVerifier
from verifier.batch import StepPlan
from verifier.pages import PageTable
from workers.costs import Costs, Work
from workers.measuring.clockwork import ManualClock
from workers.profile import profile


def measure(num_pages: int, page_size: int, max_positions: int = 4096) -> tuple[Costs, PageTable, list[StepPlan]]:
    verifier, clock = FakeVerifier(num_pages, page_size, max_rows=32), ManualClock()
    verifier.config = replace(FAKE_MODEL, max_positions=max_positions)

    def take_time(plan: StepPlan) -> None:
        (segment,) = plan.segments
        keys = 2e-4 * segment.start + 1e-5 * plan.num_rows * segment.start
        clock.now += 1.0 + 0.1 * plan.num_rows - 0.02 * segment.scored_from + keys

    verifier.on_forward = take_time
    pages, costs = PageTable(num_pages, page_size), Costs(verifier.padded, verifier.max_rows)
    profile(verifier, pages, costs, clock)
    return costs, pages, verifier.plans


def test_prices_are_those_of_the_machine() -> None:
    costs, pages, _ = measure(300, 16)
    assert costs.verifying(Work(6)) == pytest.approx(1.6)
    assert costs.verifying(Work(18)) == pytest.approx(2.8)
    assert costs.verifying(Work(6, unscored=5)) == pytest.approx(1.5)
    assert costs.verifying(Work(6, 0, 2000, 6000)) == pytest.approx(1.6 + 0.4 + 0.06)
    assert pages.num_used == 0
    pages.check_integrity([])


@pytest.mark.parametrize(("num_pages", "max_positions"), [(2, 4096), (300, 40), (300, 20)])
def test_small_pools_and_short_models_are_measured_within_their_limits(num_pages: int, max_positions: int) -> None:
    """A model of 512 positions was asked for its 2048th while it was loaded."""
    _, _, plans = measure(num_pages, 16, max_positions)
    ends = [segment.start + len(segment.tree) for plan in plans for segment in plan.segments]
    assert max(ends) <= min(num_pages * 16, max_positions)
