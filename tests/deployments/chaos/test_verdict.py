"""What a chaos run calls a broken promise."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from deployments.chaos.faults import FAULTS, schedule
from deployments.chaos.gap import decode, gap
from deployments.chaos.health import Statement
from deployments.chaos.load import Answer, Question, questions
from deployments.chaos.verdict import Event, Verdict
from workers.measuring.tiny import byte_text, make_tiny_model
from workers.stats import NEAR_TIE

ASKED = questions(4)
TRUTH = {question.number: f"text {question.number}" for question in ASKED}
GOOD = [Answer(question, TRUTH[question.number], "", 0.0, 1.0) for question in ASKED]
BOTH = frozenset("ab")


def statement(well: bool, before: frozenset[str], after: frozenset[str]) -> Statement:
    return Statement(well, "", before, after, 0.0)


def verdict(
    answers: Sequence[Answer] = GOOD,
    *,
    whole_s: float | None = 4.5,
    statements: Sequence[Statement] = (),
    leftovers: Sequence[str] = (),
    least: int = 1,
    gap: float | None = None,
) -> Verdict:
    events = [Event("kill rank", "rank 1 of a", 3.0, whole_s, 2)]
    return Verdict(TRUTH, answers, events, ["kill rank"], least, statements, leftovers, lambda question, text: gap)


def test_every_kind_comes_before_any_comes_again() -> None:
    kinds = list(FAULTS)
    order = list(islice(schedule(kinds, Random(3)), 3 * len(kinds)))
    for start in range(0, len(order), len(kinds)):
        assert sorted(order[start : start + len(kinds)]) == sorted(kinds)
    assert order == list(islice(schedule(kinds, Random(3)), len(order)))
    assert order != list(islice(schedule(kinds, Random(4)), len(order)))


def test_the_questions_are_of_every_sort() -> None:
    asked = questions(6)
    assert {(question.temperature, question.stream) for question in asked} == {
        (0, True),
        (0, False),
        (1, True),
        (1, False),
    }
    assert len({question.prompt for question in asked}) == len(asked)


def test_promises_kept() -> None:
    good = verdict(statements=[statement(True, BOTH, BOTH), statement(False, BOTH, frozenset())])
    assert good.broken == []
    assert good.data()["kept"] is True
    assert good.data()["whole_again_s"] == {"kill rank": [4.5]}
    assert "4 requests: 0 failed, 0 with a changed text" in good.report()


def test_a_request_that_failed() -> None:
    failed = Answer(ASKED[0], "tex", "status 503: no replica", 0.0, 1.0)
    assert verdict([*GOOD, failed]).broken == ["1 requests failed: status 503: no replica"]


@pytest.mark.parametrize(
    ("gap", "words"), [(NEAR_TIE / 2, "gap 0.0005, a near-tie"), (0.3, "gap 0.3, no near-tie"), (None, "gap —")]
)
def test_a_changed_text_breaks_the_promise_and_its_gap_is_shown(gap: float | None, words: str) -> None:
    changed = verdict([*GOOD, Answer(ASKED[1], "test 1", "", 0.0, 1.0)], gap=gap)
    (broken,) = changed.broken
    assert broken == f"1 texts changed: question 1 at temperature 1 ({words})"
    assert broken in changed.report()
    assert changed.data()["kept"] is False


def test_capacity_that_does_not_come_back() -> None:
    assert verdict(whole_s=None).broken == ["full capacity did not come back: kill rank (rank 1 of a)"]


def test_a_kind_of_fault_that_did_not_come_often_enough() -> None:
    assert verdict(least=2).broken == ["faults that did not come 2 times: kill rank"]


def test_what_stayed_behind() -> None:
    assert verdict(leftovers=["7 pages"]).broken == ["something stayed behind: 7 pages"]


@pytest.mark.parametrize(
    ("well", "before", "after", "lies"),
    [
        (True, BOTH, BOTH, False),
        (True, frozenset(), BOTH, False),
        (True, frozenset(), frozenset(), True),
        (False, frozenset(), frozenset(), False),
        (False, frozenset("a"), frozenset("b"), False),
        (False, BOTH, frozenset("a"), True),
    ],
)
def test_health_may_be_right_if_somebody_came_or_went(
    well: bool, before: frozenset[str], after: frozenset[str], lies: bool
) -> None:
    assert bool(statement(well, before, after).lie) == lies
    assert bool(verdict(statements=[statement(well, before, after)]).broken) == lies


def test_the_gap_is_that_of_the_token_where_a_text_parts(tmp_path: Path) -> None:
    model, question = make_tiny_model(tmp_path / "tiny"), Question(5, "abc", 1.0, stream=True)
    draws = decode(model, question)
    text = byte_text()
    plain = text.decode([draw.token for draw in draws])
    assert gap(model, question, plain) is None
    assert gap(model, question, "Something else") in [draw.margin for draw in draws[:4]]
    found = gap(model, question, plain[:-1])
    assert found in [draw.margin for draw in draws[-8:]]
