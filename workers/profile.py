"""What a forward pass costs before the first request has come: a second of trying, so that no guess is bought blindly.

Knows plans and seconds. The pages that it borrows hold nothing; what their keys are does not matter here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from verifier.batch import Segment, StepPlan
from verifier.config import ModelConfig
from verifier.pages import PageTable
from verifier.tree import TokenTree
from workers.costs import Costs

ROWS = (*range(1, 13), 16, 20, 24, 32, 48)
LONG_CONTEXT = 2048  # tokens
ROUNDS = 2


class Runner(Protocol):
    """What is measured."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def max_rows(self) -> int: ...

    def forward(self, plan: StepPlan) -> object: ...


def profile(verifier: Runner, pages: PageTable, costs: Costs, clock: Callable[[], float]) -> None:
    """Fills ``costs`` with what passes take by rows, and by keys. Between steps; all pages are given back."""
    room, max_positions = pages.num_free * pages.page_size, verifier.config.max_positions
    fitting = min(verifier.max_rows, room, max_positions)
    counts = {costs.padded(rows): rows for rows in ROWS if rows <= fitting}
    seconds: dict[int, list[float]] = {rows: [] for rows in counts.values()}
    for _ in range(ROUNDS):
        for rows, times in seconds.items():
            times.append(_time(verifier, pages, clock, 0, rows))
    for rows, times in seconds.items():
        costs.observe_verifying(rows, 0, min(times))  # in the first round memory is fetched and kernels are chosen
    rows = max(seconds)
    if (context := min(LONG_CONTEXT, room - rows, max_positions - rows)) > 0:
        costs.learn_keys(rows, rows * context, _time(verifier, pages, clock, context, rows))


def _time(verifier: Runner, pages: PageTable, clock: Callable[[], float], context: int, rows: int) -> float:
    lease = pages.open(())
    try:
        pages.grow(lease, context + rows)
        plan = StepPlan((Segment(context, TokenTree.chain([0] * rows), tuple(lease.pages)),))
        began = clock()
        verifier.forward(plan)
        return clock() - began
    finally:
        pages.close(lease)
