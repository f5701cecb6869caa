"""Worlds in which time passes as a script says: forward passes, drafts and texts with known prices and chances."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from drafter.base import Drafter, DraftLimits, DraftRequest, InstantDraft, QuickDraft, Ticket
from drafter.growth import TreeBuilder
from drafter.scored import ScoredTree
from drafter.united import UnitedDraft
from tests.fakes import VOCAB_SIZE, FakeVerifier, plain_decoding
from verifier.batch import StepPlan
from verifier.sampling import SamplingParams
from verifier.tree import TokenTree
from workers.config import EngineConfig
from workers.engine import Engine
from workers.measuring.clockwork import ClockworkDraft, ManualClock
from workers.profile import profile
from workers.sequence import Request

Price = Callable[[int], float]  # rows to seconds
Padding = Callable[[int], int]
DraftPrice = Callable[[int, int], float]  # depth and batch to seconds


def staircase(rows: int) -> float:
    """Like a small CPU: six rows cost little more than one."""
    return 0.027 + 0.001 * rows + 0.012 * ((rows - 1) // 6)


def memory_bound(rows: int) -> float:
    """Like a large model on large GPUs: rows are all but free for a while."""
    return 0.030 + 0.00002 * rows + 0.0005 * max(0, rows - 64)


def compute_bound(rows: int) -> float:
    """Each row costs as much as the one before."""
    return 0.001 + 0.004 * rows


def by_level(seconds: float) -> DraftPrice:
    """All sequences' levels together, as if their number did not matter."""
    return lambda depth, batch: seconds * depth


def by_guess(seconds: float) -> DraftPrice:
    """In proportion to depth and batch."""
    return lambda depth, batch: seconds * depth * batch


class ScriptedDraft(InstantDraft):
    """Knows the truth and tells it with probability ``p``, at a price; says what it thinks of itself.

    Attributes:
        p: chance of each guess, may be changed at any time, as may the prices.
        price, per_unread: seconds for the trees of a batch, and for each token that it has not read yet.
        silent: it takes its time and has nothing to say.
        spent: seconds altogether.
    """

    def __init__(
        self, truth: Callable[[Sequence[int]], Sequence[int]], clock: ManualClock, p: float, price: DraftPrice
    ) -> None:
        super().__init__()
        self._truth, self._clock = truth, clock
        self.p, self.price, self.per_unread = p, price, 0.0
        self.silent = False
        self.spent = 0.0
        self._read: dict[int, int] = {}

    def start(self, batch: Sequence[DraftRequest]) -> Ticket:
        self._clock.now += self.work(batch)
        return super().start(batch)

    def work(self, batch: Sequence[DraftRequest]) -> float:
        """The seconds that it takes over these."""
        unread = sum(len(request.ids) - self._read.get(request.sequence, 0) for request in batch)
        self._read |= {request.sequence: len(request.ids) for request in batch}
        levels = max((request.limits.max_draft for request in batch), default=0)
        seconds = self.price(levels, len(batch)) + self.per_unread * unread
        self.spent += seconds
        return seconds

    def propose_all(self, batch: Sequence[DraftRequest]) -> Mapping[int, ScoredTree]:
        return {} if self.silent else super().propose_all(batch)

    def propose(self, request: DraftRequest) -> ScoredTree:
        builder = TreeBuilder(request.ids[-1], request.limits)
        node = 0
        for position, token in enumerate(self._truth(request.ids)[: request.limits.max_draft], start=len(request.ids)):
            right = Random(f"{tuple(request.ids[:3])} {position}").random() < self.p
            child = builder.add(node, token if right else (token + 1) % VOCAB_SIZE, self.p)
            if child is None:
                break
            node = child
        return builder.build()


class QuickScript(QuickDraft):
    """Knows every second stretch of sixteen tokens, as n-grams do where a text is copied."""

    def __init__(self, truth: Callable[[Sequence[int]], Sequence[int]]) -> None:
        super().__init__()
        self._truth = truth

    def propose(self, request: DraftRequest) -> ScoredTree:
        end = len(request.ids)
        known = 16 - end % 16 if end // 16 % 2 else 0
        known = min(known, request.limits.max_draft, request.limits.max_nodes)
        chain = [request.ids[-1], *self._truth(request.ids)[:known]]
        return ScoredTree(TokenTree.chain(chain), (1.0, *[0.95] * (len(chain) - 1)))


class World:
    """An engine on a fake verifier, and a clock that its passes and drafts move on.

    Args:
        drafting: what drafts cost.
        elsewhere: they are made while passes go on.
        quick: there is a quick drafter beside the one that takes time.
        padded: the row count that a pass over so many rows really has.
    """

    def __init__(
        self,
        price: Price,
        *,
        p: float,
        drafting: DraftPrice,
        config: EngineConfig,
        elsewhere: bool = False,
        quick: bool = False,
        padded: Padding = int,
    ) -> None:
        self.clock = ManualClock()
        self.price, self._padded = price, padded
        verifier = FakeVerifier(config.num_pages, config.page_size, config.max_rows, padded)
        verifier.on_forward = self._pass_time
        self.texts: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.drafter = ScriptedDraft(self._truth, self.clock, p, drafting)
        drafter: Drafter = ClockworkDraft(self.drafter, self.clock, drafting) if elsewhere else self.drafter
        if quick:
            drafter = UnitedDraft({"quick": QuickScript(self._truth), "slow": drafter}, VOCAB_SIZE, self.clock)
        self.engine = Engine(verifier, drafter, config, self.clock)

    def requests(self, count: int, max_tokens: int, num_prompt: int = 3) -> list[Request]:
        more = (2,) * (num_prompt - 3)
        requests = [
            Request(f"{i}", (1 + i % 20, 2, 3 + i // 20, *more), SamplingParams(seed=i), max_tokens)
            for i in range(count)
        ]
        for request in requests:
            self.texts[request.prompt_ids[:3]] = (
                *request.prompt_ids,
                *plain_decoding(request.prompt_ids, request.sampling, max_tokens),
            )
        return requests

    def tokens_per_s(self, count: int, max_tokens: int = 150, num_prompt: int = 3) -> float:
        """Of so many requests at the same time."""
        requests = self.requests(count, max_tokens, num_prompt)
        began = self.clock()
        results = self.engine.run(requests)
        return sum(len(result.output_ids) for result in results) / (self.clock() - began)

    @classmethod
    def measured(
        cls,
        price: Price,
        *,
        p: float,
        drafting: DraftPrice,
        depth: int,
        adaptive: bool,
        elsewhere: bool = False,
        quick: bool = False,
        padded: Padding = int,
        **settings: Any,
    ) -> World:
        """One that guesses in chains and waits for them; an adaptive one knows what its passes take.

        Args:
            settings: more of the engine's.
        """
        config = EngineConfig(
            num_pages=1600,
            page_size=8,
            max_rows=96,
            prefix_cache=False,
            limits=DraftLimits(depth, 1, depth),
            draft_deadline_s=1e9,
            adaptive=adaptive,
            **settings,
        )
        world = cls(price, p=p, drafting=drafting, config=config, elsewhere=elsewhere, quick=quick, padded=padded)
        if adaptive:
            profile(world.engine.verifier, world.engine.pages, world.engine.costs, world.clock)
        return world

    def _truth(self, ids: Sequence[int]) -> Sequence[int]:
        return self.texts[tuple(ids[:3])][len(ids) :]

    def _pass_time(self, plan: StepPlan) -> None:
        self.clock.now += self.price(self._padded(plan.num_rows))
