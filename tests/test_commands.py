"""What every command of the project says of itself, and how it takes a mistake."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from deployments import bench, bench_scaling, launch, spot
from deployments.chaos import __main__ as chaos
from drafter.command_line import BAD_INPUT
from drafter.training import export, train
from workers import generate
from workers.collecting import collect
from workers.measuring import bench_methods, bench_remote, compare, controller, evaluate, vllm_peer
from workers.measuring.command import as_command

PARSERS: list[Callable[[], argparse.ArgumentParser]] = [
    module.command_line
    for module in (
        *(bench, bench_scaling, chaos, launch, spot, generate, collect, train, export),
        *(bench_methods, bench_remote, compare, controller, evaluate, vllm_peer),
    )
]


@pytest.mark.parametrize("command_line", PARSERS, ids=lambda each: str(each.__module__))
def test_help_describes_a_command_and_its_options(command_line: Callable[[], argparse.ArgumentParser]) -> None:
    """Several commands listed their options by name alone, one with a default as a list in Python."""
    parser = command_line()
    assert str(parser.description).endswith(".")
    assert all(action.help for action in parser._actions)
    assert "['" not in parser.format_help()


@pytest.mark.parametrize("clients", ["two", "2,,8", "2,-1", ""])
def test_a_load_is_refused_in_words(clients: str, capsys: pytest.CaptureFixture[str]) -> None:
    """-1 clients were taken, and no others refused by saying what is allowed."""
    with pytest.raises(SystemExit) as ended:
        bench_scaling.command_line().parse_args(["--clients", clients])
    assert ended.value.code == BAD_INPUT
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "must be a whole number of at least 0" in said


@pytest.mark.parametrize("command", [bench_methods, evaluate, collect], ids=lambda each: str(each.__name__))
def test_a_temperature_is_refused_before_a_model_is_loaded(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Two of these commands loaded all that they compare, and only then found it to be out of range."""
    for text in ("-1", "hot", "nan", "101"):
        with pytest.raises(SystemExit):
            command.command_line().parse_args(["--temperature", text])
        assert f"must be a number from 0 to 100, not '{text}'" in capsys.readouterr().err


def test_a_measurement_that_cannot_write_says_so_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder for pictures that is a file was a traceback."""
    (tmp_path / "taken").touch()

    def measure() -> Mapping[str, Any]:
        (tmp_path / "taken").mkdir()
        return {}

    assert as_command("controller", measure) == BAD_INPUT
    said = capsys.readouterr().err
    assert said.startswith("controller: error: ")
    assert said.count("\n") == 1
