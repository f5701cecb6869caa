"""What rank 0 tells the others, as plain integers.

    plan    1, segments, then for each: start, scored from, tapped, nodes, pages, the nodes' tokens, their parents, the
            page ids
    moves   2, moves, the sources, the targets
    copies  3, copies, the sources, the targets
    beat    4        stop  5

Knows the shape of plans. Knows no collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import islice

from verifier.batch import Moves, PageCopies, Segment, StepPlan
from verifier.tree import TokenTree

PLAN, MOVES, COPIES = 1, 2, 3


class Signal(Enum):
    """What is said beside the work itself."""

    BEAT = 4  # is everybody there?
    STOP = 5  # nothing more will come


Command = StepPlan | Moves | PageCopies | Signal


def encode(command: Command) -> list[int]:
    match command:
        case Signal():
            return [command.value]
        case Moves(sources, targets):
            return [MOVES, len(sources), *sources, *targets]
        case PageCopies(pairs):
            return [COPIES, len(pairs), *(source for source, _ in pairs), *(target for _, target in pairs)]
        case StepPlan(segments):
            numbers = [PLAN, len(segments)]
            for segment in segments:
                tree, pages = segment.tree, segment.pages
                numbers += (segment.start, segment.scored_from, segment.tapped, len(tree), len(pages))
                numbers += (*tree.tokens, *tree.parents, *pages)
            return numbers


def decode(numbers: Sequence[int]) -> Command:
    stream = iter(numbers)

    def take(count: int) -> tuple[int, ...]:
        return tuple(islice(stream, count))

    (kind,) = take(1)
    if kind not in (PLAN, MOVES, COPIES):
        return Signal(kind)
    (count,) = take(1)
    if kind == MOVES:
        return Moves(take(count), take(count))
    if kind == COPIES:
        return PageCopies(tuple(zip(take(count), take(count), strict=True)))
    segments = []
    for _ in range(count):
        start, scored_from, tapped, num_nodes, num_pages = take(5)
        tree = TokenTree(take(num_nodes), take(num_nodes))
        segments.append(Segment(start, tree, take(num_pages), scored_from, bool(tapped)))
    return StepPlan(tuple(segments))
