"""Row counts at which this machine's kernels give every row the same bits, whatever its neighbours are.

Matrix kernels work on a few rows at a time and treat a remainder with other code, so the same row can differ in its
last bits between a batch of 7 and a batch of 8, and flip a near-tie. A self-test at start-up finds the counts that
agree; exact mode pads every forward pass to one of them. Knows nothing of models.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from verifier.errors import DraftreeError
from verifier.ranks import ALONE, Ranks

FEWEST = 16  # tried even if steps are to be smaller: few-row kernels alone may not agree, and padding helps
# Few enough to be tried in a second, close enough together that padding costs little.
CANDIDATES = (*range(3, 13), 15, 16, 18, 20, 22, *range(24, 61, 6), *range(72, 193, 24), *range(240, 1025, 48))


@dataclass(frozen=True)
class RowCounts:
    """The row counts a forward pass may have, ascending."""

    counts: tuple[int, ...]

    @classmethod
    def any_up_to(cls, largest: int) -> RowCounts:
        """Every count: without exact mode nothing is padded."""
        return cls(tuple(range(1, largest + 1)))

    @property
    def largest(self) -> int:
        return self.counts[-1]

    def pad(self, num_rows: int) -> int:
        """The smallest allowed count that holds ``num_rows`` rows."""
        return self.counts[bisect_left(self.counts, num_rows)]


def find_row_counts(
    block: Callable[[Tensor], Tensor],
    width: int,
    largest: int,
    ranks: Ranks = ALONE,
    device: torch.device | str = "cpu",
) -> RowCounts:
    """Counts at which ``block`` (``[rows, width]`` to ``[rows, any]``, row by row) agrees bitwise, on all ranks.

    Tried are the candidates up to the first that holds ``largest`` rows, or all of them if none does. Every rank tries
    its own block and takes the counts that are good for all, since all pad alike.

    Raises:
        DraftreeError: there is none, so exact mode cannot be had on this machine.
    """
    largest = next((count for count in CANDIDATES if count >= max(largest, FEWEST)), CANDIDATES[-1])
    own = torch.zeros(largest + 1, dtype=torch.int64)
    x = torch.randn(2 * largest, width, generator=torch.Generator().manual_seed(0)).to(device)
    own[list(_agreeing(block, x, largest))] = 1
    counts = tuple((ranks.sum(own) == ranks.size).nonzero().flatten().tolist())
    if not counts or 2 * counts[-1] < largest:
        raise DraftreeError(
            "exact mode needs kernels that treat rows alike, and this machine has none: set exact=false."
        )
    return RowCounts(counts)


def _agreeing(block: Callable[[Tensor], Tensor], x: Tensor, largest: int) -> tuple[int, ...]:
    """Counts of this rank; none if it has none that are of use.

    A count that gives a row the same bits in whichever place it stands is a yardstick; the smallest one whose company
    reaches far enough for prompt chunks is taken (few-row kernels often agree among themselves and with nobody else).
    """
    candidates = [count for count in CANDIDATES if count <= largest]

    def in_groups(count: int, first: int, end: int) -> Tensor:
        return torch.cat([block(x[i : i + count]) for i in range(first, end, count)])[: end - first]

    for yardstick in candidates:
        truth = in_groups(yardstick, 0, largest)
        end = min(largest, 4 * yardstick)
        if not all(torch.equal(in_groups(yardstick, i, end), truth[i:end]) for i in range(1, yardstick)):
            continue
        agreeing = tuple(count for count in candidates if torch.equal(block(x[:count]), truth[:count]))
        if 2 * agreeing[-1] >= largest:
            return agreeing
    return ()
