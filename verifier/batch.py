"""What one forward pass works on: many sequences' prompt chunks and draft trees as one flat list of rows.

A plan is plain integers, so that it can be broadcast to tensor-parallel ranks; `RowLayout` is the same as tensors.
Knows nothing of requests, sampling or scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass

from verifier.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's rows in a step: a prompt chunk (a chain) or a draft tree.

    Node ``i`` has position ``start + tree.depths[i]``, keeps its KV in logical slot ``start + i`` of the sequence
    until the walk has chosen, and attends to the committed tokens ``0..start-1`` and to its path in the tree.
    """

    start: int  # committed tokens, whose KV lies in place in logical slots 0..start-1
    tree: TokenTree
    pages: tuple[int, ...]  # page ids in order; cover logical slots 0..start+len(tree)-1
    scored_from: int = 0  # nodes from here on get logits; len(tree) for none
    tapped: bool = False  # whether hidden states of the tapped layers are returned for these rows

    @property
    def num_scored(self) -> int:
        return len(self.tree) - self.scored_from


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass."""

    segments: tuple[Segment, ...]

    @property
    def num_rows(self) -> int:
        return sum(len(segment.tree) for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Moves:
    """What brings kept nodes' KV into place after a walk: physical slots, moved all at once."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PageCopies:
    """Copy-on-write: whole pages, (source, target) each."""

    pairs: tuple[tuple[int, int], ...]
