"""Who gets rows and pages, and who has to give them back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from drafter.base import DraftLimits
from drafter.scored import ScoredTree
from tests.fakes import chain
from verifier.acceptance import Verdict
from verifier.pages import PageTable
from verifier.sampling import SamplingParams
from verifier.tree import TokenTree
from workers.scheduler import Scheduler, share_rows
from workers.sequence import Request, TokenSequence
from workers.stats import Counters
from workers.step import Step

LIMITS = DraftLimits(max_draft=4, draft_top_k=2, max_nodes=6)


class Desk:
    """A scheduler with numbered sequences, and steps in which every drawn token is 1."""

    def __init__(
        self, *, num_pages: int = 100, page_size: int = 4, max_running: int = 8, max_rows: int = 16, cache: bool = False
    ) -> None:
        self.pages = PageTable(num_pages, page_size, prefix_cache=cache)
        self.scheduler = Scheduler(self.pages, max_running, max_rows, Counters())
        self.sequences: list[TokenSequence] = []

    def add(self, num_prompt: int, max_tokens: int = 50, limits: DraftLimits = LIMITS) -> TokenSequence:
        number = len(self.sequences)
        request = Request(str(number), (number,) * num_prompt, SamplingParams(), max_tokens)
        sequence = TokenSequence(number, request, lambda progress: None, limits, num_prompt + max_tokens)
        self.sequences.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> dict[int, int]:
        """Runs a step without guesses and returns each sequence's rows."""
        step = self.scheduler.schedule()
        for turn in step.turns:
            self.scheduler.commit(turn, self.verdict(step, turn.sequence.number))
        self.pages.check_integrity([s.lease for s in self.scheduler.running if s.lease])
        return rows_of(step)

    def verdict(self, step: Step, number: int) -> Verdict:
        """The chain's own tokens, then a 1."""
        turn = next(turn for turn in step.turns if turn.sequence.number == number)
        tokens = (*turn.tree.tokens[1:], 1)
        return Verdict(tokens, tuple(range(len(tokens))), (9.0,) * len(tokens))


def rows_of(step: Step) -> dict[int, int]:
    return {turn.sequence.number: len(turn.tree) for turn in step.turns}


