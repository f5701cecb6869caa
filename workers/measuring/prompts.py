"""Prompts for comparisons and benchmarks: a small set of our own, or a file in the same shape."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from verifier.errors import BadSetting

PROMPTS = Path(__file__).with_name("prompts.jsonl")
UNSORTED = "other"  # the category of a prompt that names none

Item = TypeVar("Item")


@dataclass(frozen=True)
class Prompt:
    category: str
    text: str


def read_prompts(path: Path, count: int | None = None) -> list[Prompt]:
    """``count`` prompts, spread so that each category has the share that it has in the file; all of them by default.

    A line of the file is a JSON object that has ``turns``, of which the first is taken, or ``prompt``, and perhaps a
    ``category``. Prompts come sorted by category, in the order in which categories first appear.

    Raises:
        BadSetting: the file cannot be read, or holds something else; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # texts may hold other line breaks
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting("prompts", str(path), f"a readable file of JSON lines ({error})") from error
    prompts = [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise BadSetting("prompts", str(path), "a file with at least one prompt")
    categories = list(dict.fromkeys(prompt.category for prompt in prompts))
    prompts.sort(key=lambda prompt: categories.index(prompt.category))
    return prompts if count is None else spread(prompts, count)


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """At most ``count`` of them, at equal distances."""
    size = min(count, len(items))
    return [items[index * len(items) // size] for index in range(size)]


def _parse(line: str, place: str) -> Prompt:
    try:
        record: Any = json.loads(line)
        text = record["turns"][0] if "turns" in record else record["prompt"]
    except (ValueError, TypeError, LookupError):
        text = None
    if not isinstance(text, str) or not text.strip():
        raise BadSetting("prompts", place, 'a JSON object with "turns", a list of texts, or "prompt", a text')
    return Prompt(str(record.get("category", UNSORTED)), text)
