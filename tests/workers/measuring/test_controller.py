"""The controller run on a clock on which every price is known."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from workers.config import EngineConfig
from workers.measuring import controller
from workers.measuring.clockwork import ManualClock
from workers.measuring.stages import GOOD, MANY, TURN, USELESS, Leg, Length, Result, Stage, in_turns

STRETCH = EngineConfig(1).max_stretch


@pytest.fixture(scope="module")
def results() -> Sequence[Result]:
    return controller.play_on_the_clock((5,), (200, 200), (200, 60))


def test_no_fixed_setting_is_better_at_any_stage(results: Sequence[Result]) -> None:
    for result in results:
        assert result.ratio >= controller.ON_THE_CLOCK, result.data


def test_nobody_waits_longer_than_the_bound(results: Sequence[Result]) -> None:
    """When lanes changed, whoever was in the second one waited for a draft and two passes with guesses."""
    for result in results:
        assert result.stretch <= STRETCH * (1 + 1e-9), result.data


def test_the_settings_follow_the_script(results: Sequence[Result]) -> None:
    for result in results:
        depth, _, lanes = result.settings
        assert (depth < 1) == (result.stage.drafter == USELESS)
        assert (lanes > 1.2) == (result.stage.at_a_time == MANY and result.stage.drafter != USELESS)


def test_figures_come_as_a_table_a_picture_and_json(
    results: Sequence[Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(controller, "play_on_the_clock", lambda: results)
    assert controller.main(["--scripted", "--out", str(tmp_path / "new")]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    figures = json.loads(last)["clock"]
    assert figures["least_ratio"] == pytest.approx(min(result.ratio for result in results), abs=1e-4)
    assert [stage["at_a_time"] for stage in figures["stages"]] == [1, 1, 1, MANY, MANY, MANY, 1]
    assert sum(line.startswith("|") for line in lines) == 2 + len(results)
    assert (tmp_path / "new" / "clock.png").stat().st_size > 1000


def test_turns_are_taken_until_all_have_ended() -> None:
    """And between turns nobody's time goes on, or the other's would be counted as a wait."""
    played: list[str] = []

    def leg(name: str, steps: int) -> Iterator[Leg]:
        for step in range(1, steps + 1):
            played.append(name)
            yield Leg(tokens=step)

    assert [each.tokens for each in in_turns(leg("a", 2 * TURN), leg("b", TURN + 1))] == [2 * TURN, TURN + 1]
    assert played == ["a"] * TURN + ["b"] * TURN + ["a"] * TURN + ["b"]


def test_an_engine_that_waits_for_its_turn_does_not_make_its_clients_wait() -> None:
    player = controller._clockwork_player(0, 1)
    clock = player._engine.clock
    assert isinstance(clock, ManualClock)
    leg = Leg()
    for so_far in player.play(0, Stage(GOOD, 1), Length(5, 20)):
        leg, clock.now = so_far, clock.now + 5.0
    assert leg.longest_gap < 0.1
    assert leg.seconds < 1.0
