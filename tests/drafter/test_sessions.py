"""Draft sessions of every kind of network against rebuilt ones, and their cache's limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from drafter import sessions
from drafter.options import DraftOptions
from tests.drafter.bench import CHAIN, SAVE, TEXT, TREE, Bench, Target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(tmp_path_factory.mktemp("target") / "target")


@pytest.fixture(params=SAVE)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def here(kind: str, target: Target, tmp_path: Path) -> Bench:
    return Bench(target, SAVE[kind](tmp_path / kind), DraftOptions())


def test_after_each_round_the_cache_holds_what_was_accepted_and_nothing_else(here: Bench) -> None:
    """Rejected branches once stayed visible, and accepted guesses kept their own states instead of the target's."""
    here.verify(TEXT)
    end = 6
    for accepted in (0, 3, 1, 4, 0, 5, 2):
        here.drafter.propose(here.request(TEXT[:end]))
        here.assert_rebuilt(TEXT[:end])
        end += accepted + 1
    here.drafter.close(1)
    here.drafter.sessions.pages.check_integrity([])
    assert here.drafter.sessions.pages.num_used == 0


def test_a_text_that_is_no_continuation_starts_a_new_session(here: Bench) -> None:
    here.verify(TEXT)
    here.drafter.propose(here.request(TEXT[:20]))
    other = [*TEXT[:9], *TEXT[20:30]]
    here.verify(other)
    here.drafter.propose(here.request(other))
    here.assert_rebuilt(other)
    here.drafter.propose(here.request(other[:12]))  # an earlier point of the same text
    here.assert_rebuilt(other[:12])


def test_asked_twice_it_answers_twice(here: Bench) -> None:
    """A step that failed is taken again with the same text."""
    here.verify(TEXT)
    first = here.drafter.propose(here.request(TEXT[:11]))
    assert here.drafter.propose(here.request(TEXT[:11])) == first


def test_chunked_prefill_gives_the_same_state(here: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a chunk's edge the next token is the prompt's, not a guess; on the verifier's side and on the drafter's."""
    here.verify(TEXT, chunk=7)
    monkeypatch.setattr(sessions, "CATCH_UP_ROWS", 5)
    request = here.request(TEXT)
    rounds = [here.drafter.propose(request) for _ in range(8)]
    assert [len(tree.tree) > 1 for tree in rounds] == [False] * 7 + [True]  # 39 slots or, without features, 40
    monkeypatch.undo()
    here.verify(TEXT)
    here.assert_rebuilt(TEXT)
    assert rounds[-1] == here.create().propose(request)


def test_drafting_stops_at_the_networks_own_positions(kind: str, target: Target, tmp_path: Path) -> None:
    """Past the end of its rotary table a head used to take the whole engine down."""
    here = Bench(target, SAVE[kind](tmp_path / kind, max_position_embeddings=16), DraftOptions())
    here.verify(TEXT)
    depths = {
        slots: max(here.drafter.propose(here.request(TEXT[: slots + (kind != "model")], CHAIN)).tree.depths)
        for slots in (11, 13, 14, 15, 16, 17, 29)
    }
    assert depths == {11: 4, 13: 4, 14: 3, 15: 2, 16: 1, 17: 0, 29: 0}


def test_a_full_cache_forgets_the_session_used_longest_ago(here: Bench) -> None:
    here.verify(TEXT)
    small = here.create(num_pages=16)
    for sequence in range(4):
        assert len(small.propose(here.request(TEXT[:20], CHAIN, sequence=sequence)).tree) == 5
    assert list(small.sessions.by_sequence) == [1, 2, 3]
    assert len(small.propose(here.request(TEXT, replace(TREE, draft_top_k=20), sequence=9)).tree) == 1  # can never fit
    small.sessions.pages.check_integrity([session.lease for session in small.sessions.by_sequence.values()])


def test_what_reads_features_guesses_nothing_without_them(kind: str, here: Bench) -> None:
    requests = [replace(here.request(TEXT), features=None), here.request(TEXT[:1], sequence=2)]
    assert set(here.drafter.collect(here.drafter.start(requests), 1.0)) == ({1, 2} if kind == "model" else set())
