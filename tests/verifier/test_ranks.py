"""Models that are split over ranks, which are threads here, against whole ones; and the collectives by themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.models import save_tiny_model
from tests.ranks import leading, on_all
from tests.verifier.test_model import PROMPT, TOLERANCE, forward, pages_for, random_tree
from verifier.batch import Segment
from verifier.collectives import HEADER, ProcessRanks
from verifier.errors import RankLost
from verifier.ranks import ALONE, Ranks
from verifier.rows import find_row_counts
from verifier.tree import TokenTree
from verifier.verifier import Verifier

SETTINGS = {"num_pages": 128, "page_size": 4, "max_rows": 96}
SPLITS = [
    ("smollm2", 3, {}),  # tied head, 160 ids
    ("llama3", 2, {}),  # a head of its own
    ("llama-biased", 4, {"vocab_size": 161}),  # two ranks to a KV head, the last part of the vocabulary is shorter
    ("qwen2", 4, {"num_key_value_heads": 1}),
    ("qwen3", 2, {}),  # norms on q and k
    ("mistral", 2, {}),
]


@pytest.mark.parametrize(("family", "size", "changes"), SPLITS)
def test_ranks_together_say_what_one_says(family: str, size: int, changes: dict[str, int], tmp_path: Path) -> None:
    """Prompt chunks and a tree; on rank 0 the residual stream is whole, too. Sums round otherwise, so not bitwise."""
    folder = save_tiny_model(tmp_path / "m", family, **changes)
    pages = pages_for(len(PROMPT) + 16, 4)
    segments = [
        Segment(0, TokenTree.chain(PROMPT[:33]), pages),
        Segment(33, TokenTree.chain(PROMPT[33:66]), pages),
        Segment(66, random_tree(PROMPT[66], 16, seed=3), pages, tapped=True),
    ]
    alone = Verifier.load(folder, **SETTINGS)  # type: ignore[arg-type]
    expected = [forward(alone, segment)[0] for segment in segments]
    with leading(folder, size, **SETTINGS) as verifier:
        for segment, logits in zip(segments, expected, strict=True):
            torch.testing.assert_close(forward(verifier, segment)[0], logits, atol=TOLERANCE, rtol=0)
        assert verifier.fingerprint == f"{alone.fingerprint}-tp{size}"
        assert verifier.pool.keys.nbytes == alone.pool.keys.nbytes / min(size, alone.config.num_kv_heads)
        normed = torch.randn(4, alone.config.hidden_size)
        assert torch.equal(verifier.model.head(normed), alone.model.head(normed))  # for drafters, on rank 0 alone
        assert torch.equal(verifier.model.embedding, alone.model.embedding)


@pytest.mark.parametrize(("family", "size"), [("smollm2", 3), ("llama-biased", 2)])
def test_exact_mode_gives_the_same_bits_however_rows_are_batched(family: str, size: int, tmp_path: Path) -> None:
    """A ring adds up in an order that depends on a tensor's size: a row could then differ with its neighbours."""
    with leading(save_tiny_model(tmp_path / "m", family), size, **SETTINGS) as verifier:
        pages, fresh = pages_for(80, 4), pages_for(120, 4, seed=2)
        one_by_one = [
            forward(verifier, Segment(start, TokenTree.chain([token]), pages))[0] for start, token in enumerate(PROMPT)
        ]
        chunked = forward(verifier, Segment(0, TokenTree.chain(PROMPT[:61]), fresh))[0]
        assert torch.equal(chunked, torch.cat(one_by_one[:61]))
        tree = TokenTree((PROMPT[61], 7, PROMPT[62], 9, PROMPT[63]), (-1, 0, 0, 1, 2))
        logits = forward(verifier, Segment(61, tree, fresh))[0]
        assert torch.equal(logits[[0, 2, 4]], torch.cat(one_by_one[61:64]))


