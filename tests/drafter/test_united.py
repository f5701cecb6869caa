"""Drafters that are united: one tree, probabilities that experience has corrected, and failures that stay apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter import united
from drafter.base import Drafter, DraftLimits, DraftRequest, NoDraft, QuickDraft
from drafter.calibration import Kind
from drafter.ngram import NgramDraft
from drafter.scored import ScoredTree
from drafter.scripted import Anti, Bushy, FixedIds, Mixed, Oracle
from drafter.united import UnitedDraft
from tests.drafter.requests import LIMITS, assert_within, request
from tests.fakes import AnsweringDrafter, RecordingDrafter, chain
from verifier.errors import BadSetting
from verifier.features import Fusion
from verifier.tree import TokenTree
from workers.measuring.clockwork import ManualClock

VOCAB = 50
TEXT = [Random(f"text {position}").randrange(VOCAB) for position in range(1500)]  # what plain decoding says
LIMITS_3_2_6 = DraftLimits(3, 2, 6)


def mixed(p: float, seed: int = 0) -> Mixed:
    return Mixed(lambda ids: TEXT[len(ids) : len(ids) + 3], p, vocab_size=VOCAB, seed=seed)


def unite(**sources: Drafter) -> UnitedDraft:
    return UnitedDraft(sources, VOCAB, ManualClock())


def ask(drafter: Drafter, wanted: DraftRequest) -> ScoredTree:
    trees = drafter.collect(drafter.start([wanted]), 1.0)
    return trees.get(wanted.sequence, ScoredTree.root(wanted.ids[-1]))


def write(drafter: Drafter, start: int, end: int, limits: DraftLimits = LIMITS_3_2_6) -> list[tuple[ScoredTree, int]]:
    """Writes that part of the text with the drafter's help; returns the trees, and the tokens accepted from each."""
    done: list[tuple[ScoredTree, int]] = []
    position = start
    while position < end:
        scored = ask(drafter, request(TEXT[:position], limits))
        accepted, node = 0, scored.tree.child(0, TEXT[position])
        while node is not None:
            accepted += 1
            node = scored.tree.child(node, TEXT[position + accepted])
        done.append((scored, accepted))
        position += accepted + 1
    return done


def answering(*trees: ScoredTree) -> AnsweringDrafter:
    """Gives these trees to the sequences of a batch in turn."""
    return AnsweringDrafter(lambda batch: {wanted.sequence: tree for wanted, tree in zip(batch, trees, strict=False)})


# ── one tree ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_guesses_of_all_drafters_are_in_one_tree_once() -> None:
    one = ScoredTree(TokenTree((9, 1, 2, 3), (-1, 0, 1, 0)), (1.0, 0.5, 0.5, 0.1))
    other = ScoredTree(TokenTree((9, 3, 4, 1), (-1, 0, 1, 0)), (1.0, 0.3, 0.5, 0.2))
    scored = ask(unite(one=answering(one), other=answering(other)), request([9], DraftLimits(3, 3, 9)))
    assert scored.tree == TokenTree((9, 1, 3, 2, 4), (-1, 0, 0, 1, 2))
    assert scored.shares == pytest.approx((1.0, 0.6, 0.37, 0.5, 0.5))


def test_siblings_take_no_more_than_their_parent_has() -> None:
    sure = [chain_with_shares(9, token, 0.9) for token in (1, 2)]
    scored = ask(unite(one=answering(sure[0]), other=answering(sure[1])), request([9], DraftLimits(3, 3, 9)))
    assert scored.shares == pytest.approx((1.0, 0.5, 0.5))


def chain_with_shares(root: int, token: int, share: float) -> ScoredTree:
    return ScoredTree(TokenTree.chain((root, token)), (1.0, share))


@st.composite
def trees(draw: st.DrawFn) -> ScoredTree:
    """Within the widest limits, on a root of 0, of few tokens, so that they overlap."""
    tokens, parents, shares = [0], [-1], [1.0]
    for _ in range(draw(st.integers(1, 12))):
        parent, token = draw(st.integers(0, len(tokens) - 1)), draw(st.integers(0, 3))
        if (parent, token) not in set(zip(parents, tokens, strict=True)):
            parents.append(parent)
            tokens.append(token)
            shares.append(draw(st.sampled_from((0.0, 0.1, 0.4, 0.9, 1.0))))
    return ScoredTree(TokenTree(tuple(tokens), tuple(parents)), tuple(shares))


