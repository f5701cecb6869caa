"""What the cost model chose over time, as a picture. Needs matplotlib, and no screen."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from matplotlib.figure import Figure

from workers.measuring.stages import ADAPTIVE, USELESS, Moment, Result

WINDOW = 9  # steps that a point is the mean of
ROWS = (("depth", "draft length"), ("nodes", "guesses per sequence"), ("lanes", "lanes"))
LABEL = {"ha": "center", "va": "bottom", "fontsize": 7}


def draw(results: Sequence[Result], path: Path) -> None:
    """Writes the picture; its kind is the path's suffix."""
    moments = sorted((m for result in results for leg in result.legs[ADAPTIVE] for m in leg.moments), key=_at)
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    axes = figure.subplots(len(ROWS), 1, sharex=True)
    for place, (name, label) in zip(axes, ROWS, strict=True):
        values = [float(getattr(moment, name)) for moment in moments]
        place.plot([moment.at for moment in moments], _smooth(values), color="#1f5a99", linewidth=1)
        place.set_ylabel(label, fontsize=9)
        place.set_ylim(bottom=0)
        place.spines[["top", "right"]].set_visible(False)
        for index, group in groupby(moments, key=lambda moment: moment.stage):
            steps = list(group)
            stage = results[index % len(results)].stage
            colour = "#e08a2c" if stage.drafter == USELESS else "#6b9e5b"
            place.axvspan(steps[0].at, steps[-1].at, color=colour, alpha=0.12, linewidth=0)
            if place is axes[0]:
                words = (
                    f"{stage.drafter}, {stage.at_a_time} at a time\n{results[index % len(results)].ratio:.2f} of best"
                )
                place.text(
                    (steps[0].at + steps[-1].at) / 2, 1.02, words, **LABEL, transform=place.get_xaxis_transform()
                )
    axes[-1].set_xlabel("seconds of the adaptive engine", fontsize=9)
    figure.savefig(path, dpi=150)


def _at(moment: Moment) -> float:
    return moment.at


def _smooth(values: Sequence[float]) -> list[float]:
    """Means over the steps before."""
    means = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - WINDOW) : end]
        means.append(sum(window) / len(window))
    return means
