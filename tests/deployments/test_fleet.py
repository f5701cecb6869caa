"""Who gets an attempt, from what replicas say and what became of earlier ones."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from deployments.fleet import QUIET_S, Fleet, Placement, Report
from verifier.sampling import SamplingParams
from workers.measuring.clockwork import ManualClock
from workers.sequence import Request

REQUEST = Request("r", tuple(range(200)), SamplingParams(), 10)
OTHER = replace(REQUEST, id="o", prompt_ids=tuple(range(1000, 1200)))


def fleet_of(names: str = "ab", clock: ManualClock | None = None) -> Fleet:
    fleet = Fleet(clock or ManualClock())
    fleet.update(reports(names))
    return fleet


def reports(names: str) -> list[Report]:
    return [Report(name, "fake|1", max_running=16, free_tokens=10_000) for name in names]


def chosen(fleet: Fleet, request: Request, placement: Placement | None = None, names: str = "ab") -> str | None:
    return fleet.choose(request, placement or Placement(), names)


def test_requests_spread_and_follow_their_beginnings() -> None:
    fleet = fleet_of()
    first, second = chosen(fleet, REQUEST), chosen(fleet, OTHER)
    assert {first, second} == {"a", "b"}
    assert [chosen(fleet, REQUEST), chosen(fleet, OTHER)] == [first, second]


def test_a_second_turn_follows_the_answer_to_the_first() -> None:
    """Though the first prompt alone was too short to count."""
    fleet, placement = fleet_of(), Placement()
    short = replace(REQUEST, prompt_ids=(1, 2, 3))
    where = chosen(fleet, short, placement)
    answer = tuple(range(100, 300))
    placement.end(short, answer)
    turn = replace(REQUEST, prompt_ids=(*short.prompt_ids, *answer, 5, 6))
    assert [chosen(fleet, turn) for _ in range(3)] == [where] * 3


def test_an_attempt_avoids_those_it_has_failed_on_while_there_are_others() -> None:
    fleet = fleet_of()
    avoid = Placement(avoid=frozenset("a"))
    assert chosen(fleet, REQUEST, avoid) == "b"
    assert fleet.can_place(avoid, settled=False)
    fleet.update(reports("a"))
    assert not fleet.can_place(avoid, settled=False)
    assert fleet.can_place(avoid, settled=True)
    assert chosen(fleet, REQUEST, Placement(avoid=frozenset("a")), "a") == "a"


def test_one_that_cannot_be_reached_is_followed_by_the_next() -> None:
    fleet, placement = fleet_of("abc"), Placement()
    assert {chosen(fleet, REQUEST, placement, "abc") for _ in range(3)} == set("abc")
    assert chosen(fleet, REQUEST, placement, "abc") in tuple("abc")


def test_a_replica_that_has_fallen_silent_is_sent_nothing_new() -> None:
    clock = ManualClock()
    fleet, placement = fleet_of(clock=clock), Placement()
    silent = chosen(fleet, REQUEST, placement)
    clock.now = QUIET_S + 1
    assert chosen(fleet, REQUEST) != silent
    placement.heard()
    again = Placement()
    assert chosen(fleet, REQUEST, again) == silent
    for ended in (placement, again):
        ended.end(REQUEST, ())
    clock.now *= 3
    assert chosen(fleet, REQUEST) == silent, "one that has nothing to do may be silent"


def test_a_broken_replica_gets_nothing_any_more() -> None:
    fleet = fleet_of()
    fleet.condemn("a")
    assert [chosen(fleet, REQUEST) for _ in range(2)] == ["b", "b"]
    fleet.condemn("b")
    assert chosen(fleet, REQUEST) is None
    assert not fleet.can_place(Placement(), settled=True)


@pytest.mark.parametrize(("wanted", "name"), [("", "a"), ("fake|", "a"), ("fake|2", "b"), ("other|", None)])
def test_fingerprints_must_begin_as_wished(wanted: str, name: str | None) -> None:
    fleet = Fleet(ManualClock())
    fleet.update([Report("a", "fake|1"), Report("b", "fake|2", requests=5)])
    placement = Placement(wanted)
    assert chosen(fleet, REQUEST, placement) == name
    assert fleet.can_place(placement, settled=False) == (name is not None)


def test_attempts_learn_that_their_replica_is_to_stop() -> None:
    fleet, placement = fleet_of(), Placement()
    where = chosen(fleet, REQUEST, placement)
    fleet.update(reports("ab".replace(str(where), "")))
    assert placement.leaving
    assert chosen(fleet, REQUEST) != where


def test_a_placement_travels_light() -> None:
    fleet, placement = fleet_of(), Placement(avoid=frozenset("a"))
    chosen(fleet, REQUEST, placement)
    assert len(pickle.dumps(placement)) < 100
    assert pickle.loads(pickle.dumps(placement)).replica is None