@settings(max_examples=50)
@given(st.lists(st.tuples(trees(), trees(), st.lists(st.integers(0, 3), max_size=4)), min_size=1, max_size=6), LIMITS)
def test_whatever_was_learnt_trees_are_within_the_limits_likeliest_first_and_share_out_one(
    rounds: list[tuple[ScoredTree, ScoredTree, list[int]]], limits: DraftLimits
) -> None:
    drafter = unite(
        one=AnsweringDrafter(lambda batch: {1: rounds[len(batch[0].ids) % len(rounds)][0]}),
        other=AnsweringDrafter(lambda batch: {1: rounds[len(batch[0].ids) % len(rounds)][1]}),
    )
    wide = DraftLimits(12, 4, 24)
    ids = [0]
    for _, _, written in rounds:
        ask(drafter, request(ids, wide))
        ids += [*written, 0]
    for allowed in (wide, limits):
        scored = ask(drafter, request(ids, allowed))
        assert_within(scored.tree, allowed)
        assert scored.ranking == tuple(range(len(scored.tree)))
        sums = [0.0] * len(scored.tree)
        for parent, share in zip(scored.tree.parents[1:], scored.shares[1:], strict=True):
            sums[parent] += share
        assert all(total <= 1 + 1e-9 for total in sums)


def test_nothing_guessed_means_no_tree() -> None:
    drafter = unite(one=NoDraft(), other=NgramDraft())
    assert drafter.collect(drafter.start([request([1, 2, 3], LIMITS_3_2_6)]), 1.0) == {}
    assert ask(unite(), request([1, 2], LIMITS_3_2_6)) == ScoredTree.root(2)


# ── what is learnt ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8, 0.95])
def test_survival_comes_to_be_what_it_says(p: float) -> None:
    """Accepted tokens are those expected, within 15 %, for a drafter that claims 0.5 whatever it guesses."""
    last = write(unite(it=mixed(p)), 1, 1400)[-150:]
    expected = sum(sum(scored.survival[1:]) for scored, _ in last)
    accepted = sum(accepted for _, accepted in last)
    assert accepted == pytest.approx(expected, rel=0.15, abs=10)


def test_the_better_drafter_comes_to_have_the_room() -> None:
    limits = DraftLimits(3, 2, 3)
    last = write(unite(bad=mixed(0.05, seed=1), good=mixed(0.8, seed=2)), 1, 600, limits)[-20:]
    guessed = sum(scored.tree.depths[1:].count(depth) for scored, _ in last for depth in (1, 2, 3))
    assert guessed == 60
    assert sum(max(scored.tree.depths) == 3 for scored, _ in last) >= 18, "a chain of the good one's guesses"


def test_a_drafter_that_turns_bad_and_good_again_is_found_out_both_times() -> None:
    moods = (0.6, 0.0, 0.6)

    def moody(ids: Sequence[int]) -> Sequence[int]:
        return mixed(moods[len(ids) // 500]).chain(ids)

    drafter = unite(it=Oracle(moody))
    shares = [write(drafter, 500 * i + 1, 500 * i + 490)[-1][0].shares[1] for i in range(3)]
    assert shares == pytest.approx(moods, abs=0.13)


@pytest.mark.parametrize(("seeds", "agreed"), [((1, 1), 0.6), ((1, 2), 0.69)])
def test_what_agreement_is_worth_is_learnt(seeds: tuple[int, int], agreed: float) -> None:
    """Two that always agree know no more than one. Two that err apart, yet with the same wrong token, agree rightly in
    0.36 of the cases and wrongly in 0.16.
    """
    drafter = unite(one=mixed(0.6, seeds[0]), other=mixed(0.6, seeds[1]))
    shares = [scored.shares[1] for scored, _ in write(drafter, 1, 1400) if len(scored.tree) <= 4]
    assert sum(shares[-50:]) / 50 == pytest.approx(agreed, abs=0.1)


def test_a_guess_below_one_that_was_wrong_teaches_nothing() -> None:
    drafter = unite(it=answering(chain(5, 6, 7)))
    ask(drafter, request([5], LIMITS_3_2_6))
    ask(drafter, request([5, 8, 5], LIMITS_3_2_6))
    assert seen(drafter) == {1: 1.0}
    ask(drafter, request([5, 8, 5, 6, 5], LIMITS_3_2_6))
    assert seen(drafter) == {1: 2.0, 2: 1.0}


def seen(drafter: UnitedDraft) -> dict[Any, float]:
    """Outcomes by depth."""
    totals = {learnt["depth"]: sum(cast("list[float]", learnt["seen"])) for learnt in drafter.calibration.numbers()}
    return {depth: round(total, 1) for depth, total in totals.items() if total}


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param([4, 5], id="asked again, as after a step that failed"),
        pytest.param([4], id="shorter"),
        pytest.param([3, 5, 6, 7], id="another text under the same number"),
    ],
)
def test_ids_that_do_not_go_on_teach_nothing(ids: list[int]) -> None:
    drafter = unite(it=answering(chain(5, 6)))
    ask(drafter, request([4, 5], LIMITS_3_2_6))
    drafter.start([request(ids, LIMITS_3_2_6)])
    assert seen(drafter) == {}


