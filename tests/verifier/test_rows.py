"""Row counts: what the self-test finds, and what exact mode pads to."""

from __future__ import annotations

import pytest
import torch

from verifier.errors import DraftreeError
from verifier.rows import CANDIDATES, RowCounts, find_row_counts


def test_pad_takes_the_smallest_count_that_holds() -> None:
    counts = RowCounts((4, 8, 12))
    assert [counts.pad(n) for n in (1, 4, 5, 12)] == [4, 4, 8, 12]
    assert counts.largest == 12
    assert RowCounts.any_up_to(3).pad(2) == 2


def test_counts_that_treat_rows_differently_are_left_out() -> None:
    """A kernel whose remainder code differs: rows beyond a multiple of four come out in other bits."""

    def kernel(x: torch.Tensor) -> torch.Tensor:
        whole = len(x) // 4 * 4
        return torch.cat((x[:whole], x[whole:] * (1 + 1e-6)))

    assert find_row_counts(kernel, width=8, largest=24).counts == (4, 8, 12, 16, 20, 24)


def test_a_kernel_that_knows_places_is_no_yardstick() -> None:
    """Groups of five whose last row goes through other code agree with any group of five, but not with themselves."""

    def kernel(x: torch.Tensor) -> torch.Tensor:
        if len(x) < 8:
            return torch.cat((x[:4], x[4:] * (1 + 1e-6))) if len(x) > 3 else x * (1 + 1e-6)
        return x

    assert min(find_row_counts(kernel, width=8, largest=24).counts) == 4


def test_counts_that_agree_only_among_themselves_are_no_yardstick() -> None:
    """Two and three rows share a kernel of their own: taking them for the truth left no count for a prompt chunk."""
    counts = find_row_counts(lambda x: x * 3 if len(x) >= 4 else x * (3 + 1e-6), width=8, largest=24)
    assert min(counts.counts) == 4
    assert counts.largest == 24


def test_no_count_at_all_is_said() -> None:
    calls = iter(range(10**6))
    with pytest.raises(DraftreeError, match="exact=false"):
        find_row_counts(lambda x: x + next(calls), width=8, largest=8)


@pytest.mark.parametrize("largest", [1, 2, 13, 95, 2047, 4096])
def test_any_step_size_finds_counts(largest: int) -> None:
    """With max_rows=1, 2 or more than 2016 the candidates held nothing or reached not far enough, and the replica died
    saying that the machine's kernels were to blame; and 95 rows could not be used since the count above was not tried.
    """
    counts = find_row_counts(lambda x: x * 3 if len(x) >= 4 else x * (3 + 1e-6), width=2, largest=largest)
    assert min(counts.counts) == 4
    assert counts.largest >= min(largest, max(CANDIDATES))
