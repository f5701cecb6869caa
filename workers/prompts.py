"""Prompts for comparisons and benchmarks: a small set of our own, or a file in the same shape."""

from __future__ import annotations

import json
from pathlib import Path

PROMPTS = Path(__file__).with_name("prompts.jsonl")


def read_prompts(path: Path, count: int) -> list[str]:
    """The first user turn of ``count`` lines spread evenly over a JSON-lines file of ``{"turns": [...]}``."""
    lines = path.read_text(encoding="utf-8").splitlines()
    chosen = [lines[index * len(lines) // min(count, len(lines))] for index in range(min(count, len(lines)))]
    return [str(json.loads(line)["turns"][0]) for line in chosen]