def test_steps_without_guesses_between_do_not_matter() -> None:
    """A sequence that was preempted, or had no room to guess, comes back with more text than the last tree's run."""
    drafter = unite(it=answering(chain(5, 6, 7)))
    ask(drafter, request([4, 5], LIMITS_3_2_6))
    drafter.start([request([9, 9], LIMITS_3_2_6, sequence=2)])
    drafter.start([request([4, 5, 6, 7, 8, 9], LIMITS_3_2_6)])
    assert seen(drafter) == {1: 1.0, 2: 1.0}


def test_greedy_and_drawn_texts_are_judged_apart() -> None:
    drafter = unite(it=answering(chain(5, 6)))
    ask(drafter, request([5], LIMITS_3_2_6))
    assert [node.claims for node in drafter._memories[1].union.nodes] == [[], [(Kind("it", True, 1), 0.5)]]


def test_the_same_texts_teach_the_same() -> None:
    first, second = (unite(one=mixed(0.5, 1), ngram=NgramDraft()) for _ in range(2))
    assert write(first, 1, 200) == write(second, 1, 200)
    assert first.calibration.numbers() == second.calibration.numbers()


# ── the quick ones first ─────────────────────────────────────────────────────────────────────────────────────────────


class Quick(FixedIds, QuickDraft):
    """Says the same whatever the text, and at once."""


class CountingQuick(Quick):
    asked = 0

    def propose(self, request: DraftRequest) -> ScoredTree:
        self.asked += 1
        return super().propose(request)


def test_quick_ones_are_asked_once_and_others_only_about_sequences_with_room() -> None:
    slow, quick = RecordingDrafter(FixedIds([6])), CountingQuick([7, 8, 9])
    drafter = unite(slow=slow, quick=quick)
    first, second = request([5], LIMITS_3_2_6), request([5], LIMITS_3_2_6, sequence=2)
    glance = drafter.glance([first, second])
    assert [scored.tree for scored in glance.trees.values()] == [TokenTree.chain((5, 7, 8, 9))] * 2
    batch = [replace(first, limits=replace(LIMITS_3_2_6, max_draft=0)), second]
    trees = drafter.collect(drafter.start(batch, glance), 1.0)
    assert slow.batches == [(second,)]
    assert trees[1].tree == TokenTree.chain((5, 7, 8, 9))
    assert set(trees[2].tree.tokens) == {5, 6, 7, 8, 9}
    assert quick.asked == 2


def test_nobody_else_is_asked_about_nothing() -> None:
    slow = RecordingDrafter(FixedIds([6]))
    drafter = unite(slow=slow, quick=Quick([7]))
    off = request([5], DraftLimits(0, 2, 6))
    assert not drafter.collect(drafter.start([off]), 1.0)
    assert not slow.batches


def test_who_was_not_glanced_at_has_no_quick_guesses() -> None:
    drafter = unite(slow=FixedIds([6]), quick=Quick([7]))
    glance = drafter.glance([request([5], LIMITS_3_2_6)])
    trees = drafter.collect(drafter.start([request([5], LIMITS_3_2_6, sequence=2)], glance), 1.0)
    assert trees[2].tree == TokenTree.chain((5, 6))


def test_a_quick_answer_is_no_answer_of_the_one_who_was_asked() -> None:
    """A drafter that was away looked as if it answered at once wherever n-grams did, and so as if it cost nothing."""
    drafter = unite(away=AnsweringDrafter(lambda batch: {}), quick=Quick([7]))
    assert ask(drafter, request([5], LIMITS_3_2_6)).tree == TokenTree.chain((5, 7))
    assert not drafter.heard
    other = unite(slow=FixedIds([6]), quick=Quick([7]))
    ask(other, request([5], LIMITS_3_2_6))
    assert other.heard == {1}


