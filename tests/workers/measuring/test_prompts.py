"""Which prompts are taken from a file, and what is said of files that hold none."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from verifier.errors import BadSetting
from workers.measuring.prompts import PROMPTS, UNSORTED, Prompt, read_prompts


def write(folder: Path, *records: Any) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in records))
    return path


def test_prompts_are_spread_over_the_file() -> None:
    assert len(read_prompts(PROMPTS, 100)) == len(read_prompts(PROMPTS)) == 12
    assert read_prompts(PROMPTS, 2) == [read_prompts(PROMPTS)[i] for i in (0, 6)]


def test_every_category_keeps_its_share_in_whatever_order_they_stand(tmp_path: Path) -> None:
    """Every third line would have been code, had lines been counted without looking at what they are."""
    path = write(tmp_path, *({"category": ("qa", "qa", "code")[i % 3], "prompt": str(i)} for i in range(30)))
    assert Counter(prompt.category for prompt in read_prompts(path, 9)) == {"qa": 6, "code": 3}
    assert len(set(read_prompts(path, 9))) == 9


def test_both_shapes_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, {"turns": ["first", "second"], "category": "qa"}, "", {"prompt": "alone"})
    assert read_prompts(path) == [Prompt("qa", "first"), Prompt(UNSORTED, "alone")]


@pytest.mark.parametrize("line", ["{", "[1]", "7", {"turns": []}, {"turns": [3]}, {"text": "?"}, {"prompt": " "}])
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: Any) -> None:
    with pytest.raises(BadSetting, match=r"line 2.*turns"):
        read_prompts(write(tmp_path, {"prompt": "good"}, line))


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="at least one prompt"):
        read_prompts(write(tmp_path))
    with pytest.raises(BadSetting, match="readable"):
        read_prompts(tmp_path / "missing.jsonl")


def test_a_text_may_hold_any_line_break(tmp_path: Path) -> None:
    """Lines ended at each of the ten characters that Unicode knows for it, in the middle of a text, too."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('\ufeff{"prompt": "one\u2028two\x85three"}\r\n{"prompt": "four"}\n', encoding="utf-8")
    assert [prompt.text for prompt in read_prompts(path)] == ["one\u2028two\x85three", "four"]
