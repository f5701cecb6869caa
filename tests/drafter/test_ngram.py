from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter import ngram
from drafter.base import DraftLimits
from drafter.ngram import NgramDraft
from drafter.scored import ScoredTree
from tests.drafter.requests import LIMITS, assert_within, request
from verifier.errors import BadSetting
from verifier.tree import TokenTree

CHAIN = DraftLimits(4, 1, 4)
BUSH = DraftLimits(3, 3, 20)
TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def propose(ids: Sequence[int], limits: DraftLimits = CHAIN, min_n: int = 2, max_n: int = 3) -> ScoredTree:
    return NgramDraft(min_n, max_n).propose(request(ids, limits))


def shares_of_paths(ids: list[int], max_draft: int, min_n: int, max_n: int) -> dict[tuple[int, ...], float]:
    """The definition, by path: weights of the occurrences that go along it, of those that reach its parent and one."""
    voters: list[tuple[int, tuple[int, ...]]] = []
    for end in range(len(ids) - 1, 0, -1):
        matched = 0
        while matched < min(end, ngram.MAX_MATCHED_TOKENS) and ids[end - 1 - matched] == ids[-1 - matched]:
            matched += 1
        if matched >= min_n:
            voters.append((matched, tuple((ids[end:] * max_draft)[:max_draft])))
    voters.sort(key=lambda voter: -min(voter[0], max_n))  # stays in order otherwise: the latest first
    voters = voters[: ngram.MAX_OCCURRENCES]

    def votes(path: tuple[int, ...], depth: int) -> float:
        weights = [
            min(n + depth - 1, ngram.MAX_MATCHED_TOKENS) ** 2 / 5 for n, text in voters if text[: len(path)] == path
        ]
        return sum(weights)

    paths = {text[:depth] for _, text in voters for depth in range(1, max_draft + 1)}
    return {path: votes(path, len(path)) / (1 + votes(path[:-1], len(path))) for path in paths}


def test_what_followed_is_proposed() -> None:
    assert propose([1, 2, 3, 4, 5, 6, 9, 1, 2]).tree == TokenTree.chain([2, 3, 4, 5, 6])


def test_nothing_known_means_nothing_proposed() -> None:
    assert propose([1, 2, 3, 4, 5]) == ScoredTree.root(5)
    assert propose([1, 2, 3, 2]) == ScoredTree.root(2)  # known as a unigram only
    assert propose([1]) == ScoredTree.root(1)


def test_a_longer_match_outvotes_a_later_shorter_one() -> None:
    ids = [7, 1, 2, 50, 51, 8, 1, 2, 60, 61, 7, 1, 2]
    assert propose(ids, max_n=3).tree == TokenTree.chain([2, 50, 51, 8, 1])
    assert propose(ids[1:], max_n=3).tree == TokenTree.chain([2, 60, 61, 7, 1])


def test_what_followed_more_often_comes_first_and_of_equals_the_latest() -> None:
    ids = [1, 2, 5, 6, 9, 1, 2, 5, 7, 9, 1, 2, 8, 8, 0, 1, 2]
    scored = propose(ids, BUSH)
    assert scored.tree.tokens[:3] == (2, 5, 8)
    assert scored.shares[1:3] == pytest.approx((1.6 / 3.4, 0.8 / 3.4))
    assert [scored.tree.tokens[node] for node in scored.ranking] == list(scored.tree.tokens)


def test_the_more_tokens_match_the_surer_the_guess() -> None:
    """A text that is being copied is told from a pair of words that happens to stand there twice."""
    shares = [propose([*range(20), *range(20 - matched, 20)], CHAIN, 1).shares[1] for matched in range(1, 20)]
    assert shares == sorted(shares)
    assert shares[0] < 0.2
    assert shares[-1] > 0.95


def test_a_repetition_is_taken_to_go_on() -> None:
    """Where the text itself ends, the loop that it seems to be in is continued, rather than the draft cut short."""
    assert propose([0, 1, 0, 1, 0, 1], DraftLimits(6, 1, 6)).tree == TokenTree.chain([1, 0, 1, 0, 1, 0, 1])
    assert propose([5, 5, 5], DraftLimits(6, 1, 6)).tree == TokenTree.chain([5] * 7)


