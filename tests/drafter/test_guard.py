"""What a drafter may do wrong, and that it costs guesses only."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from drafter.base import DraftLimits, DraftRequest
from drafter.guard import DrafterGuard
from drafter.scored import ScoredTree
from tests.fakes import AnsweringDrafter, chain
from verifier.sampling import SamplingParams
from verifier.tree import TokenTree

REQUEST = DraftRequest(7, [1, 2, 3], DraftLimits(max_draft=2, draft_top_k=2, max_nodes=3), SamplingParams())
GOOD = ScoredTree.unscored(TokenTree((3, 4, 5), (-1, 0, 0)))


def ask(answer: Mapping[int, Any]) -> tuple[dict[int, ScoredTree], DrafterGuard]:
    guard = DrafterGuard("it", AnsweringDrafter(lambda batch: cast("Mapping[int, ScoredTree]", answer)), 10)
    return guard.collect(guard.start([REQUEST]), 1.0), guard


def test_a_good_tree_passes() -> None:
    trees, guard = ask({7: GOOD})
    assert trees == {7: GOOD}
    assert guard.failures == 0


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param({8: GOOD}, id="unknown sequence"),
        pytest.param({7: ScoredTree.unscored(TokenTree((2, 4), (-1, 0)))}, id="wrong root"),
        pytest.param({7: chain(3, 4, 5, 6)}, id="too deep"),
        pytest.param({7: ScoredTree.unscored(TokenTree((3, 4, 5, 6, 7), (-1, 0, 0, 0, 0)))}, id="too many nodes"),
        pytest.param({7: ScoredTree.unscored(TokenTree((3, 10), (-1, 0)))}, id="id beyond the vocabulary"),
        pytest.param({7: ScoredTree.unscored(TokenTree((3, -1), (-1, 0)))}, id="placeholder id"),
        pytest.param({7: ScoredTree.unscored(TokenTree((3, cast(int, 4.0)), (-1, 0)))}, id="an id that is no integer"),
        pytest.param({7: "a tree"}, id="no tree"),
        pytest.param({7: SimpleNamespace(tree=GOOD.tree)}, id="a tree without shares"),
        pytest.param({7: None}, id="nothing"),
        pytest.param(3, id="no mapping"),
    ],
)
def test_rubbish_is_dropped_and_counted(answer: Any) -> None:
    """Elsewhere placeholders of -1 reached the embedding."""
    trees, guard = ask(answer)
    assert trees == {}
    assert guard.failures == 1


def test_one_bad_tree_does_not_spoil_the_others() -> None:
    trees, guard = ask({7: GOOD, 8: GOOD})
    assert trees == {7: GOOD}
    assert guard.failures == 1


def test_exceptions_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def fail(batch: object) -> Mapping[int, ScoredTree]:
        raise RuntimeError("no such head")

    guard = DrafterGuard("it", AnsweringDrafter(fail), 10)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert guard.collect(guard.start([REQUEST]), 1.0) == {}
    assert guard.failures == 3
    assert len(caplog.records) == 1
    assert "no such head" in caplog.text


def test_a_drafter_that_fails_to_start_or_to_close_does_no_harm() -> None:
    class Dead(AnsweringDrafter):
        def start(self, batch: object) -> int:
            raise ConnectionError

        def close(self, sequence: int) -> None:
            raise ConnectionError

    guard = DrafterGuard("it", Dead(lambda batch: {}), 10)
    assert guard.collect(guard.start([REQUEST]), 1.0) == {}
    guard.close(7)
    assert guard.failures == 2


@pytest.mark.parametrize("ticket", [0, [], None])
def test_tickets_of_any_kind_do_no_harm(ticket: Any) -> None:
    """The second of two open questions with the same ticket raised in the engine, as did a ticket that has no hash."""

    class Careless(AnsweringDrafter):
        def start(self, batch: object) -> int:
            return cast(int, ticket)

        def collect(self, ticket: int, deadline_s: float) -> Mapping[int, ScoredTree]:
            return {7: GOOD}

    guard = DrafterGuard("it", Careless(lambda batch: {}), 10)
    tickets = [guard.start([REQUEST]) for _ in range(2)]
    assert [guard.collect(own, 1.0) for own in tickets] == [{7: GOOD}] * 2
