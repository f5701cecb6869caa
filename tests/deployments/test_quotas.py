"""Limits and their parts, on a clock that tests move: nothing drifts, and replicas never exceed a limit together."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.admission import SERVICE, Admission, Ticket
from deployments.aggregator import GONE_S, LISTEN_S, Aggregator, Report
from deployments.errors import ApiError
from deployments.keys import ANYBODY, ApiKey, KeyLimits
from deployments.quotas import MINUTE_S, Part, QuotaId, RoomMeter, Window
from workers.measuring.clockwork import ManualClock

PER_MINUTE = ApiKey("a", KeyLimits(requests_per_minute=6))


def admits(admission: Admission, key: ApiKey, num_prompt: int = 1) -> bool:
    try:
        admission.admit(key, num_prompt).close()
    except ApiError:
        return False
    return True


def refusal(admission: Admission, key: ApiKey = ANYBODY) -> ApiError:
    with pytest.raises(ApiError) as caught:
        admission.admit(key, 1)
    error = caught.value
    assert (error.status, error.body["error"]["type"]) == (429, "rate_limit_error")  # type: ignore[index]
    return error


def retry_after(error: ApiError) -> int:
    assert error.headers is not None
    return int(error.headers["Retry-After"])


class Replicas:
    """Ingress replicas with an aggregator on one clock."""

    def __init__(self, count: int, capacity: int = 100) -> None:
        self.clock = ManualClock()
        self.gates = [Admission(capacity, count, self.clock) for _ in range(count)]
        self.aggregator = Aggregator(count, 8, self.clock)

    def exchange(self, number: int, *, answered: bool = True) -> None:
        decisions = self.aggregator.exchange(Report(f"{number}", self.gates[number].uses()))
        if answered:
            self.gates[number].obey(decisions.parts)

    def settle(self, seconds: float = 2 * LISTEN_S) -> None:
        for _ in range(int(seconds)):
            self.clock.now += 1
            for number in range(len(self.gates)):
                self.exchange(number)

    def allowed(self, quota: QuotaId) -> list[int]:
        return [gate.uses()[quota].allowed for gate in self.gates]


# ── one replica ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_minute_slides() -> None:
    clock = ManualClock()
    window = Window(clock)
    for second in (0, 10, 20):
        clock.now = second
        window.add(2)
    assert (window.total, window.until_below(6), window.until_below(3)) == (6, 40, 50)
    clock.now = MINUTE_S - 0.001
    assert window.total == 6
    clock.now = MINUTE_S
    assert window.total == 4
    clock.now = 1000
    assert window.total == 0


def test_a_window_keeps_no_more_than_a_minute_of_what_nobody_asks_for() -> None:
    """A service that was never full kept the end of every request it had ever served."""
    clock = ManualClock()
    meter = RoomMeter(Part(10, 10, 0), clock)
    for _ in range(1000):
        clock.now += 1
        meter.enter()
        meter.leave()
    assert len(meter.ended) == MINUTE_S


def test_a_rate_neither_drifts_nor_bursts_over_its_limit() -> None:
    """In no minute more than the limit, and over a quarter of an hour of asking all the time hardly one less."""
    clock = ManualClock()
    admission = Admission(100, clock=clock)
    times: list[float] = []
    random = Random(0)
    while clock.now < 900:
        clock.now += random.random() / 3
        if admits(admission, PER_MINUTE):
            times.append(clock.now)
    assert all(late - early >= MINUTE_S for early, late in zip(times, times[6:], strict=False))
    assert len(times) >= 6 * 14


def test_the_wait_is_the_time_until_there_is_room() -> None:
    clock = ManualClock()
    admission = Admission(100, clock=clock)
    for second in range(6):
        clock.now = second * 5
        assert admits(admission, PER_MINUTE)
    clock.now = 30.5
    error = refusal(admission, PER_MINUTE)
    assert (error.code, retry_after(error)) == ("rate_limit_exceeded", 30)
    assert "6 requests a minute; try again in 30 seconds." in error.message
    clock.now += 29
    assert not admits(admission, PER_MINUTE)
    clock.now += 1
    assert admits(admission, PER_MINUTE)


def test_tokens_count_when_they_are_known() -> None:
    """A prompt at once, an answer at its end; what went beyond the limit is waited off."""
    clock = ManualClock()
    admission = Admission(100, clock=clock)
    key = ApiKey("a", KeyLimits(tokens_per_minute=100))
    ticket = admission.admit(key, 60)
    ticket.num_written = 500
    assert admits(admission, key, 10)
    clock.now = 30
    ticket.close()
    ticket.close()
    assert "100 tokens a minute" in refusal(admission, key).message
    clock.now = 30 + MINUTE_S
    assert admits(admission, key)


def test_a_prompt_above_the_limit_is_served_when_there_is_room_at_all() -> None:
    """It could never be served otherwise, and would be told to come back for ever."""
    clock = ManualClock()
    admission = Admission(100, clock=clock)
    key = ApiKey("a", KeyLimits(tokens_per_minute=100))
    assert admits(admission, key, 1000)
    assert not admits(admission, key, 1)
    clock.now = MINUTE_S
    assert admits(admission, key, 1000)


def test_requests_at_a_time_leave_room_when_they_end() -> None:
    admission = Admission(100, clock=ManualClock())
    key = ApiKey("a", KeyLimits(concurrent=2))
    tickets = [admission.admit(key, 1) for _ in range(2)]
    assert "2 requests at a time" in refusal(admission, key).message
    assert admits(admission, ANYBODY), "others have their own room"
    tickets[0].close()
    assert admits(admission, key)
    tickets[1].close()
    assert admission.num_admitted == 0


def test_a_full_service_tells_times_by_what_it_measures() -> None:
    """An end every two seconds: who comes first waits for one, who comes next for two."""
    clock = ManualClock()
    admission = Admission(4, clock=clock)
    waiting = [admission.admit(ANYBODY, 1) for _ in range(4)]
    assert retry_after(refusal(admission)) == 10, "nothing was measured yet"
    for _ in range(20):
        clock.now += 2
        waiting.pop(0).close()
        waiting.append(admission.admit(ANYBODY, 1))
    waits = [retry_after(refusal(admission)) for _ in range(3)]
    assert waits == [2, 4, 6]
    assert refusal(admission).code == "overloaded"
    for _ in range(100):
        assert retry_after(refusal(admission)) <= MINUTE_S
    clock.now += 6
    assert retry_after(refusal(admission)) > 2, "the others have not come back yet"


def test_refusals_are_counted_by_what_was_full() -> None:
    admission = Admission(1, clock=ManualClock())
    ticket = admission.admit(ANYBODY, 1)
    refusal(admission)
    ticket.close()
    key = ApiKey("a", KeyLimits(requests_per_minute=1))
    assert admits(admission, key)
    refusal(admission, key)
    assert admission.refused == {"service": 1, "requests": 1, "tokens": 0, "concurrent": 0}


# ── several replicas ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_limit_holds_over_two_replicas() -> None:
    replicas = Replicas(2)
    first, second = replicas.gates
    done = sum(admits(gate, PER_MINUTE) for gate in (first, second) * 10)
    assert done == 6
    replicas.settle()
    assert not any(admits(gate, PER_MINUTE) for gate in (first, second) * 10)


def test_a_limit_is_not_halved_when_all_requests_come_to_one_replica() -> None:
    replicas = Replicas(2)
    done = 0
    for _ in range(30):
        done += admits(replicas.gates[0], PER_MINUTE)
        replicas.settle(1)
    assert done == 6


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_small_limits_go_where_they_are_asked_for(limit: int) -> None:
    key = ApiKey("a", KeyLimits(requests_per_minute=limit))
    replicas = Replicas(3)
    replicas.settle()
    done = 0
    for _ in range(40):
        done += admits(replicas.gates[1], key)
        replicas.settle(1)
    assert done == limit


def test_a_refused_request_is_told_to_come_back_soon_when_others_hold_what_it_needs() -> None:
    replicas = Replicas(2)
    replicas.settle()
    while admits(replicas.gates[0], PER_MINUTE):
        pass
    replicas.exchange(0)
    replicas.exchange(1)
    replicas.gates[0].obey({})
    assert retry_after(refusal(replicas.gates[0], PER_MINUTE)) <= 2
    replicas.settle(3)
    assert admits(replicas.gates[0], PER_MINUTE)


def test_room_that_others_hold_and_do_not_use_is_soon_here() -> None:
    """A key with fewer requests at a time than there are ingresses was told to wait 10 seconds while it made none."""
    replicas = Replicas(2)
    key = ApiKey("a", KeyLimits(concurrent=1))
    assert admits(replicas.gates[1], key)
    replicas.settle()
    here, there = sorted(replicas.gates, key=lambda gate: gate.uses()[QuotaId("a", "concurrent")].allowed)
    assert [gate.uses()[QuotaId("a", "concurrent")].allowed for gate in (here, there)] == [0, 1]
    for _ in range(2):  # it goes where more is asked
        assert retry_after(refusal(here, key)) == 2
        replicas.settle(3)
    ticket = here.admit(key, 1)
    replicas.settle(3)
    assert retry_after(refusal(there, key)) > 2, "now it is in use"
    ticket.close()


def test_without_an_aggregator_everybody_goes_on_as_told_last() -> None:
    replicas = Replicas(2)
    for _ in range(20):
        admits(replicas.gates[0], PER_MINUTE)
        replicas.settle(1)
    allowed = replicas.allowed(QuotaId("a", "requests"))
    replicas.clock.now += 1000
    done = [sum(admits(gate, PER_MINUTE) for _ in range(20)) for gate in replicas.gates]
    assert done == allowed
    assert sum(done) <= 6


def test_a_new_aggregator_takes_nothing_away_and_gives_nothing_twice() -> None:
    replicas = Replicas(2)
    for _ in range(20):
        admits(replicas.gates[0], PER_MINUTE)
        replicas.settle(1)
    replicas.aggregator = Aggregator(2, 8, replicas.clock)
    for _ in range(20):
        replicas.settle(1)
        assert sum(replicas.allowed(QuotaId("a", "requests"))) <= 6


def test_the_part_of_a_lost_replica_is_given_to_others() -> None:
    """All but what its successor begins with."""
    replicas = Replicas(2, capacity=100)
    replicas.settle()
    for _ in range(int(GONE_S) + 5):
        replicas.clock.now += 1
        replicas.exchange(0)
    assert replicas.allowed(SERVICE)[0] == 50
    replicas.gates[1] = Admission(100, 2, replicas.clock)
    replicas.settle()
    assert sum(replicas.allowed(SERVICE)) <= 100


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 2**32), st.booleans())
def test_parts_never_exceed_the_limit(limit: int, count: int, seed: int, concurrent: bool) -> None:
    """Whatever is asked where, and whatever answers are lost: in no minute more than the limit, and at no time more."""
    random = Random(seed)
    limits = KeyLimits(concurrent=limit) if concurrent else KeyLimits(requests_per_minute=limit)
    key, replicas = ApiKey("a", limits), Replicas(count)
    whole = -(-limit // count) * count  # before anybody was told anything
    held: list[Ticket] = []
    times: list[float] = []
    for _ in range(700):
        replicas.clock.now += random.random() / 3  # so that nobody is taken to be gone
        number = random.randrange(count)
        match random.randrange(5):
            case 0 | 1:
                replicas.exchange(number, answered=random.random() < 0.8)
            case 2 if held:
                held.pop(random.randrange(len(held))).close()
            case _:
                try:
                    held.append(replicas.gates[number].admit(key, 1))
                    times.append(replicas.clock.now)
                except ApiError:
                    continue
    if concurrent:
        assert len(held) <= whole
    else:
        assert all(late - early >= MINUTE_S for early, late in zip(times, times[whole:], strict=False))
