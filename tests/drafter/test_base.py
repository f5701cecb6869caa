from __future__ import annotations

import pytest

from drafter.base import DraftLimits, DraftRequest, InstantDraft, NoDraft
from drafter.scored import ScoredTree
from tests.drafter.requests import request
from verifier.tree import TokenTree

CHAIN = DraftLimits(3, 1, 3)


class Repeat(InstantDraft):
    """Proposes the last token again, unless it is 0."""

    def propose(self, request: DraftRequest) -> ScoredTree:
        last = request.ids[-1]
        return ScoredTree.unscored(TokenTree.chain([last, last] if last else [last]))


def test_no_draft_leaves_everything_out() -> None:
    drafter = NoDraft()
    assert drafter.collect(drafter.start([request([1], CHAIN)]), 0.0) == {}
    drafter.close(1)


def test_questions_that_get_no_guesses_are_told_apart() -> None:
    """Two open ones had the same ticket, so whoever kept them by ticket lost the first."""
    drafter = NoDraft()
    first, second = (drafter.start([request([1], CHAIN, sequence)]) for sequence in (1, 2))
    assert first != second
    assert drafter.collect(second, 0.0) == drafter.collect(first, 0.0) == {}


@pytest.mark.parametrize("off", [DraftLimits(), DraftLimits(0, 1, 1), DraftLimits(1, 0, 1), DraftLimits(1, 1, 0)])
def test_a_sequence_that_may_not_guess_is_left_out(off: DraftLimits) -> None:
    drafter = Repeat()
    ticket = drafter.start([request([7], off, 1), request([8], CHAIN, 2)])
    assert drafter.collect(ticket, 0.0) == {2: ScoredTree.unscored(TokenTree.chain([8, 8]))}


def test_a_tree_without_guesses_is_left_out() -> None:
    drafter = Repeat()
    assert drafter.collect(drafter.start([request([0], CHAIN)]), 0.0) == {}


def test_tickets_may_be_collected_in_any_order() -> None:
    drafter = Repeat()
    first, second = drafter.start([request([7], CHAIN)]), drafter.start([request([8], CHAIN)])
    assert drafter.collect(second, 0.0) == {1: ScoredTree.unscored(TokenTree.chain([8, 8]))}
    assert drafter.collect(first, 0.0) == {1: ScoredTree.unscored(TokenTree.chain([7, 7]))}
    drafter.close(99)
