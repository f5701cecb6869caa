"""How a run tells how it goes: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch import Tensor

from drafter.training.corpus import Corpus
from drafter.training.objectives.base import acceptance
from drafter.training.shards import ShardFolder

LINE_S = 60.0  # between lines where there is no terminal
SMOOTHING = 0.9


class Report:
    """To standard error. ``silent`` for all ranks but the first."""

    def __init__(self, num_steps: int, *, silent: bool = False) -> None:
        self._console = Console(stderr=True, quiet=silent, highlight=False, soft_wrap=True)
        columns = [TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}")]
        self._bar = Progress(*columns, TimeRemainingColumn(), console=self._console)
        self._task: TaskID = self._bar.add_task("", total=num_steps)
        self._figures: Tensor | None = None
        self._said = self._began = time.monotonic()
        self._first_rows: int | None = None

    def __enter__(self) -> Report:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, line: str) -> None:
        self._console.print(line, markup=False)

    def epoch(self, epoch: int, folder: ShardFolder, corpus: Corpus, num_batches: int) -> None:
        tokens = f"{folder.num_tokens} tokens, {folder.num_trained_tokens} of them answers"
        kept = f"{len(corpus.trained)} conversations, {len(corpus.held_out)} held out"
        shards = "1 shard" if len(folder.shards) == 1 else f"{len(folder.shards)} shards"
        self.say(f"Epoch {epoch}: {shards}, {kept}, {tokens}; {num_batches} steps.")

    def step(self, step: int, rows: int, figures: Tensor) -> None:
        """
        Args:
            rows: trained on so far.
            figures: of this step's batch.
        """
        self._figures = figures if self._figures is None else SMOOTHING * self._figures + (1 - SMOOTHING) * figures
        now = time.monotonic()
        if self._first_rows is None:
            self._first_rows, self._began = rows, now
        losses = (self._figures[:, 0] / self._figures[:, 1].clamp(min=1)).tolist()
        speed = (rows - self._first_rows) / max(now - self._began, 1e-9)
        text = f"loss {_numbers(losses, 3)}  accepted {_numbers(acceptance(self._figures), 3)}  {speed:.0f} rows/s"
        self._bar.update(self._task, completed=step, description=text)
        if not self._console.is_terminal and now - self._said > LINE_S:
            self._said = now
            self.say(f"Step {step}: {text}")

    def evaluation(self, line: Mapping[str, Any]) -> None:
        """What is written to the run's log."""
        kinds = ", ".join(f"{kind} {value:.3f}" for kind, value in line["first_by_kind"].items())
        self.say(
            f"Step {line['step']}, {line['seconds']:.0f} s, {line['rows']} rows: held out: loss {line['loss']:.4f}, "
            f"accepted {_numbers(line['acceptance'], 3)}, {line['mean_length']:.3f} tokens a pass ({kinds})"
        )


def _numbers(values: list[float], digits: int) -> str:
    return " ".join(f"{value:.{digits}f}" for value in values)