@given(TEXTS, LIMITS, st.integers(1, 3), st.integers(0, 2))
def test_trees_hold_the_likeliest_that_the_definition_says_within_the_limits(
    ids: list[int], limits: DraftLimits, min_n: int, more_n: int
) -> None:
    scored = propose(ids, limits, min_n, min_n + more_n)
    assert_within(scored.tree, limits)
    expected = shares_of_paths(ids, limits.max_draft, min_n, min_n + more_n)
    paths = [tuple(scored.tree.tokens[node] for node in path[1:]) for path in scored.tree.paths]
    assert scored.shares[1:] == pytest.approx([expected[path] for path in paths[1:]])
    firsts = sorted((share for path, share in expected.items() if len(path) == 1), reverse=True)
    if firsts and not limits.off:
        assert scored.shares[1] == pytest.approx(firsts[0])
    else:
        assert len(paths) == 1


@given(TEXTS, st.lists(st.integers(0, 60), max_size=8))
def test_an_index_that_grows_says_what_a_new_one_says(ids: list[int], cuts: list[int]) -> None:
    """Steps of any size, and steps back: the index is built anew when the ids are no continuation."""
    drafter = NgramDraft()
    for cut in cuts:
        part = ids[: max(1, cut)]
        assert drafter.propose(request(part, BUSH)) == NgramDraft().propose(request(part, BUSH))


def test_only_new_tokens_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = NgramDraft()
    sizes: list[int] = []
    extend = ngram._Index.extend

    def recorded(self: ngram._Index, new_ids: Sequence[int]) -> None:
        sizes.append(len(new_ids))
        extend(self, new_ids)

    monkeypatch.setattr(ngram._Index, "extend", recorded)
    ids = list(range(1000))
    for _ in range(3):
        drafter.propose(request(ids, CHAIN))
        ids += [1, 2]
    assert sizes == [1000, 2, 2]


def test_sequences_are_kept_apart_and_forgotten_when_closed() -> None:
    drafter = NgramDraft()
    drafter.propose(request([1, 2, 3, 4, 1, 2], CHAIN, sequence=1))
    assert len(drafter.propose(request([9, 1, 2], CHAIN, sequence=2)).tree) == 1
    assert set(drafter._indexes) == {1, 2}
    drafter.close(1)
    drafter.close(1)
    assert set(drafter._indexes) == {2}


def test_a_reused_sequence_number_starts_afresh() -> None:
    drafter = NgramDraft()
    drafter.propose(request([1, 2, 3, 4, 1, 2], CHAIN))
    assert drafter.propose(request([9, 8, 7, 6, 5, 4, 1, 2, 0], CHAIN)) == ScoredTree.root(0)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MAX_INDEXED_TOKENS", 40)
    monkeypatch.setattr(ngram, "MAX_SEQUENCES", 3)
    drafter = NgramDraft()
    ids: list[int] = []
    for step in range(200):
        ids += [step, step + 1, step % 7]
        tree = drafter.propose(request(ids, CHAIN)).tree
        assert_within(tree, CHAIN)
        assert len(drafter._indexes[1].ids) <= 40
        assert drafter._indexes[1].ids == ids[-len(drafter._indexes[1].ids) :]
    for sequence in range(2, 10):
        drafter.propose(request([1], CHAIN, sequence))
    assert list(drafter._indexes) == [7, 8, 9]


def test_few_occurrences_are_looked_at_in_repetitive_text() -> None:
    ids = [token for step in range(5000) for token in (1, 2, 10 + step)]
    scored = propose([*ids, 1, 2], DraftLimits(1, 10_000, 10_000))
    assert len(scored.tree) - 1 == ngram.MAX_OCCURRENCES


@pytest.mark.parametrize(("min_n", "max_n", "setting"), [(0, 3, "min_n"), (3, 2, "max_n")])
def test_lengths_that_cannot_work_are_refused(min_n: int, max_n: int, setting: str) -> None:
    with pytest.raises(BadSetting) as caught:
        NgramDraft(min_n, max_n)
    assert caught.value.name == setting
