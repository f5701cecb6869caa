"""Replicas that are lost in all ways there are, and texts that do not show it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace

import pytest

from deployments.errors import ApiError
from deployments.fleet import Report
from deployments.metrics import RequestMetrics
from deployments.replay import MAX_REPLAYS, Patience, Replays
from deployments.router import Generation, Limits, Piece, Router
from tests.deployments.fakes import END, MAX_MODEL_LEN, TEXT, VOCAB_SIZE
from tests.deployments.fleets import Fault, Kind, ScriptedFleet
from verifier.sampling import SamplingParams
from workers.sequence import Progress, Request

PATIENCE = Patience(stall_s=0.05, replica_s=2.0, settle_s=0.01)
IDS = [*TEXT.encode("größer 🎈 und weiter"), END]
LOSSES: tuple[Kind, ...] = ("dies", "leaves", "breaks", "stalls", "ends")


def generation(**changes: object) -> Generation:
    prompt = tuple(TEXT.encode("Hi"))
    plain = Generation(prompt, "prompt", True, "max_tokens", None, (), (), False, SamplingParams(), True)
    return replace(plain, **changes)  # type: ignore[arg-type]


def router(fleet: ScriptedFleet, metrics: RequestMetrics | None = None, patience: Patience = PATIENCE) -> Router:
    return Router(fleet, TEXT, Limits(MAX_MODEL_LEN, VOCAB_SIZE, frozenset({END})), metrics, patience)


async def pieces(
    fleet: ScriptedFleet, wanted: Generation, metrics: RequestMetrics | None = None, patience: Patience = PATIENCE
) -> list[Piece]:
    asked = router(fleet, metrics, patience)
    return [piece async for piece in asked.generate(wanted, asked.admit(wanted))]


def end_of(found: list[Piece]) -> tuple[str, str | None, object]:
    """The text, the finish, and OpenAI's three counts."""
    usage = found[-1].usage
    assert usage is not None
    return "".join(piece.text for piece in found), found[-1].finish, usage[:3]


def faults(kind: Kind, *after: int) -> dict[str, Fault]:
    """Of replicas a, b …, which are asked in this order."""
    return {name: Fault(kind, count) for name, count in zip("abc", after, strict=False)}


def kill_points() -> Iterator[int]:
    return iter(range(len(IDS)))


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("run", [1, 3])
async def test_the_text_goes_on_wherever_a_replica_is_lost(kind: Kind, run: int) -> None:
    """Also in the middle of a character. Prompt and output count once, as in the undisturbed run."""
    truth = end_of(await pieces(ScriptedFleet(IDS, run=run), generation()))
    for after in [0, 3, 4, 9] if kind == "stalls" else kill_points():
        fleet = ScriptedFleet(IDS, faults(kind, after), run=run)
        assert end_of(await pieces(fleet, generation())) == truth
        (first, one), (second, two) = fleet.attempts
        assert first != second
        assert one.id != two.id
        assert len(two.output_ids) == after
        assert (two.prompt_ids, two.sampling, two.max_tokens) == (one.prompt_ids, one.sampling, one.max_tokens)
        assert fleet.aborted == [one.id]


async def test_the_text_goes_on_in_the_middle_of_a_stop_string() -> None:
    wanted = generation(stop=("🎈 und",))
    truth = end_of(await pieces(ScriptedFleet(IDS), wanted))
    assert truth[:2] == ("größer ", "stop")
    for after in kill_points():
        assert end_of(await pieces(ScriptedFleet(IDS, faults("dies", after)), wanted)) == truth


async def test_a_drawn_seed_stays_the_same_for_all_attempts() -> None:
    fleet = ScriptedFleet(IDS, faults("dies", 2, 3))
    await pieces(fleet, generation(has_seed=False))
    seeds = {request.sampling.seed for _, request in fleet.attempts}
    assert len(fleet.attempts) == 3
    assert len(seeds) == 1
    assert seeds != {0}


async def test_the_budget_counts_all_attempts() -> None:
    found = await pieces(ScriptedFleet(IDS, faults("dies", 2, 3)), generation(max_tokens=7))
    assert end_of(found)[1:] == ("length", (2, 7, 1))


@pytest.mark.parametrize("kind", LOSSES)
async def test_a_request_is_given_up_after_two_replays(kind: Kind) -> None:
    """It may be what its replicas die of. Those that were told to stop have not died of it."""
    fleet = ScriptedFleet(IDS, {name: Fault(kind, 1) for name in "abcd"}, names="abcde")
    metrics = RequestMetrics()
    if kind == "leaves":
        assert end_of(await pieces(fleet, generation(), metrics))[1] == "stop"
        assert len(fleet.attempts) == 5
        return
    with pytest.raises(ApiError, match="given up") as caught:
        await pieces(fleet, generation(), metrics)
    assert (caught.value.status, caught.value.code) == (503, "replica_lost")
    assert len(fleet.attempts) == 1 + MAX_REPLAYS
    text = metrics.render(None).decode()
    assert "draftree_given_up_total 1.0" in text
    assert "draftree_in_flight 0.0" in text