def test_kept_nodes_move_on_all_ranks(tmp_path: Path) -> None:
    with leading(save_tiny_model(tmp_path / "m"), 3, **SETTINGS) as verifier:
        pages, other = pages_for(40, 4), pages_for(40, 4, seed=2)
        forward(verifier, Segment(0, TokenTree.chain(PROMPT[:10]), pages))
        forward(verifier, Segment(10, TokenTree((PROMPT[10], 7, PROMPT[11]), (-1, 0, 0)), pages))
        verifier.move([pages[3] * 4], [pages[2] * 4 + 3])
        moved = forward(verifier, Segment(12, TokenTree.chain([33]), pages))[0]
        forward(verifier, Segment(0, TokenTree.chain(PROMPT[:12]), other))
        assert torch.equal(moved, forward(verifier, Segment(12, TokenTree.chain([33]), other))[0])


def test_row_counts_are_those_that_suit_every_rank() -> None:
    """A rank that pads otherwise would enter the collectives with other shapes."""

    def kernel(multiple: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def block(x: torch.Tensor) -> torch.Tensor:
            whole = len(x) // multiple * multiple
            return torch.cat((x[:whole], x[whole:] * (1 + 1e-6)))

        return block

    found = on_all(2, lambda ranks: find_row_counts(kernel(4 + 2 * ranks.rank), width=8, largest=24, ranks=ranks))
    assert {counts.counts for counts in found} == {(12, 24)}


def test_alone_costs_nothing() -> None:
    part = torch.ones(2, 3)
    assert ALONE.sum(part) is part
    assert ALONE.gather(part) is part
    assert ALONE.broadcast((1, 2)) == (1, 2)


# ── over sockets ─────────────────────────────────────────────────────────────────────────────────────────────────────


def on_sockets(size: int, work: Callable[[Ranks], object]) -> list[object]:
    """What ``work`` gives, or raises, on each rank."""
    store, results = HashStore(), [None] * size
    store.set_timeout(timedelta(seconds=30))

    def run(rank: int) -> None:
        try:
            results[rank] = work(ProcessRanks(store, rank, size))  # type: ignore[call-overload]
        except RankLost as error:
            results[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return list(results)


def test_sums_are_made_in_rank_order_whatever_the_shape() -> None:
    """In fp32 1e8 + 1 - 1e8 is 0, and 1e8 - 1e8 + 1 is 1; a ring's order changes with the size and along it."""
    shapes = [(rows, 24) for rows in (1, 2, 3, 7, 32)] + [(1,), (96, 576)]

    def work(ranks: Ranks) -> list[torch.Tensor]:
        return [ranks.sum(torch.full(shape, (1e8, 1.0, -1e8)[ranks.rank])) for shape in shapes]

    for sums in on_sockets(3, work):
        assert isinstance(sums, list)
        for shape, total in zip(shapes, sums, strict=True):
            assert torch.equal(total, torch.zeros(shape))


def test_gather_and_broadcast() -> None:
    long = list(range(3 * HEADER))

    def work(ranks: Ranks) -> tuple[torch.Tensor, list[list[int]]]:
        gathered = ranks.gather(torch.tensor([[ranks.rank, 10 + ranks.rank]] * 2))
        said = [[7, -1], [], long[:HEADER], long[: HEADER + 1], long]
        return gathered, [list(ranks.broadcast(numbers if ranks.rank == 0 else (5,))) for numbers in said]

    first, *others = on_sockets(3, work)
    assert isinstance(first, tuple)
    assert first[0].tolist() == [[0, 10, 1, 11, 2, 12]] * 2
    for rank in (first, *others):
        assert isinstance(rank, tuple)
        assert rank[1] == [[7, -1], [], long[:HEADER], long[: HEADER + 1], long]


def test_a_rank_that_does_not_come_is_lost_in_time() -> None:
    """One rank skips a collective: the others neither hang nor wait for torch's half an hour."""

    def work(ranks: Ranks) -> float:
        ranks.sum(torch.ones(1))  # all are there
        ranks.limit_s = 0.5
        began = time.monotonic()
        if ranks.rank < 2:
            with pytest.raises(RankLost, match="gone or silent"):
                ranks.sum(torch.ones(1))
        with pytest.raises(RankLost):
            ranks.broadcast((1,))
        return time.monotonic() - began

    assert all(isinstance(taken, float) and taken < 10 for taken in on_sockets(3, work))