def test_a_glance_is_judged_by_what_became_of_the_last_tree() -> None:
    drafter = unite(quick=Quick([7]))
    ids = [5]
    for _ in range(60):
        ask(drafter, request(ids, LIMITS_3_2_6))
        ids.append(9)
    assert drafter.glance([request(ids, LIMITS_3_2_6)]).trees[1].shares[1] < 0.1


def test_a_quick_one_that_fails_costs_its_own_guesses_only() -> None:
    class Failing(Quick):
        def propose(self, request: DraftRequest) -> ScoredTree:
            raise RuntimeError

    drafter = unite(slow=FixedIds([6]), quick=Failing([7]))
    assert not drafter.glance([request([5], LIMITS_3_2_6)]).trees
    assert ask(drafter, request([5], LIMITS_3_2_6)).tree == TokenTree.chain((5, 6))
    assert drafter.failures == 2


# ── drafters that fail, wait and end ─────────────────────────────────────────────────────────────────────────────────


def test_a_drafter_that_fails_costs_its_own_guesses_only() -> None:
    def fail(batch: Sequence[DraftRequest]) -> Mapping[int, ScoredTree]:
        raise RuntimeError("no such head")

    class Dead(AnsweringDrafter):
        def start(self, batch: Sequence[DraftRequest]) -> int:
            raise ConnectionError

    drafter = unite(
        dead=Dead(fail), failing=AnsweringDrafter(fail), rubbish=answering(chain(5, VOCAB)), good=FixedIds([7, 8])
    )
    scored = ask(drafter, request([5], LIMITS_3_2_6))
    assert scored.tree == TokenTree.chain((5, 7, 8))
    assert drafter.failures == 3


def test_all_drafters_share_one_deadline() -> None:
    clock = ManualClock()
    left: list[float] = []

    class Slow(FixedIds):
        def collect(self, ticket: int, deadline_s: float) -> Mapping[int, ScoredTree]:
            left.append(deadline_s)
            clock.now += 0.75
            return super().collect(ticket, deadline_s)

    drafter = UnitedDraft({name: Slow([token]) for token, name in enumerate("abc")}, VOCAB, clock)
    ask(drafter, request([5], LIMITS_3_2_6))
    assert left == [1.0, 0.25, 0.0]
    assert drafter.late == 1


def test_an_end_is_told_to_all() -> None:
    sources = [RecordingDrafter(FixedIds([7])) for _ in range(2)]
    drafter = unite(one=sources[0], other=sources[1])
    ask(drafter, request([5], LIMITS_3_2_6))
    drafter.close(1)
    drafter.close(1)
    assert not any(source.open_sessions for source in sources)
    assert not drafter._memories


def test_a_sequence_that_ends_while_its_trees_grow_is_forgotten() -> None:
    """Its tree was remembered when it came, after the end, until a thousand others had been asked about."""
    drafter = unite(it=FixedIds([7, 8]))
    ticket = drafter.start([request([5], LIMITS_3_2_6), request([5], LIMITS_3_2_6, sequence=2)])
    drafter.close(1)
    drafter.collect(ticket, 1.0)
    assert list(drafter._memories) == [2]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(united, "MAX_SEQUENCES", 3)
    drafter = unite(it=FixedIds([7]))
    for sequence in range(9):
        ask(drafter, request([5], LIMITS_3_2_6, sequence))
    assert list(drafter._memories) == [6, 7, 8]


def test_the_features_are_those_of_the_one_that_reads_any() -> None:
    head, other = FixedIds([1]), FixedIds([2])
    head.fusion, other.fusion = Fusion("one", (1,), 8), Fusion("other", (2,), 8)
    assert unite(ngram=NgramDraft(), head=head).fusion is head.fusion
    assert unite(ngram=NgramDraft()).fusion is None
    with pytest.raises(BadSetting, match=r"draft_model is 'head\+other', but must be drafters that read the same"):
        unite(head=head, other=other)


def test_one_that_is_united_already_stays_as_it_is() -> None:
    drafter = unite(it=NoDraft())
    assert UnitedDraft.of(drafter, VOCAB, ManualClock()) is drafter
    assert isinstance(UnitedDraft.of(NoDraft(), VOCAB, ManualClock()), UnitedDraft)


def test_bushes_keep_their_branches() -> None:
    bush = Bushy(Anti(lambda ids: TEXT[len(ids) :], vocab_size=VOCAB), vocab_size=VOCAB)
    wanted = request(TEXT[:5], DraftLimits(3, 2, 8))
    scored = ask(unite(it=bush), wanted)
    assert sorted(scored.tree.tokens) == sorted(bush.propose(wanted).tree.tokens)
