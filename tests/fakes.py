"""A verifier without a model, drafters that misbehave or remember, and a clock that stands still.

The fake verifier keeps in each slot what a real one's KV is, a function of the token, its position and everything
before it, and reads a row's path back through pages and slots. So a wrong page, a missed copy, a move to the wrong slot
or a reused prefix that is not one changes what it says, as it would change what a model says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from drafter.base import Drafter, DraftRequest
from drafter.scored import ScoredTree
from verifier.batch import Segment, StepPlan
from verifier.features import Fusion
from verifier.sampling import SamplingParams, draw
from verifier.tree import TokenTree
from verifier.verifier import StepOutput
from workers.measuring.clockwork import MODEL

VOCAB_SIZE = 23
_NUM_STATES = 4099
_LOGITS = torch.randn(_NUM_STATES, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))

FAKE_MODEL = replace(MODEL, vocab_size=VOCAB_SIZE, max_positions=4096, eos_token_ids=(1,))


def _state(token: int, position: int, earlier: Sequence[int]) -> int:
    """What a slot holds: as keys and values do, it depends on the whole path. Integers hash alike in every process."""
    return hash((token, position, *earlier))


def _logits(state: int) -> torch.Tensor:
    return _LOGITS[state % _NUM_STATES]


class FakeVerifier:
    """Pure function from a row's path to logits ``[VOCAB_SIZE]``, over slots that really are written and moved.

    Attributes:
        plans: every plan, for tests to look at.
        page_copies: every page copy.
        on_forward: called before each forward pass; may raise.
        closed: whether it was let go.
    """

    config = FAKE_MODEL
    fingerprint = "fake"

    def __init__(self, num_pages: int, page_size: int, max_rows: int = 64, padded: Callable[[int], int] = int) -> None:
        self.page_size = page_size
        self.padded = padded  # rows that a pass over so many really has
        self.max_rows = max_rows
        self.slots = [-1] * (num_pages * page_size)
        self.plans: list[StepPlan] = []
        self.page_copies: list[tuple[int, int]] = []
        self.closed = False
        self._features: dict[str, FakeFeatures] = {}
        self.on_forward: Callable[[StepPlan], None] = lambda plan: None

    def forward(self, plan: StepPlan) -> StepOutput:
        assert plan.num_rows <= self.max_rows, "more rows than the verifier takes"
        self.on_forward(plan)
        self.plans.append(plan)
        written = [slot for segment in plan.segments for slot in self._new_slots(segment)]
        assert len(set(written)) == len(written), "two rows write to the same slot"
        logits = [self._run(segment) for segment in plan.segments]
        return StepOutput(logits, [None for _ in plan.segments])

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        assert len(set(targets)) == len(targets) == len(sources)
        for target, state in zip(targets, [self.slots[source] for source in sources], strict=True):
            self.slots[target] = state
        for features in self._features.values():
            features.move(sources, targets)

    def keep_features(self, fusion: Fusion) -> FakeFeatures:
        return self._features.setdefault(fusion.key, FakeFeatures())

    def drop_features(self, fusion: Fusion) -> None:
        del self._features[fusion.key]

    def close(self) -> None:
        self.closed = True

    def _run(self, segment: Segment) -> torch.Tensor:
        context = [self.slots[self._slot(segment, position)] for position in range(segment.start)]
        states: list[int] = []
        for node, token in enumerate(segment.tree.tokens):
            path = [states[ancestor] for ancestor in segment.tree.paths[node][:-1]]
            states.append(_state(token, segment.start + segment.tree.depths[node], (*context, *path)))
            slot = self._slot(segment, segment.start + node)
            self.slots[slot] = states[-1]
            for features in self._features.values():
                features.rows[slot] = states[-1]
        scored = [_logits(state) for state in states[segment.scored_from :]]
        return torch.stack(scored) if scored else torch.empty(0, VOCAB_SIZE)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.page_copies += pairs
        size = self.page_size
        assert len({target for _, target in pairs}) == len(pairs), "a page is copied over twice"
        sources, targets = (
            [page * size + offset for page in pages for offset in range(size)] for pages in zip(*pairs, strict=True)
        )
        self.move(sources, targets)

    def _new_slots(self, segment: Segment) -> Iterator[int]:
        return (self._slot(segment, segment.start + node) for node in range(len(segment.tree)))

    def _slot(self, segment: Segment, logical: int) -> int:
        return segment.pages[logical // self.page_size] * self.page_size + logical % self.page_size


class FakeFeatures:
    """A slot's feature is its state: it tells the whole path that leads there. What was computed before has none."""

    def __init__(self) -> None:
        self.rows: dict[int, int | None] = {}

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.rows |= dict(zip(targets, [self.rows.get(source) for source in sources], strict=True))

    def read(self, slots: Sequence[int]) -> torch.Tensor:
        return torch.tensor([[self.rows[slot]] for slot in slots], dtype=torch.int64).reshape(-1, 1)


@lru_cache(maxsize=4096)
def plain_decoding(prompt: tuple[int, ...], sampling: SamplingParams, num_tokens: int) -> tuple[int, ...]:
    """What `FakeVerifier` says, by the definition: no pages, no batches, no trees."""
    ids = list(prompt)
    states: list[int] = []
    for _ in range(num_tokens):
        for position in range(len(states), len(ids)):
            states.append(_state(ids[position], position, states))
        ids.append(draw(_logits(states[-1]), sampling, len(ids)).token)
    return tuple(ids[len(prompt) :])


class AnsweringDrafter:
    """Answers with whatever ``answer`` makes of the batch; it may also raise."""

    fusion: Fusion | None = None

    def __init__(self, answer: Callable[[Sequence[DraftRequest]], Mapping[int, ScoredTree]]) -> None:
        self.answer = answer
        self._batches: list[Sequence[DraftRequest]] = []

    def start(self, batch: Sequence[DraftRequest]) -> int:
        self._batches.append(batch)
        return len(self._batches) - 1

    def collect(self, ticket: int, deadline_s: float) -> Mapping[int, ScoredTree]:
        return self.answer(self._batches[ticket])

    def close(self, sequence: int) -> None:
        pass


def chain(*tokens: int) -> ScoredTree:
    """A root and guesses below it, without alternatives."""
    return ScoredTree.unscored(TokenTree.chain(tokens))


class RecordingDrafter:
    """Passes everything on to ``drafter`` and remembers it. Checks what an engine may ask, and when."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.fusion = drafter.fusion
        self.batches: list[tuple[DraftRequest, ...]] = []
        self.open_sessions: set[int] = set()
        self.most_outstanding = 0  # questions
        self._outstanding: dict[int, list[tuple[DraftRequest, tuple[int, ...]]]] = {}

    def start(self, batch: Sequence[DraftRequest]) -> int:
        self.batches.append(tuple(batch))
        sequences = {request.sequence for request in batch}
        asked = {request.sequence for question in self._outstanding.values() for request, _ in question}
        assert not sequences & asked, "a sequence is in two questions"
        self.open_sessions |= sequences
        ticket = self.drafter.start(batch)
        self._outstanding[ticket] = [(request, tuple(request.ids)) for request in batch]
        self.most_outstanding = max(self.most_outstanding, len(self._outstanding))
        return ticket

    def collect(self, ticket: int, deadline_s: float) -> Mapping[int, ScoredTree]:
        for request, ids in self._outstanding.pop(ticket):
            assert tuple(request.ids) == ids, "a text went on while its trees grew"
        return self.drafter.collect(ticket, deadline_s)

    def close(self, sequence: int) -> None:
        self.open_sessions.discard(sequence)
        self.drafter.close(sequence)
