"""Several drafters as one: their guesses in one tree, each with its chance of being accepted as experience has it.

What comes back from drafters are opinions. Each is turned into a probability by what became of the drafter's earlier
guesses, and those that several drafters made are joined. What became of a tree the next request tells: its ids go on
where the last one's ended. Knows ids, shares and outcomes. Knows neither how drafters come to their guesses nor what
these cost.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING

from drafter.base import Drafter, DraftRequest, QuickDraft, Ticket
from drafter.calibration import Calibration, Kind
from drafter.guard import DrafterGuard
from drafter.scored import ScoredTree
from verifier.errors import BadSetting
from verifier.tree import TokenTree

if TYPE_CHECKING:
    from verifier.features import Fusion

MAX_SEQUENCES = 1_024  # whose last tree is remembered; the one used longest ago is forgotten
_CHECKED_TOKENS = 16


class UnitedDraft:
    """A drafter made of drafters, by name. None of them can hurt: see `DrafterGuard`.

    The quick ones are asked before the others, so that what they say may decide how far the others shall guess. Each is
    asked for all that the limits allow, and the likeliest of all guesses are handed on, the likeliest first.

    Attributes:
        fusion: the one among the drafters; those that read no features have none.
        calibration: what was learnt. Deterministic: it follows from the texts and the trees alone.
        late: collects that took longer than their deadline.
        heard: sequences that others than the quick ones had guesses about, in the last answer.

    Raises:
        BadSetting: two of them read different features.
    """

    def __init__(
        self, sources: Mapping[str, Drafter], vocab_size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        fusions = {source.fusion.key: source.fusion for source in sources.values() if source.fusion}
        if len(fusions) > 1:
            allowed = "drafters that read the same hidden states of the target, if any"
            raise BadSetting("draft_model", "+".join(sources), allowed)
        self.fusion: Fusion | None = next(iter(fusions.values()), None)
        self.calibration = Calibration()
        self.late = 0
        self.heard: Set[int] = frozenset()
        self._earlier_failures = 0
        self._sources = {name: DrafterGuard(name, source, vocab_size) for name, source in sources.items()}
        self._quick = [name for name, source in sources.items() if isinstance(source, QuickDraft)]
        self._clock = clock
        self._tickets = count()
        self._asked: dict[Ticket, _Question] = {}
        self._memories: OrderedDict[int, _Memory] = OrderedDict()

    @property
    def has_quick(self) -> bool:
        """Whether there is anybody to `glance`."""
        return bool(self._quick)

    @property
    def has_others(self) -> bool:
        """Whether there is anybody who takes time."""
        return len(self._quick) < len(self._sources)

    @property
    def failures(self) -> int:
        """Exceptions of all drafters, and trees that could not be used."""
        return self._earlier_failures + sum(source.failures for source in self._sources.values())

    @classmethod
    def of(cls, drafter: Drafter, vocab_size: int, clock: Callable[[], float] = time.monotonic) -> UnitedDraft:
        """``drafter`` itself if it is united already, else united with none."""
        return drafter if isinstance(drafter, cls) else cls({"drafter": drafter}, vocab_size, clock)

    def succeed(self, other: UnitedDraft) -> None:
        """Goes on counting where ``other``, whose place it takes, has ended."""
        self.late += other.late
        self._earlier_failures += other.failures

    def glance(self, batch: Sequence[DraftRequest]) -> Glance:
        """What the quick ones guess, for `start` to go on from."""
        self._learn(batch)
        tickets = {name: self._sources[name].start(batch) for name in self._quick}
        answers = {name: self._sources[name].collect(ticket, 0.0) for name, ticket in tickets.items()}
        united = {request.sequence: self._unite(request, answers) for request in batch}
        return Glance(answers, {sequence: each for sequence, each in united.items() if each})

    def start(self, batch: Sequence[DraftRequest], glance: Glance | None = None) -> Ticket:
        """
        Args:
            batch: with limits for the others than the quick ones; with no room at all, these are not asked about it.
            glance: what the quick ones said about these sequences, and perhaps about more; None: they are asked now.
        """
        quick = self.glance(batch) if glance is None else glance
        self._learn(batch)
        asked = [request for request in batch if not request.limits.off]
        others = {name: source for name, source in self._sources.items() if name not in self._quick}
        tickets = {name: source.start(asked) for name, source in others.items()} if asked else {}
        ticket = next(self._tickets)
        self._asked[ticket] = _Question(tuple(batch), quick, tickets)
        return ticket

    def collect(self, ticket: Ticket, deadline_s: float) -> Mapping[int, ScoredTree]:
        question = self._asked.pop(ticket)
        ends = self._clock() + deadline_s
        answers = {
            name: self._sources[name].collect(own, max(0.0, ends - self._clock()))
            for name, own in question.tickets.items()
        }
        self.late += self._clock() > ends
        self.heard = {sequence for trees in answers.values() for sequence in trees}
        everybody = {**question.quick.answers, **answers}
        said = {name: everybody[name] for name in self._sources if name in everybody}
        trees: dict[int, ScoredTree] = {}
        for request in question.batch:
            sequence = request.sequence
            united = self._unite(request, said) if sequence in self.heard else question.quick.united.get(sequence)
            if united:
                trees[sequence] = self._remember(request, united)
        for sequence in question.ended:  # nothing more will be written that could tell which guesses were right
            self._memories.pop(sequence, None)
        return trees

    def close(self, sequence: int) -> None:
        self._memories.pop(sequence, None)
        for question in self._asked.values():
            question.ended.add(sequence)
        for source in self._sources.values():
            source.close(sequence)

    def _learn(self, batch: Sequence[DraftRequest]) -> None:
        """What became of the last guesses about these sequences."""
        for request in batch:
            if memory := self._memories.pop(request.sequence, None):
                memory.union.teach(self.calibration, memory.written_since(request.ids))

    def _unite(self, request: DraftRequest, answers: Mapping[str, Mapping[int, ScoredTree]]) -> _United | None:
        """None if nobody has guesses about it."""
        union = _Union(request.ids[-1])
        for name, trees in answers.items():
            if tree := trees.get(request.sequence):
                union.add(name, tree)
        if len(union.nodes) == 1:
            return None
        return _United(union, union.judge(self.calibration, sampled=not request.sampling.is_greedy))

    def _remember(self, request: DraftRequest, united: _United) -> ScoredTree:
        """The likeliest guesses; all of them are remembered until it is known which were right."""
        tail = tuple(request.ids[-_CHECKED_TOKENS:])
        self._memories[request.sequence] = _Memory(len(request.ids), tail, united.union)
        if len(self._memories) > MAX_SEQUENCES:
            self._memories.popitem(last=False)
        return united.scored.likeliest(request.limits.max_nodes, request.limits.draft_top_k)


@dataclass(frozen=True)
class Glance:
    """What quick drafters guess about some sequences.

    Attributes:
        answers: by drafter and sequence.
        united: by sequence; those that there are any guesses about.
    """

    answers: Mapping[str, Mapping[int, ScoredTree]]
    united: Mapping[int, _United]

    @cached_property
    def trees(self) -> Mapping[int, ScoredTree]:
        """All their guesses, by sequence."""
        return {sequence: each.scored for sequence, each in self.united.items()}


@dataclass(frozen=True, slots=True)
class _Question:
    batch: tuple[DraftRequest, ...]
    quick: Glance
    tickets: Mapping[str, Ticket | None]  # of those that are not quick
    ended: set[int] = field(default_factory=set)  # sequences, since it was asked


@dataclass(frozen=True, slots=True)
class _United:
    """Guesses of one or several drafters in one tree, and what is thought of them."""

    union: _Union
    scored: ScoredTree


@dataclass(slots=True)
class _Node:
    """A guess, or the root, with all that is thought of it."""

    number: int
    parent: int
    token: int
    depth: int
    opinions: dict[str, float] = field(default_factory=dict)  # the shares that drafters give it
    claims: list[tuple[Kind, float]] = field(default_factory=list)  # what its outcome will be evidence for
    children: dict[int, _Node] = field(default_factory=dict)  # by token


class _Union:
    """Trees on the same root in one: nodes that several of them have are there once."""

    def __init__(self, root: int) -> None:
        self.nodes = [_Node(0, -1, root, 0)]

    def add(self, name: str, scored: ScoredTree) -> None:
        """The tree of the drafter of that name."""
        places = [self.nodes[0]]
        tree = scored.tree
        for token, parent, share in zip(tree.tokens[1:], tree.parents[1:], scored.shares[1:], strict=True):
            node = self._child(places[parent], token)
            node.opinions[name] = share
            places.append(node)

    def judge(self, calibration: Calibration, *, sampled: bool) -> ScoredTree:
        """All nodes with the shares that experience gives them."""
        shares = [1.0] * len(self.nodes)
        for parent in self.nodes:
            voices = [*dict.fromkeys(name for node in parent.children.values() for name in node.opinions)]
            for node in parent.children.values():
                shares[node.number] = _judge_node(node, voices, calibration, sampled)
            total = sum(shares[node.number] for node in parent.children.values())
            for node in parent.children.values():
                shares[node.number] /= max(1.0, total)
        tree = TokenTree(tuple(node.token for node in self.nodes), tuple(node.parent for node in self.nodes))
        return ScoredTree(tree, tuple(shares))

    def teach(self, calibration: Calibration, written: Iterable[int]) -> None:
        """What was written after the root tells about the guesses at these tokens, and about no others."""
        node = self.nodes[0]
        for token in written:
            for child in node.children.values():
                for kind, share in child.claims:
                    calibration.observe(kind, share, child.token == token)
            if token not in node.children:
                return
            node = node.children[token]

    def _child(self, parent: _Node, token: int) -> _Node:
        if token not in parent.children:
            node = _Node(len(self.nodes), parent.number, token, parent.depth + 1)
            parent.children[token] = node
            self.nodes.append(node)
        return parent.children[token]


def _judge_node(node: _Node, voices: Sequence[str], calibration: Calibration, sampled: bool) -> float:
    """Its calibrated share. ``voices``: the drafters that guess at this token, though perhaps not this one."""
    node.claims = [(Kind(name, sampled, node.depth), share) for name, share in node.opinions.items()]
    shares = [calibration.estimate(kind, share) for kind, share in node.claims]
    if len(voices) == 1:
        return shares[0]
    # Drafters that agree are more often right than either is by itself, and one that is contradicted less often; by how
    # much depends on how alike they are. So it is learnt, for each way in which they can agree or differ, starting from
    # what would be so if they erred independently.
    others = [name for name in voices if name not in node.opinions]
    who = "+".join(node.opinions) + "".join(f", not {name}" for name in others)
    claim = Kind(who, sampled, node.depth), 1.0 - math.prod(1.0 - share for share in shares)
    node.claims.append(claim)
    return calibration.estimate(*claim)


@dataclass(frozen=True, slots=True)
class _Memory:
    """Guesses that were handed out, and where the text ended then."""

    num_ids: int
    tail: tuple[int, ...]
    union: _Union

    def written_since(self, ids: Sequence[int]) -> Sequence[int]:
        """What ``ids`` add to that text; nothing if they are another text, as far as its end tells."""
        start = self.num_ids - len(self.tail)
        return ids[self.num_ids :] if tuple(ids[start : self.num_ids]) == self.tail else ()
