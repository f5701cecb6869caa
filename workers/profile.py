"""What a forward pass costs before the first request has come: a second of trying, so that no guess is bought blindly.

Knows plans and seconds. The pages that it borrows hold nothing; what their keys are does not matter here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

from verifier.batch import Segment, StepPlan
from verifier.config import ModelConfig
from verifier.pages import PageTable
from verifier.tree import TokenTree
from workers.costs import Costs, Work

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


class _Pass(NamedTuple):
    """Over one sequence."""

    rows: int
    context: int = 0
    scored_from: int = 0  # row


def profile(verifier: Runner, pages: PageTable, costs: Costs, clock: Callable[[], float]) -> None:
    """Fills ``costs`` with what passes take by rows, keys and draws. Between steps; all pages are given back."""
    room, max_positions = pages.num_free * pages.page_size, verifier.config.max_positions
    fitting = min(verifier.max_rows, room, max_positions)
    counts = {costs.padded(rows): rows for rows in ROWS if rows <= fitting}
    most = max(counts.values())
    context = min(LONG_CONTEXT, room - most, max_positions - most)
    passes = [_Pass(rows) for rows in counts.values()]
    last, long = _Pass(most, scored_from=most - 1), [_Pass(rows, context) for rows in (1, most) if context > 0]
    seconds: dict[_Pass, float] = {}
    for _ in range(ROUNDS):  # in the first round memory is fetched and kernels are chosen
        for each in (*passes, last, *long):
            seconds[each] = min(seconds.get(each, math.inf), _time(verifier, pages, clock, each))
    for each in passes:
        costs.observe_verifying(Work(each.rows), seconds[each])
    costs.learn_unscored(most, seconds[last])
    if long:
        costs.learn_keys(context, seconds[long[0]], most, seconds[long[-1]])


def _time(verifier: Runner, pages: PageTable, clock: Callable[[], float], each: _Pass) -> float:
    lease = pages.open(())
    try:
        pages.grow(lease, each.context + each.rows)
        tree = TokenTree.chain([0] * each.rows)
        plan = StepPlan((Segment(each.context, tree, tuple(lease.pages), each.scored_from),))
        began = clock()
        verifier.forward(plan)
        return clock() - began
    finally:
        pages.close(lease)
