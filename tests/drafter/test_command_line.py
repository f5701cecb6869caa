from __future__ import annotations

import pytest

from drafter.command_line import BAD_INPUT, OneLineParser


def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    parser = OneLineParser(prog="tool")
    parser.add_argument("--lr", type=float)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--lr", "fast"])
    assert ended.value.code == BAD_INPUT
    assert capsys.readouterr().err == "tool: error: argument --lr: invalid float value: 'fast'\n"
