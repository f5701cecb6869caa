"""The forms that a step could take: who drafts for it and how deep, and what that brings and costs.

Knows what sequences promise, what drafts take, and rows. Does not know which form is best (`workers.weighing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple


class Form(NamedTuple):
    tokens: float  # accepted guesses to expect
    rows: int  # of guesses
    drafting: float  # seconds

    def where_these_draft(self, asked: Sequence[Prospect], depth: int) -> Form:
        """Besides. What it takes to ask them is not in it, only what they read first."""
        return Form(
            self.tokens + sum(each.total(depth) for each in asked),
            self.rows + sum(max(depth, each.rows) for each in asked),
            self.drafting + sum(each.entering for each in asked),
        )


class Prospect(NamedTuple):
    """What one sequence promises. A chain stands for the tree that is not known yet."""

    sequence: int
    tokens: Sequence[float]  # to expect of trees of depth 0, 1, …
    rows: int  # of guesses that are there before anybody else is asked
    entering: float  # seconds to read what others have not seen, shared by all steps to come

    def total(self, depth: int) -> float:
        """Tokens."""
        return self.tokens[min(depth, len(self.tokens) - 1)]

    def gain(self, depth: int) -> float:
        """Tokens, over asking nobody else."""
        return self.total(depth) - self.tokens[0]


class Drafters(NamedTuple):
    """Those that are asked beside the quick drafters, all to the same depth."""

    prospects: Sequence[Prospect]
    depth: int


def forms_of(
    prospects: Sequence[Prospect], token_s: float, asking: Callable[[int, int], float]
) -> dict[Form, Drafters]:
    """What the step could be.

    Args:
        token_s: what a token more is worth, in seconds.
        asking: seconds that it takes to ask for trees so deep of so many.
    """
    nobody = Drafters((), 0)
    forms = {Form(0.0, 0, 0.0): nobody, Form(*_quick(prospects), 0.0): nobody}
    for depth in range(1, max((len(prospect.tokens) for prospect in prospects), default=0)):
        ranked = sorted(prospects, key=lambda each: (each.entering - each.gain(depth) * token_s, -each.sequence))
        known = Form(0.0, 0, 0.0)
        for start, count in pairwise((0, *doublings(len(ranked)))):
            known = known.where_these_draft(ranked[start:count], depth)
            drafting = known.drafting + asking(depth, count)
            for more_tokens, more_rows in (_quick(ranked[count:]), (0.0, 0)):
                form = Form(known.tokens + more_tokens, known.rows + more_rows, drafting)
                forms.setdefault(form, Drafters(ranked[:count], depth))
    return forms


def _quick(prospects: Iterable[Prospect]) -> tuple[float, int]:
    """Tokens and rows of what is there before anybody else is asked."""
    each = [(prospect.tokens[0], prospect.rows) for prospect in prospects]
    return sum(tokens for tokens, _ in each), sum(rows for _, rows in each)


def doublings(total: int) -> list[int]:
    """1, 2, 4, … and all."""
    return [*(1 << power for power in range(total.bit_length()) if 1 << power < total), *([total] if total else [])]
