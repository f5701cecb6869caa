"""Rank 0 and its followers as threads: what is told, what keeps them together, and what parts them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import pytest
import torch

from tests.ranks import Table, ThreadFollowers, ThreadRanks
from verifier.batch import Moves, PageCopies, Segment, StepPlan
from verifier.errors import RankLost
from verifier.lead import Leader, follow
from verifier.ranks import Ranks
from verifier.tree import TokenTree

PLAN = StepPlan((Segment(0, TokenTree.chain((5, 6)), (3,)),))
MOVES, COPIES = Moves((7,), (4,)), PageCopies(((1, 2),))
LIMIT_S, BEAT_S, IDLE_S = 0.8, 0.02, 0.8


class Worker:
    """What a verifier is to its rank: each step has a collective. ``before`` is called first and may take its time."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.done: list[StepPlan | Moves | PageCopies] = []
        self.before: Callable[[], object] = lambda: None

    def forward(self, plan: StepPlan) -> None:
        self.before()
        self.ranks.sum(torch.ones(1))
        self.done.append(plan)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.done.append(Moves(tuple(sources), tuple(targets)))

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.done.append(PageCopies(tuple(pairs)))


class Group:
    """Three ranks. Who is to be silent waits for ``thaw``, which comes when it is killed."""

    def __init__(self) -> None:
        self.table = Table(3)
        self.workers = [Worker(ThreadRanks(self.table, rank)) for rank in range(3)]
        self.thaw = threading.Event()
        self.followers = ThreadFollowers(self.table, kill=self.thaw.set)
        self.reasons: list[str] = []
        for worker in self.workers[1:]:
            self.followers.start(self._life(worker))
        self.leader = Leader(self.workers[0].ranks, self.followers, limit_s=LIMIT_S, beat_s=BEAT_S)
        self.leader.when_lost(self.reasons.append)

    def _life(self, worker: Worker) -> Callable[[], None]:
        return lambda: follow(worker.ranks, worker, limit_s=LIMIT_S, idle_s=IDLE_S)

    def step(self) -> None:
        with self.leader.step(PLAN):
            self.workers[0].forward(PLAN)

    def lost(self) -> str:
        deadline = time.monotonic() + 10
        while not self.reasons and time.monotonic() < deadline:
            time.sleep(0.01)
        (reason,) = self.reasons
        return reason


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group()
    yield group
    group.leader.close()


def test_followers_do_what_they_are_told(group: Group) -> None:
    group.step()
    for command in (COPIES, MOVES):
        with group.leader.step(command):
            pass
    group.step()
    group.leader.close()
    assert [worker.done for worker in group.workers[1:]] == [[PLAN, COPIES, MOVES, PLAN]] * 2
    assert group.followers.fault(0) is None
    assert group.reasons == []


def test_beats_keep_those_who_are_idle(group: Group) -> None:
    """The limit of a step would else end a verifier that nobody asks for a while."""
    time.sleep(2 * IDLE_S)
    group.step()
    group.leader.close()
    assert group.workers[2].done == [PLAN]


def test_a_silent_rank_is_lost_within_the_limit(group: Group) -> None:
    group.workers[2].before = group.thaw.wait
    began = time.monotonic()
    with pytest.raises(RankLost):
        group.step()
    assert time.monotonic() - began < 10
    assert "gone or silent" in group.lost()
    began = time.monotonic()
    with pytest.raises(RankLost):  # at once, however often it is tried
        group.step()
    assert time.monotonic() - began < LIMIT_S


def test_a_rank_that_ends_tells_why(group: Group) -> None:
    def fail() -> None:
        raise ValueError("out of memory")

    group.workers[2].before = fail
    with pytest.raises(RankLost, match="rank 2: out of memory"):
        group.step()
    assert "rank 2: out of memory" in group.lost()


def test_a_rank_that_falls_silent_while_idle_is_found_by_a_beat(group: Group) -> None:
    def wait(part: torch.Tensor) -> torch.Tensor:
        group.thaw.wait()
        return part

    group.workers[1].ranks.sum = wait  # type: ignore[method-assign]
    assert "gone or silent" in group.lost()


def test_a_rank_that_ends_while_idle_is_noticed(group: Group) -> None:
    group.followers.ended.append("rank 1: killed")
    assert group.lost() == "rank 1: killed"


def test_a_step_that_fails_on_rank_0_ends_all(group: Group) -> None:
    """The others stand in the middle of a step that will never be finished."""
    with pytest.raises(RankLost, match="rank 0 failed in a step: MemoryError: no room"), group.leader.step(PLAN):
        raise MemoryError("no room")
    assert "no room" in group.lost()


def test_ctrl_c_in_a_step_stays_one(group: Group) -> None:
    with pytest.raises(KeyboardInterrupt), group.leader.step(PLAN):
        raise KeyboardInterrupt
    assert "KeyboardInterrupt" in group.lost()


def test_who_asks_late_hears_of_it_too(group: Group) -> None:
    group.followers.ended.append("rank 1: killed")
    group.lost()
    late: list[str] = []
    group.leader.when_lost(late.append)
    assert late == group.reasons


def test_a_closed_verifier_takes_no_steps(group: Group) -> None:
    group.leader.close()
    group.leader.close()
    with pytest.raises(RankLost, match="closed"):
        group.step()
    assert group.reasons == []


def test_followers_leave_a_silent_rank_0() -> None:
    """One that was frozen says nothing, and its connections stay open."""
    table = Table(2)
    ended: list[float] = []

    def live() -> None:
        ranks = ThreadRanks(table, 1)
        with suppress(RankLost):
            follow(ranks, Worker(ranks), limit_s=LIMIT_S, idle_s=IDLE_S)
            return
        ended.append(time.monotonic())

    follower = threading.Thread(target=live)
    follower.start()
    ThreadRanks(table, 0).sum(torch.ones(1))
    follower.join(10)
    assert ended
