"""One step: which sequences take part, with which rows, and how the answer is read.

Knows trees, slots and draws. Knows nothing of queues, budgets or time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from drafter.base import DraftRequest, Ticket
from drafter.scored import ScoredTree
from verifier.acceptance import Typical, Verdict, walk, walk_typically
from verifier.batch import Segment, StepPlan
from verifier.pages import PageLease, PageTable
from verifier.sampling import Draw, draw, process
from verifier.tree import TokenTree
from workers.costs import Work
from workers.policy import Load
from workers.sequence import TokenSequence

PageCopies = tuple[tuple[int, int], ...]  # (source, target)


@dataclass(slots=True)
class Turn:
    """One sequence's part in a step.

    The tree begins as a chain of pending tokens: the last token alone when the sequence decodes, else a prompt chunk.
    Guesses are grafted onto the former only.
    """

    sequence: TokenSequence
    lease: PageLease
    tree: TokenTree
    start: int = field(init=False)  # committed tokens before this step; the tree's root comes next
    num_written: int = field(init=False)  # tokens after the root that are written already and only lack their KV

    def __post_init__(self) -> None:
        self.start = self.lease.num_committed
        self.num_written = len(self.sequence.ids) - self.start - 1

    @property
    def decodes(self) -> bool:
        return self.num_written == 0

    @property
    def scored_from(self) -> int:
        return min(self.num_written, len(self.tree))

    @property
    def stands(self) -> bool:
        """Whether the sequence still holds the pages; it may have ended since, or had to give them back."""
        return self.sequence.lease is self.lease

    def read(self, logits: Tensor, lossy: bool = False) -> Verdict:
        """Walks the tree: a token that is written already is read, any other drawn. ``logits``: [scored, vocab].

        Args:
            lossy: guesses pass if they are typical, which changes the text above temperature 0.
        """
        ids, sampling = self.sequence.ids, self.sequence.request.sampling

        def choose(node: int) -> Draw:
            position = self.start + self.tree.depths[node] + 1
            if position < len(ids):
                return Draw(ids[position], math.inf)
            return draw(logits[node - self.scored_from], sampling, position)

        def typical(node: int) -> Typical:
            return Typical.of(process(logits[node].float().cpu().numpy(), sampling))

        if lossy and self.decodes and not sampling.is_greedy:
            return walk_typically(self.tree, typical, choose)
        return walk(self.tree, choose)


@dataclass(frozen=True, slots=True)
class Question:
    """What the drafter was asked for a step, and when."""

    batch: Sequence[DraftRequest]
    ticket: Ticket
    asked_at: float

    @property
    def asked(self) -> list[DraftRequest]:
        """Those that more than the quick drafters were asked about."""
        return [request for request in self.batch if not request.limits.off]


@dataclass(slots=True)
class Step:
    """What one forward pass is about. ``room`` is what is left of its rows, for guesses; ``drafted`` is all that there
    was to choose from, by sequence; of ``lanes`` steps that are under way at a time this is one.
    """

    room: int = 0
    lanes: int = 1
    turns: list[Turn] = field(default_factory=list)
    page_copies: list[tuple[int, int]] = field(default_factory=list)  # (source, target), to be done at once
    question: Question | None = None
    drafted: Mapping[int, ScoredTree] = field(default_factory=dict)

    def add(self, sequence: TokenSequence, lease: PageLease, num_rows: int, page_copies: PageCopies) -> None:
        """The sequence's next pending tokens take part."""
        start = lease.num_committed
        chunk = TokenTree.chain(sequence.ids[start : start + num_rows])
        self.turns.append(Turn(sequence, lease, chunk))
        self.page_copies += page_copies
        self.room -= num_rows

    @property
    def load(self) -> Load:
        decoding = [turn.start + 1 for turn in self.turns if turn.decodes]
        context = sum(decoding) // len(decoding) if decoding else 0
        return Load(len(decoding), self.work, context, self.lanes)

    @property
    def num_rows(self) -> int:
        return sum(len(turn.tree) for turn in self.turns)

    @property
    def work(self) -> Work:
        """As if each row attended to the keys of its sequence's first one."""
        return Work(
            self.num_rows,
            unscored=sum(turn.scored_from for turn in self.turns),
            read=sum(turn.start + 1 for turn in self.turns),
            pairs=sum(len(turn.tree) * (turn.start + 1) for turn in self.turns),
        )

    def plan(self) -> StepPlan:
        return StepPlan(
            tuple(Segment(turn.start, turn.tree, tuple(turn.lease.pages), turn.scored_from) for turn in self.turns)
        )

    def moves(self, verdicts: Sequence[Verdict], pages: PageTable) -> tuple[list[int], list[int]]:
        """Physical slots, (sources, targets), that bring kept KV into place: the i-th kept node's to start + i."""
        sources: list[int] = []
        targets: list[int] = []
        for turn, verdict in zip(self.turns, verdicts, strict=True):
            for place, node in enumerate(verdict.nodes):
                if node != place:
                    sources.append(pages.slot(turn.lease, turn.start + node))
                    targets.append(pages.slot(turn.lease, turn.start + place))
        return sources, targets
