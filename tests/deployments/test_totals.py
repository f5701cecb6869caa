"""Figures of several engines, some of which are lost."""

from __future__ import annotations

from dataclasses import replace

from deployments.totals import Totals
from tests.deployments.fakes import IDLE, busy_stats
from workers.stats import RemoteFigures

REMOTE = replace(busy_stats(), remote=RemoteFigures(connected=True, reason="", asked=5))


def test_all_numbers_add_up() -> None:
    one = busy_stats()
    two = Totals().update({"a": one, "b": busy_stats()})
    assert (two.running, two.pages_total, two.counters.steps) == (4, 128, 24)
    assert two.counters.speculation == one.counters.speculation + one.counters.speculation
    assert two.counters.finished == {reason: 2 * count for reason, count in one.counters.finished.items()}
    assert Totals().update({"a": one}) == one
    assert two.prices == one.prices, "what one pass takes is no sum"


def test_an_engine_that_is_gone_takes_no_counts_along() -> None:
    """A sum that fell would look to Prometheus like a service that had started anew."""
    totals = Totals()
    totals.update({"a": busy_stats(), "b": busy_stats()})
    left = totals.update({"b": IDLE})
    assert (left.running, left.pages_used, left.pages_total) == (0, 0, IDLE.pages_total)
    assert left.counters.steps == busy_stats().counters.steps
    assert totals.update({"b": IDLE}) == left
    assert left.prices is None


def test_drafters_are_connected_if_all_are() -> None:
    lost = replace(REMOTE, remote=RemoteFigures(connected=False, reason="no answer", asked=2))
    totals = Totals()
    remote = totals.update({"a": REMOTE, "b": lost}).remote
    assert remote is not None
    assert (remote.connected, remote.reason, remote.asked) == (False, "no answer", 7)
    remote = totals.update({"a": REMOTE}).remote
    assert remote is not None
    assert (remote.connected, remote.reason, remote.asked) == (True, "", 7)
