"""A comparison's figures as rows of a table and as data. Knows rounds; measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drafter.base import DraftLimits
from workers.measuring.methods import Entry, in_short
from workers.measuring.rounds import Figures, Round
from workers.measuring.table import NONE, number, table

POSITIONS = 5  # of acceptance that the table shows


@dataclass(frozen=True)
class Row:
    """One method with one size of trees at one temperature."""

    entry: Entry
    limits: DraftLimits
    temperature: float
    figures: Figures
    by_category: dict[str, Figures]

    @property
    def weight_bytes(self) -> int:
        """Memory that its weights take at most."""
        return self.entry.plan.num_bytes(0) if self.entry.plan else 0

    @property
    def bytes_per_token(self) -> int:
        """What it keeps for each token of context."""
        return self.entry.plan.num_bytes(1) - self.weight_bytes if self.entry.plan else 0


def make_rows(entries: Sequence[Entry], rounds: Sequence[Round], temperatures: Sequence[float]) -> list[Row]:
    """Of whatever rounds there are; methods that took part in none have none."""
    rows = []
    for entry in entries:
        for limits in entry.method.limits:
            for temperature in temperatures:
                here = [each for each in rounds if each.temperature == temperature]
                by_category = {
                    category: figures
                    for category in dict.fromkeys(each.category for each in here)
                    if (figures := Figures.of(entry.key(limits), [each for each in here if each.category == category]))
                }
                if figures := Figures.of(entry.key(limits), here):
                    rows.append(Row(entry, limits, temperature, figures, by_category))
    return rows


def show(rows: Sequence[Row], target_bytes: int) -> str:
    """As a table.

    Args:
        target_bytes: the target's weights.
    """
    positions = [str(position) for position in range(1, POSITIONS + 1)]
    header = ("method", "trees", "T", "prompts", "× plain", "τ", *positions, "MB", "% of target", "KB/token", "changed")
    return table(header, [_cells(row, target_bytes) for row in rows])


def _cells(row: Row, target_bytes: int) -> list[str]:
    figures = row.figures
    rates = [number(rate) for rate in figures.speculation.acceptance_where_tried[:POSITIONS]]
    return [
        row.entry.method.name,
        in_short(row.limits),
        f"{row.temperature:g}",
        str(figures.prompts),
        number(figures.speedup),
        number(figures.speculation.mean_acceptance_length),
        *rates,
        *[NONE] * (POSITIONS - len(rates)),
        f"{row.weight_bytes / 1e6:.0f}",
        f"{100 * row.weight_bytes / target_bytes:.0f}",
        f"{row.bytes_per_token / 1e3:.1f}",
        f"{figures.differing}{' (lossy)' if row.entry.method.is_lossy else ''}",
    ]


def problems(entries: Sequence[Entry], rows: Sequence[Row]) -> str:
    """Who did not take part, and whose drafter failed, a line each."""
    absent = [f"{entry.method.name}: {entry.problem}" for entry in entries if entry.problem]
    failed = [
        f"{row.entry.key(row.limits)}: its drafter failed {row.figures.failures} times at temperature "
        f"{row.temperature:g}; those steps went without guesses."
        for row in rows
        if row.figures.failures
    ]
    return "\n".join(absent + failed)


def as_data(rows: Sequence[Row], target_bytes: int) -> list[dict[str, Any]]:
    """For JSON: what the table has, in full, and by category."""
    return [
        {
            "method": row.entry.method.name,
            "max_draft": row.limits.max_draft,
            "draft_top_k": row.limits.draft_top_k,
            "max_nodes": row.limits.max_nodes,
            "temperature": row.temperature,
            **_data(row.figures),
            "weight_bytes": row.weight_bytes,
            "percent_of_target": round(100 * row.weight_bytes / target_bytes, 1),
            "bytes_per_token": row.bytes_per_token,
            "lossy": row.entry.method.is_lossy,
            "by_category": {category: _data(figures) for category, figures in row.by_category.items()},
        }
        for row in rows
    ]


def _data(figures: Figures) -> dict[str, Any]:
    done = figures.speculation
    return {
        "prompts": figures.prompts,
        "speedup": round(figures.speedup, 3),
        "mean_acceptance_length": round(done.mean_acceptance_length or 1.0, 3),
        "acceptance_by_position": [round(rate, 3) for rate in done.acceptance_where_tried],
        "drafted_tokens": done.drafted_tokens,
        "accepted_tokens": done.accepted_tokens,
        "changed": figures.differing,
        "drafter_failures": figures.failures,
    }