@pytest.mark.parametrize(
    ("kind", "reason"),
    list(zip(LOSSES, ["lost", "drained", "broken", "stalled", "unfinished"], strict=True)),
)
async def test_replays_are_counted_by_reason(kind: Kind, reason: str) -> None:
    metrics = RequestMetrics()
    await pieces(ScriptedFleet(IDS, faults(kind, 2)), generation(), metrics)
    text = metrics.render(None).decode()
    assert f'draftree_replays_total{{reason="{reason}"}} 1.0' in text
    assert f"draftree_stalled_attempts_total {float(kind == 'stalls')}" in text


async def test_a_poisoned_request_is_not_tried_again() -> None:
    """Its engine is well: the request is at fault, and would be anywhere."""
    fleet = ScriptedFleet(IDS, faults("poisoned", 2))
    with pytest.raises(ApiError, match="failed on this request") as caught:
        await pieces(fleet, generation())
    assert "SECRET" not in caught.value.message
    assert len(fleet.attempts) == 1


async def test_the_only_replica_is_asked_again_when_it_was_slow() -> None:
    fleet = ScriptedFleet(IDS, faults("stalls", 2), names="a")
    assert end_of(await pieces(fleet, generation()))[0] == TEXT.decode(IDS)
    assert [name for name, _ in fleet.attempts] == ["a", "a"]


async def test_a_broken_replica_is_asked_by_nobody_again() -> None:
    """Its errors come at once, so it would look idle and attract all requests."""
    fleet = ScriptedFleet(IDS, faults("breaks", 0), names="ab")
    for _ in range(3):
        await pieces(fleet, generation())
    assert [name for name, _ in fleet.attempts] == ["a", "b", "b", "b"]


async def test_a_lost_replica_is_waited_for() -> None:
    """While the only one is being started again, no request fails."""
    fleet = ScriptedFleet(IDS, faults("dies", 4), names="a")
    task = asyncio.create_task(pieces(fleet, generation()))
    await asyncio.sleep(0.1)
    assert not task.done()
    fleet.alive["b"] = Report("b", "fake|1")
    fleet.fleet.update(fleet.alive.values())
    assert end_of(await task)[0] == TEXT.decode(IDS)


async def test_replicas_with_other_settings_are_no_replacement() -> None:
    """They may have other weights: half a text of each would be neither's."""
    fleet = ScriptedFleet(IDS, faults("dies", 4), names="a")
    task = asyncio.create_task(pieces(fleet, generation()))
    await asyncio.sleep(0)
    fleet.alive["b"] = Report("b", "fake|2")
    fleet.fleet.update([*fleet.alive.values()])
    with pytest.raises(ApiError, match="other settings") as caught:
        await task
    assert (caught.value.status, caught.value.code) == (503, "redeployed")
    assert len(fleet.attempts) == 1


async def test_a_request_that_said_nothing_yet_may_begin_anew_with_other_weights() -> None:
    fleet = ScriptedFleet(IDS, faults("dies", 0), names="a")
    fleet.alive["b"] = Report("b", "fake|2", requests=5)
    fleet.fleet.update(fleet.alive.values())
    assert end_of(await pieces(fleet, generation()))[0] == TEXT.decode(IDS)


async def test_without_a_replica_a_request_ends_in_words() -> None:
    fleet = ScriptedFleet(IDS, names="")
    lists = Router(fleet, TEXT, Limits(MAX_MODEL_LEN, VOCAB_SIZE, frozenset({END})), None, Patience(replica_s=0.05))
    with pytest.raises(ApiError, match="No replica") as caught:
        await anext(lists.generate(generation(), lists.admit(generation())))
    assert caught.value.status == 503


async def test_an_engine_that_goes_on_is_not_given_up() -> None:
    """A request waits its turn for longer than a replica may be silent."""

    class Busy(ScriptedFleet):
        async def _write(self, name: str, request: Request):  # type: ignore[no-untyped-def]
            for _ in range(8):
                await asyncio.sleep(patience.stall_s / 4)
                yield Progress(request.id, ())
            async for progress in super()._write(name, request):
                yield progress

    patience = replace(PATIENCE, stall_s=0.5)
    fleet = Busy(IDS)
    found = await pieces(fleet, generation(), patience=patience)
    assert end_of(found)[0] == TEXT.decode(IDS)
    assert len(fleet.attempts) == 1
    assert all(piece.text or piece.finish for piece in found), "signs of life are not the client's"


async def test_what_guessing_took_is_that_of_all_attempts() -> None:
    fleet = ScriptedFleet(IDS, faults("dies", 2, 3))
    replays = Replays(fleet, RequestMetrics(), PATIENCE)
    request = Request("r", (1, 2), SamplingParams(), 9, frozenset({END}))
    runs = [run async for run in replays.generate(request)]
    usage = runs[-1].usage
    assert usage is not None
    assert (usage.steps, usage.verified_tokens, usage.output_tokens, usage.cached_tokens) == (9, 9, 9, 1)
    assert usage.replays == 2
    assert {run.request_id for run in runs} == {"r"}


async def test_leaving_aborts_the_attempt_of_the_moment() -> None:
    fleet = ScriptedFleet(IDS, faults("dies", 2))
    asked = router(fleet)
    async with aclosing(asked.generate(generation(), asked.admit(generation()))) as found:
        for _ in range(4):
            await anext(found)
    assert fleet.aborted == [request.id for _, request in fleet.attempts]
