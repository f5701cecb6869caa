from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from drafter.training import __main__ as tool
from verifier.errors import BadSetting


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    calls: list[list[str]] = []
    monkeypatch.setattr(
        tool, "import_module", lambda name: SimpleNamespace(main=lambda options: calls.append([name, *options]))
    )
    return calls


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["drafter.training", *arguments])
    return tool.main()


def test_a_step_gets_the_rest_of_the_line(monkeypatch: pytest.MonkeyPatch, calls: list[list[str]]) -> None:
    assert run(monkeypatch, "collect", "--out", "x") == 0
    assert calls == [["workers.collecting.collect", "--out", "x"]]


def test_an_unknown_step_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, calls: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "trian") == 2
    error = capsys.readouterr().err
    assert "STEP is 'trian', but must be one of collect, train, evaluate, export." in error
    assert error.count("\n") == 1


def test_a_users_mistake_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(arguments: list[str]) -> None:
        raise BadSetting("lr", -1, "positive")

    monkeypatch.setattr(tool, "import_module", lambda name: SimpleNamespace(main=refuse))
    assert run(monkeypatch, "train") == 2
    assert capsys.readouterr().err == "python -m drafter.training train: error: lr is -1, but must be positive.\n"


def test_no_step_shows_them_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch) == 0
    usage = capsys.readouterr().out
    assert all(step in usage for step in tool.STEPS)


def test_a_folder_that_is_a_file_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was a traceback."""

    def main(options: list[str]) -> None:
        raise NotADirectoryError(20, "Not a directory", "run")

    monkeypatch.setattr(tool, "import_module", lambda name: SimpleNamespace(main=main))
    assert run(monkeypatch, "train") == 2
    assert capsys.readouterr().err == "python -m drafter.training train: error: [Errno 20] Not a directory: 'run'.\n"
