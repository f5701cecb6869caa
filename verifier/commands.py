"""What rank 0 tells the others, as plain integers.

    plan   1, segments, copies, then for each copy: source, target; for each segment: start, scored from, tapped, nodes,
           pages, the nodes' tokens, their parents, the page ids
    moves  2, moves, sources, targets
    beat   3        stop   4

Knows the shape of plans. Knows no collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import islice

from verifier.batch import Moves, Segment, StepPlan
from verifier.tree import TokenTree

PLAN, MOVES = 1, 2


class Signal(Enum):
    """What is said beside the work itself."""

    BEAT = 3  # is everybody there?
    STOP = 4  # nothing more will come


Command = StepPlan | Moves | Signal


def encode(command: Command) -> list[int]:
    match command:
        case Signal():
            return [command.value]
        case Moves(sources, targets):
            return [MOVES, len(sources), *sources, *targets]
        case StepPlan(segments, page_copies):
            numbers = [PLAN, len(segments), len(page_copies)]
            for pair in page_copies:
                numbers += pair
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
    if kind == MOVES:
        (count,) = take(1)
        return Moves(take(count), take(count))
    if kind != PLAN:
        return Signal(kind)
    num_segments, num_copies = take(2)
    copies = tuple((source, target) for source, target in (take(2) for _ in range(num_copies)))
    segments = []
    for _ in range(num_segments):
        start, scored_from, tapped, num_nodes, num_pages = take(5)
        tree = TokenTree(take(num_nodes), take(num_nodes))
        segments.append(Segment(start, tree, take(num_pages), scored_from, bool(tapped)))
    return StepPlan(tuple(segments), copies)
