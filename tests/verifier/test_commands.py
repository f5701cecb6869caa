"""What is told to other ranks is what they hear."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.batch import Moves, PageCopies, Segment, StepPlan
from verifier.commands import Command, Signal, decode, encode
from verifier.tree import TokenTree

NUMBERS = st.integers(0, 2**31)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    tokens = draw(st.lists(NUMBERS, min_size=1, max_size=9, unique=True))
    parents = [-1, *(draw(st.integers(0, node)) for node in range(len(tokens) - 1))]
    pages = tuple(draw(st.lists(NUMBERS, max_size=9)))
    scored_from = draw(st.integers(0, len(tokens)))
    return Segment(draw(NUMBERS), TokenTree(tuple(tokens), tuple(parents)), pages, scored_from, draw(st.booleans()))


@given(st.lists(segments(), max_size=4))
def test_plans(parts: list[Segment]) -> None:
    plan = StepPlan(tuple(parts))
    numbers = encode(plan)
    assert {type(number) for number in numbers} <= {int, bool}
    assert decode(numbers) == plan


@pytest.mark.parametrize(
    "command", [Moves((5, 9), (2, 3)), Moves((), ()), PageCopies(((7, 1), (7, 2))), Signal.BEAT, Signal.STOP]
)
def test_the_others(command: Command) -> None:
    assert decode(encode(command)) == command
