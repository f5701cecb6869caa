from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.base import DraftLimits, InstantDraft
from drafter.scripted import Anti, Bushy, FixedIds, Mixed, Oracle
from tests.drafter.requests import LIMITS, assert_within, request
from verifier.acceptance import Verdict, walk
from verifier.sampling import Draw
from verifier.tree import TokenTree

VOCAB = 10
TEXT = [(7 * i * i + 3 * i) % VOCAB for i in range(60)]  # what plain decoding says
PROMPT = TEXT[:5]
CHAINS: dict[str, InstantDraft] = {
    "oracle": Oracle(lambda ids: TEXT[len(ids) :]),
    "anti": Anti(lambda ids: TEXT[len(ids) :], vocab_size=VOCAB),
    "mixed": Mixed(lambda ids: TEXT[len(ids) :], 0.5, vocab_size=VOCAB),
    "fixed": FixedIds([3, 4, 5]),
}
DRAFTERS = CHAINS | {f"bushy {name}": Bushy(drafter, vocab_size=VOCAB) for name, drafter in CHAINS.items()}


def verify(tree: TokenTree, ids: Sequence[int]) -> Verdict:
    """The walk where plain decoding says `TEXT`. Off the text anything is right, so wrong nodes must not be reached."""
    assert tree.tokens[0] == ids[-1]
    return walk(tree, lambda node: Draw(TEXT[len(ids) + tree.depths[node]], 1.0))


@pytest.mark.parametrize("name", DRAFTERS)
@given(limits=LIMITS, length=st.integers(1, 40))
def test_limits_are_kept(name: str, limits: DraftLimits, length: int) -> None:
    tree = DRAFTERS[name].propose(request(TEXT[:length], limits)).tree
    assert_within(tree, limits)
    assert tree == TokenTree.chain(tree.tokens) or name.startswith("bushy")


@pytest.mark.parametrize("name", ["oracle", "bushy oracle"])
@given(limits=LIMITS)
def test_the_oracle_is_always_right(name: str, limits: DraftLimits) -> None:
    tree = DRAFTERS[name].propose(request(PROMPT, limits)).tree
    possible = 0 if limits.off else min(limits.max_draft, limits.max_nodes)
    assert verify(tree, PROMPT).num_accepted == possible


@pytest.mark.parametrize("name", ["anti", "bushy anti"])
@given(limits=LIMITS, length=st.integers(1, 40))
def test_anti_is_always_wrong(name: str, limits: DraftLimits, length: int) -> None:
    tree = DRAFTERS[name].propose(request(TEXT[:length], limits)).tree
    assert verify(tree, TEXT[:length]).num_accepted == 0
    assert len(tree) > 1 or limits.off


def test_mixed_is_right_as_often_as_it_should_be() -> None:
    """4000 first guesses, within 5 standard deviations: one seed in a million is off."""
    guesses = Mixed(lambda ids: [1] * 4000, 0.3, vocab_size=VOCAB, seed=8).chain(PROMPT)
    assert set(guesses) == {1, 2}
    assert abs(guesses.count(1) / 4000 - 0.3) < 5 * (0.3 * 0.7 / 4000) ** 0.5


def test_mixed_decides_by_seed_and_position_alone() -> None:
    """However a batch or a retry comes about, a position is guessed right or wrong for good."""
    first, other = (Mixed(lambda ids: TEXT[len(ids) :], 0.5, vocab_size=VOCAB, seed=seed) for seed in (1, 2))
    assert first.chain(TEXT[:5])[3:] == first.chain(TEXT[:8])
    assert first.chain(TEXT[:5]) != other.chain(TEXT[:5])


def test_fixed_ids_are_fixed() -> None:
    limits = DraftLimits(2, 1, 5)
    assert DRAFTERS["fixed"].propose(request([9, 8], limits)).tree == TokenTree.chain([8, 3, 4])


def test_a_bush_has_wrong_tokens_on_both_sides_of_the_right_one() -> None:
    tree = DRAFTERS["bushy oracle"].propose(request(PROMPT, DraftLimits(3, 3, 9))).tree
    assert verify(tree, PROMPT).nodes == (0, 2, 5, 8)
    assert tree.parents[1:4] == (0, 0, 0)


@given(st.integers(1, 5), st.integers(2, 4), st.integers(0, 12))
def test_the_nodes_kept_from_a_bush_are_no_prefix_of_it(max_draft: int, top_k: int, spare: int) -> None:
    """Kept KV must be moved into place whatever path was kept; a prefix would need no move."""
    limits = DraftLimits(max_draft, top_k, max_draft + 1 + spare)
    verdict = verify(DRAFTERS["bushy oracle"].propose(request(PROMPT, limits)).tree, PROMPT)
    assert verdict.nodes != tuple(range(len(verdict.nodes)))


def test_a_bush_repeats_the_right_continuation_below_wrong_tokens() -> None:
    tree = DRAFTERS["bushy oracle"].propose(request(PROMPT, DraftLimits(3, 2, 14))).tree
    node: int | None = 0
    for token in ((TEXT[5] + 1) % VOCAB, TEXT[6], TEXT[7]):
        assert node is not None
        node = tree.child(node, token)
    assert node is not None
