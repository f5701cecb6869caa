"""Figures as text: a table that lines up in a terminal and is Markdown when it is pasted. Knows no figure's meaning."""

from __future__ import annotations

from collections.abc import Sequence

NONE = "—"
NARROWEST = 3  # what Markdown takes for a rule


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be; the first is aligned to the left, figures to the right."""
    widths = [max(NARROWEST, *(len(row[column]) for row in [header, *rows])) for column in range(len(header))]
    rule = [f":{'-' * (widths[0] - 1)}", *(f"{'-' * (width - 1)}:" for width in widths[1:])]
    return "\n".join(_line(cells, widths) for cells in [header, rule, *rows])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    padded = [f"{first[0]:<{first[1]}}", *(f"{cell:>{width}}" for cell, width in others)]
    return f"| {' | '.join(padded)} |"


def number(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def share(part: float, whole: float) -> str:
    """In per cent; nothing of nothing is none."""
    return f"{100 * part / whole:.0f}%" if whole else NONE
