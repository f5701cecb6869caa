"""The tensors of the KV cache: what is copied where, on every layer, when sources and targets overlap."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from verifier.pages import PageTable
from verifier.pool import PagePool


def filled_pool(num_pages: int, page_size: int, dtype: torch.dtype = torch.float32) -> PagePool:
    """Three layers, two heads of five, every number different."""
    pool = PagePool(num_pages, page_size, num_layers=3, num_kv_heads=2, head_dim=5, dtype=dtype)
    pool.keys.copy_(torch.arange(pool.keys.numel()).view_as(pool.keys))
    pool.values.copy_(-pool.keys)
    return pool


def assert_rows_come_from(pool: PagePool, before: tuple[Tensor, Tensor], origin: list[int]) -> None:
    """Slot ``i`` holds on every layer what slot ``origin[i]`` held before."""
    assert torch.equal(pool.keys, before[0][:, origin])
    assert torch.equal(pool.values, before[1][:, origin])


def test_shapes_and_dtypes() -> None:
    for dtype in (torch.float32, torch.float16):
        pool = PagePool(7, 4, num_layers=3, num_kv_heads=2, head_dim=5, dtype=dtype)
        assert pool.keys.shape == pool.values.shape == (3, 28, 2, 5)
        assert pool.keys.dtype == pool.values.dtype == dtype
        assert not pool.keys.any()
        assert not pool.values.any()
    assert PagePool(1, 1, num_layers=1, num_kv_heads=1, head_dim=1).keys.dtype == torch.float32


@pytest.mark.parametrize(
    ("sources", "targets"),
    [
        ([], []),
        ([3], [3]),
        ([2, 3, 4], [1, 2, 3]),  # kept nodes slide towards the front
        ([1, 2, 3], [2, 3, 4]),
        ([0, 1, 2, 3], [3, 2, 1, 0]),
        ([5, 5, 5], [0, 5, 9]),
    ],
)
def test_moves_read_everything_before_they_write(sources: list[int], targets: list[int]) -> None:
    """Moved one after the other, a kept node overwrites the next one before that has been read."""
    pool = filled_pool(5, 2)
    before = pool.keys.clone(), pool.values.clone()
    pool.move(sources, targets)
    origin = list(range(10))
    for source, target in zip(sources, targets, strict=True):
        origin[target] = source
    assert_rows_come_from(pool, before, origin)


def test_a_move_needs_as_many_targets_as_sources() -> None:
    with pytest.raises(ValueError, match="zip"):
        filled_pool(5, 2).move([1, 2], [3])


@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
def test_any_move_and_any_copy_of_pages(page_size: int) -> None:
    dice = random.Random(page_size)
    pool = filled_pool(6, page_size)
    num_slots = 6 * page_size
    for _ in range(30):
        before, origin = (pool.keys.clone(), pool.values.clone()), list(range(num_slots))
        targets = dice.sample(range(num_slots), dice.randint(0, num_slots))
        sources = dice.choices(range(num_slots), k=len(targets))
        pool.move(sources, targets)
        for source, target in zip(sources, targets, strict=True):
            origin[target] = source
        assert_rows_come_from(pool, before, origin)

        before, origin = (pool.keys.clone(), pool.values.clone()), list(range(num_slots))
        pairs = [(dice.randrange(6), dice.randrange(6)) for _ in range(dice.randint(0, 8))]
        pool.copy_pages(pairs)
        for source, target in pairs:
            for offset in range(page_size):
                origin[target * page_size + offset] = source * page_size + offset
        assert_rows_come_from(pool, before, origin)


def test_the_later_of_two_copies_to_a_page_counts() -> None:
    """A sequence preempted after it grew leaves its copy in the plan, and its page goes to the next one."""
    pool = filled_pool(4, 2)
    before = pool.keys.clone(), pool.values.clone()
    pool.copy_pages([(0, 3), (1, 3)])
    assert_rows_come_from(pool, before, [0, 1, 2, 3, 4, 5, 2, 3])


def test_the_table_and_the_pool_agree_on_what_a_fork_reads() -> None:
    table, pool = PageTable(num_pages=4, page_size=4), filled_pool(4, 4)
    lease = table.open([])
    table.grow(lease, 6)
    table.commit(lease, range(6))
    fork = table.fork(lease)
    pool.copy_pages(table.grow(fork, 7))
    pool.keys[:, table.slot(fork, 6)] = -1
    ours = [table.slot(lease, logical) for logical in range(6)]
    theirs = [table.slot(fork, logical) for logical in range(6)]
    assert ours[:4] == theirs[:4]
    assert ours[4:] != theirs[4:]
    assert torch.equal(pool.keys[:, ours], pool.keys[:, theirs])
    assert torch.equal(pool.values[:, ours], pool.values[:, theirs])
    assert (pool.keys >= 0).sum() == pool.keys.numel() - 3 * 2 * 5  # nothing else was written
