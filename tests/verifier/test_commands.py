"""What is told to other ranks is what they hear."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.batch import Moves, Segment, StepPlan
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


PAIRS = st.lists(st.tuples(NUMBERS, NUMBERS), max_size=4)


@given(st.lists(segments(), max_size=4), PAIRS)
def test_plans(parts: list[Segment], copies: list[tuple[int, int]]) -> None:
    plan = StepPlan(tuple(parts), tuple(copies))
    numbers = encode(plan)
    assert {type(number) for number in numbers} <= {int, bool}
    assert decode(numbers) == plan


@pytest.mark.parametrize("command", [Moves((5, 9), (2, 3)), Moves((), ()), Signal.BEAT, Signal.STOP])
def test_the_others(command: Command) -> None:
    assert decode(encode(command)) == command
