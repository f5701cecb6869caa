"""The controller run on a clock on which every price is known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from workers.config import EngineConfig
from workers.measuring import controller
from workers.measuring.stages import MANY, USELESS, Result

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
        assert result.stretch <= STRETCH, result.data


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
