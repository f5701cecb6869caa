"""A comparison's figures as a picture: speedup by method and size of trees, and acceptance by position.

Needs matplotlib, and no screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from drafter.base import DraftLimits
from workers.measuring.methods import Method, in_short
from workers.measuring.methods_report import Row

ROW_INCHES = 0.34  # of height, for each bar group
GAP = 0.25  # between groups, of a group's height
FEWEST_TRIED = 30  # walks that a share is drawn from
COLOURS = ("#1f5a99", "#e08a2c", "#6b9e5b", "#9467bd")  # by temperature
NUM_LINE_COLOURS = 10  # that matplotlib has before it begins anew; further lines are dashed


def draw(rows: Sequence[Row], path: Path) -> None:
    """Writes the picture; its kind is the path's suffix."""
    groups = _groups(rows)
    figure = Figure(figsize=(13, 1.6 + ROW_INCHES * max(len(groups), 8)), layout="constrained")
    speed, acceptance = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_speed(speed, rows)
    _draw_acceptance(acceptance, rows)
    figure.savefig(path, dpi=110)


def _groups(rows: Sequence[Row]) -> list[tuple[Method, DraftLimits]]:
    return list(dict.fromkeys((row.entry.method, row.limits) for row in rows))


def _draw_speed(axes: Axes, rows: Sequence[Row]) -> None:
    groups = _groups(rows)
    temperatures = sorted({row.temperature for row in rows})
    height = (1 - GAP) / max(1, len(temperatures))
    for index, temperature in enumerate(temperatures):
        here = [row for row in rows if row.temperature == temperature]
        places = [groups.index((row.entry.method, row.limits)) + index * height for row in here]
        bars = axes.barh(
            places,
            [row.figures.speedup for row in here],
            height,
            color=COLOURS[index % len(COLOURS)],
            label=f"temperature {temperature:g}",
        )
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=7)
    axes.axvline(1, color="black", linewidth=0.8)
    names = [f"{method.name}{' (lossy)' if method.is_lossy else ''}  {in_short(limits)}" for method, limits in groups]
    axes.set_yticks([place + height * (len(temperatures) - 1) / 2 for place in range(len(groups))], names, fontsize=8)
    axes.invert_yaxis()
    axes.set_title("Speed, times plain decoding (trees: depth/branching/nodes)", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.08, y=0.01)
    if temperatures:
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.03), ncols=len(temperatures))


def _draw_acceptance(axes: Axes, rows: Sequence[Row]) -> None:
    """Of each method with its largest trees, at the lowest temperature; positions that few walks came to are noise."""
    coldest = min((row.temperature for row in rows), default=0.0)
    for row in rows:
        done = row.figures.speculation
        rates = done.acceptance_where_tried[: sum(tried >= FEWEST_TRIED for tried in done.tried_by_position)]
        if row.temperature == coldest and row.limits == row.entry.method.limits[0] and rates:
            line = "-" if len(axes.lines) < NUM_LINE_COLOURS else "--"
            axes.plot(range(1, len(rates) + 1), rates, line, marker="o", markersize=3, label=row.entry.method.name)
    axes.set_ylim(0, 1)
    axes.set_xlabel(f"position of the guess (largest trees, temperature {coldest:g})", fontsize=8)
    axes.set_title("Share of guesses that were right where they were tried", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if axes.lines:
        axes.legend(fontsize=8, frameon=False)