@given(st.lists(st.integers(1, 300), max_size=12), st.integers(0, 200))
def test_rows_are_shared_without_waste_or_excess(wanted: list[int], room: int) -> None:
    shares = share_rows(wanted, room)
    assert all(0 <= share <= rows for share, rows in zip(shares, wanted, strict=True))
    assert sum(shares) == min(room, sum(wanted))
    if wanted:
        assert shares[0] >= min(wanted[0], room // 2), "the oldest keeps half the speed"


def test_a_short_prompt_behind_a_long_one_gets_its_rows() -> None:
    assert share_rows([1000, 5], 64) == [59, 5]
    assert share_rows([5, 1000], 64) == [5, 59]
    assert share_rows([1000, 1000, 1000], 64) == [32, 16, 16]


def test_decoding_goes_on_beside_a_long_prompt() -> None:
    desk = Desk()
    desk.add(3)
    desk.step()
    desk.add(60)
    assert [desk.step() for _ in range(5)] == [{0: 1, 1: 15}, {0: 1, 1: 15}, {0: 1, 1: 15}, {0: 1, 1: 15}, {0: 1, 1: 1}]


def test_a_long_prompt_does_not_starve_the_next() -> None:
    desk = Desk()
    desk.add(200)
    desk.step()
    desk.add(6)
    assert desk.step() == {0: 10, 1: 6}


def test_admission_is_in_order_of_arrival() -> None:
    """A small request does not overtake a big one for which there is no room yet, or the big one might never run."""
    desk = Desk(num_pages=5, page_size=4)
    desk.add(8)
    desk.add(16)
    desk.add(1)
    desk.step()
    assert [s.number for s in desk.scheduler.running] == [0]


def test_no_more_run_than_allowed() -> None:
    desk = Desk(max_running=2)
    for _ in range(4):
        desk.add(2)
    assert desk.step() == {0: 2, 1: 2}
    desk.scheduler.remove(desk.sequences[0])
    assert desk.step() == {1: 1, 2: 2}


def test_nobody_is_admitted_without_a_row() -> None:
    desk = Desk(max_rows=4)
    for _ in range(6):
        desk.add(10)
    assert desk.step() == {0: 2, 1: 1, 2: 1}
    assert len(desk.scheduler.running) == 3


def test_a_prompt_takes_all_its_pages_at_once() -> None:
    """So it never stops half-way for want of pages, and nobody younger is admitted to pages that it will need."""
    desk = Desk(num_pages=10, page_size=4, max_rows=8)
    desk.add(30)
    desk.add(20)
    assert desk.step() == {0: 8}
    assert desk.pages.num_used == 8


def test_the_latest_arrival_makes_way_and_comes_back_first() -> None:
    desk = Desk(num_pages=3, page_size=4)
    first, second = desk.add(4), desk.add(4)
    assert desk.step() == {0: 4, 1: 4}
    desk.add(1)
    assert desk.step() == {0: 1}, "a page was left for the oldest alone"
    assert [s.number for s in desk.scheduler.waiting] == [1, 2]
    assert (second.preemptions, desk.scheduler.counters.preemptions) == (1, 1)
    assert (second.lease, second.num_pending) == (None, 5)
    for _ in range(3):
        desk.step()
    desk.scheduler.remove(first)
    assert desk.step() == {1: 5, 2: 1}, "what was written is computed again"


def test_whoever_is_the_latest_itself_makes_way() -> None:
    desk = Desk(num_pages=2, page_size=4)
    first, second = desk.add(2), desk.add(4)
    desk.step()
    assert desk.step() == {0: 1}
    assert second.lease is None
    assert first.lease is not None


def test_the_oldest_always_progresses() -> None:
    """However small the pool, if a request fits alone it ends: no two may preempt one another for ever."""
    desk = Desk(num_pages=6, page_size=4, cache=True)
    for _ in range(5):
        desk.add(5, max_tokens=20)
    for _ in range(400):
        desk.step()
        for sequence in [s for s in desk.scheduler.running if s.finish]:
            desk.scheduler.remove(sequence)
    assert not desk.scheduler.has_work
    assert desk.scheduler.counters.preemptions > 0


def test_pages_held_are_those_of_the_committed_tokens() -> None:
    """Elsewhere the tail of a last page was stranded: pages were counted from a length that was not whole pages."""
    desk = Desk(page_size=16)
    sequence = desk.add(3)
    desk.step()
    for run in (1, 2, 3, 4, 5, 1, 4, 3, 2, 5, 5, 5):
        step = desk.scheduler.schedule()
        desk.scheduler.graft(step, {0: chain(sequence.ids[-1], 7, 7, 7, 7)})
        desk.scheduler.commit(step.turns[0], Verdict((7,) * run, tuple(range(run)), (9.0,) * run))
        assert sequence.lease is not None
        assert sequence.lease.num_committed == len(sequence.ids) - 1
        assert len(sequence.lease.pages) == -(-sequence.lease.num_committed // 16)


def test_guesses_get_the_rows_that_remain_in_equal_shares() -> None:
    desk = Desk(max_rows=16)
    for _ in range(3):
        desk.add(2)
    desk.step()
    desk.add(6)
    step = desk.scheduler.schedule()
    assert rows_of(step) == {0: 1, 1: 1, 2: 1, 3: 6}
    requests = desk.scheduler.draft_requests(step)
    assert [(r.sequence, r.limits.max_nodes) for r in requests] == [(0, 2), (1, 2), (2, 3)]


def test_no_room_is_no_guess() -> None:
    desk = Desk(max_rows=8)
    desk.add(2)
    desk.step()
    desk.add(100)
    step = desk.scheduler.schedule()
    assert step.room == 0
    assert desk.scheduler.draft_requests(step) == []


def test_a_single_row_of_room_goes_to_the_oldest() -> None:
    desk = Desk(max_rows=3)
    desk.add(1)
    desk.add(1)
    desk.step()
    step = desk.scheduler.schedule()
    assert [(r.sequence, r.limits.max_nodes) for r in desk.scheduler.draft_requests(step)] == [(0, 1)]


def test_guesses_are_no_deeper_than_the_text_may_grow() -> None:
    """Elsewhere five tokens were drafted with four slots left. The bonus token takes the last place."""
    for max_tokens, depth in ((1, 0), (2, 0), (3, 1), (4, 2), (6, 4), (9, 4)):
        desk = Desk()
        desk.add(2, max_tokens)
        desk.step()  # draws the first
        step = desk.scheduler.schedule() if max_tokens > 1 else Step()
        assert [r.limits.max_draft for r in desk.scheduler.draft_requests(step)] == [depth] * (depth > 0)


def test_who_may_not_guess_is_not_asked() -> None:
    desk = Desk()
    desk.add(2, limits=DraftLimits())
    desk.step()
    assert desk.scheduler.draft_requests(desk.scheduler.schedule()) == []


def test_trees_are_cut_to_free_pages_and_preempt_nobody() -> None:
    desk = Desk(num_pages=4, page_size=2)
    first, second = desk.add(2), desk.add(2)
    desk.step()
    step = desk.scheduler.schedule()
    tree = ScoredTree.unscored(TokenTree((1, 2, 3, 4, 5), (-1, 0, 0, 1, 2)))
    assert desk.pages.num_free == 0
    desk.scheduler.graft(step, {0: tree, 1: tree})
    assert [turn.tree for turn in step.turns] == [TokenTree((1, 2), (-1, 0))] * 2, "one slot is left in each page"
    assert first.lease is not None
    assert second.lease is not None
