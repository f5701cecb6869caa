"""Promise 1 as a matrix of cases: whatever is guessed, batched, paged, cached or preempted, the ids are the same.

The cases are data, so that the same ones run on a fake verifier in milliseconds and on real models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from random import Random
from typing import Any

from drafter.base import Drafter, DraftLimits, InstantDraft, NoDraft
from drafter.ngram import NgramDraft
from drafter.scripted import Anti, Bushy, FixedIds, Mixed, Oracle
from drafter.united import UnitedDraft
from tests.fakes import RecordingDrafter
from verifier.sampling import SamplingParams
from workers.engine import Engine, EngineConfig
from workers.runner import StepRunner
from workers.sequence import Request

FACTORS: dict[str, tuple[Any, ...]] = {
    "drafter": ("none", "oracle", "anti", "fixed", "mixed", "ngram", "united"),
    "bushy": (False, True),
    "batch": (1, 6),
    "page_size": (1, 4, 16, 32),
    "temperature": (0.0, 1.0),
    "prefix_cache": (True, False),
    "tight": (False, True),
}
NUM_TOKENS = 40
MAX_ROWS = 32


@dataclass(frozen=True)
class Case:
    drafter: str
    bushy: bool
    batch: int
    page_size: int
    temperature: float
    prefix_cache: bool
    tight: bool  # a pool in which the longest request only just fits, so that several preempt one another

    def __str__(self) -> str:
        words = [self.drafter, "tree" if self.bushy else "chain", f"batch{self.batch}", f"page{self.page_size}"]
        words += [f"t{self.temperature:g}", "cache" if self.prefix_cache else "nocache"]
        return "-".join(words + ["tight"] * self.tight)

    @property
    def adaptive(self) -> bool:
        """Half of the cases, with any value of any factor among them, so that the matrix need not be twice as large."""
        return (self.page_size in (1, 16)) != (self.temperature == 0)

    @property
    def lanes(self) -> int:
        """Likewise: with any values of any three factors come one lane and two."""
        return 1 + ((self.page_size in (1, 4)) ^ self.bushy ^ self.prefix_cache ^ self.tight)

    @property
    def overlaps(self) -> bool:
        """Whether trees grow for some while others are verified."""
        return self.lanes > 1 and self.batch > 1

    @property
    def limits(self) -> DraftLimits:
        return DraftLimits(max_draft=5, draft_top_k=3 if self.bushy else 1, max_nodes=14 if self.bushy else 5)


def full() -> list[Case]:
    return [Case(*values) for values in product(*FACTORS.values())]


def pairwise() -> list[Case]:
    """Few cases in which any two values of any two factors meet.

    So do two lanes and every drafter, and two lanes that draft and every way to have and to lose pages.
    """
    cases = full()
    Random(0).shuffle(cases)
    missing = set().union(*map(_meetings, cases))
    chosen = []
    while missing:
        chosen.append(max(cases, key=lambda case: len(missing & _meetings(case))))
        missing -= _meetings(chosen[-1])
    return chosen


def _meetings(case: Case) -> set[tuple[Any, ...]]:
    """What the case is one of the cases for."""
    factors = vars(case) | {"adaptive": case.adaptive, "lanes": case.lanes}
    meetings: set[tuple[Any, ...]] = set(combinations(factors.items(), 2))
    if case.overlaps:
        meetings.add(("overlaps", case.drafter))
        if case.drafter != "none" and not case.adaptive:
            meetings.add(("overlaps", case.page_size == 1, case.prefix_cache, case.tight))
    return meetings


def make_requests(case: Case, vocab_size: int) -> list[Request]:
    """Two thirds of the prompts begin alike, and one of them is no more than that: all of it can be cached and shared.

    Lengths fall on either side of a page's end.
    """
    random = Random(f"{case.batch} {vocab_size}")
    common = tuple(random.randrange(vocab_size) for _ in range(32))
    requests = []
    for i in range(case.batch):
        own = tuple(random.randrange(vocab_size) for _ in range((1, 16, 9, 31, 0, 32)[i]))
        prompt = own if i % 3 == 2 else common + own
        requests.append(Request(str(i), prompt, SamplingParams(temperature=case.temperature, seed=i), NUM_TOKENS))
    return requests


def make_drafter(
    case: Case, requests: Sequence[Request], truth: Mapping[str, Sequence[int]], vocab_size: int
) -> Drafter:
    """``truth``: what plain decoding says, by request id."""
    texts = [(len(request.prompt_ids), (*request.prompt_ids, *truth[request.id])) for request in requests]

    def continuation(ids: Sequence[int]) -> Sequence[int]:
        known = (text for num_prompt, text in texts if num_prompt <= len(ids) and text[: len(ids)] == tuple(ids))
        return next(known, ())[len(ids) :]

    guessing: dict[str, Callable[[], InstantDraft]] = {
        "oracle": lambda: Oracle(continuation),
        "anti": lambda: Anti(continuation, vocab_size=vocab_size),
        "fixed": lambda: FixedIds((3, 1, 4, 1, 5)),
        "mixed": lambda: Mixed(continuation, 0.7, vocab_size=vocab_size),
        "ngram": lambda: NgramDraft(1, 3),
    }

    def create(name: str) -> InstantDraft:
        drafter = guessing[name]()
        return Bushy(drafter, vocab_size=vocab_size) if case.bushy else drafter

    if case.drafter == "none":
        return NoDraft()
    if case.drafter == "united":
        return UnitedDraft({name: create(name) for name in ("mixed", "anti", "ngram")}, vocab_size)
    return create(case.drafter)


def check(
    case: Case,
    create_verifier: Callable[[int, int], StepRunner],
    decode_plainly: Callable[[Request], Sequence[int]],
    vocab_size: int,
) -> None:
    """Serves the case's requests twice with one engine and compares with plain decoding.

    Args:
        create_verifier: from the number of pages and their size.
    """
    requests = make_requests(case, vocab_size)
    longest = max(len(request.prompt_ids) for request in requests) + NUM_TOKENS - 1
    num_pages = -(-longest // case.page_size) * (1 if case.tight else case.batch)
    truth = {request.id: decode_plainly(request) for request in requests}
    drafter = RecordingDrafter(make_drafter(case, requests, truth, vocab_size))
    config = EngineConfig(
        num_pages,
        case.page_size,
        max_rows=MAX_ROWS,
        prefix_cache=case.prefix_cache,
        limits=case.limits,
        adaptive=case.adaptive,
        max_lanes=case.lanes,
    )
    engine = Engine(create_verifier(num_pages, case.page_size), drafter, config)
    for _ in range(2):
        results = engine.run(requests)
        assert {result.request_id: result.output_ids for result in results} == truth
        engine.check_integrity()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    assert not drafter.open_sessions, "a draft session was not closed"
    assert drafter.most_outstanding <= case.lanes
    if case.overlaps and case.drafter != "none" and not case.adaptive:
        assert stats.counters.overlapped_steps > 0
    assert (stats.counters.preemptions > 0) == (case.tight and case.batch > 1)
    assert (stats.counters.cached_tokens > 0) == case.prefix_cache
    _check_speculation(case, engine)


def _check_speculation(case: Case, engine: Engine) -> None:
    """A test of guesses must have guessed, unless it was free to find that this does not pay."""
    speculation = engine.stats().counters.speculation
    assert speculation.accepted_tokens == sum(speculation.accepted_by_position)
    if case.drafter == "none" or not case.adaptive:
        assert (speculation.drafted_tokens > 0) == (case.drafter != "none")
    assert engine.stats().drafter_failures == 0
    if case.drafter == "anti":
        assert speculation.accepted_tokens == 0
    if case.drafter == "oracle" and not case.bushy:
        assert speculation.accepted_by_position == speculation.drafted_by_position
    if case.drafter == "oracle" and case.bushy and not case.adaptive:
        # Pages may run out before the right branch, which is in the middle.
        assert speculation.accepted_tokens > speculation.verified_tokens / 2
