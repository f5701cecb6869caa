"""Quick guesses first: what they promise, whom they are asked about, and what they save others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from drafter.base import DraftLimits, DraftRequest
from drafter.scored import ScoredTree
from tests.workers.test_policy import ALONE, make_policy, request, tree
from tests.workers.worlds import World, by_level, staircase
from verifier.tree import TokenTree
from workers.adaptive import AdaptivePolicy
from workers.glances import NOTHING, Glances, Outlook
from workers.policy import Load

SURE = tree(0.95, 0.95, 0.95)


def glance_and_limit(
    policy: AdaptivePolicy, requests: Sequence[DraftRequest], load: Load, trees: dict[int, ScoredTree]
) -> list[DraftRequest]:
    """One step's questions; glances take no time."""
    asked = policy.glance(requests, load)
    policy.observe_glance(asked, trees, 0.0)
    return policy.limit(requests, load, trees)


# ── what they promise ────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_outlook_is_the_chance_of_coming_to_each_depth_as_far_as_it_is_likely() -> None:
    bush = ScoredTree(TokenTree((7, 1, 2, 3, 4), (-1, 0, 0, 1, 3)), (1.0, 0.6, 0.2, 0.7, 0.5))
    outlook = Outlook.of(bush)
    assert outlook.reach == pytest.approx((0.8, 0.42))  # the third depth is reached with .21
    assert outlook.tokens == pytest.approx(1.22)


@pytest.mark.parametrize(("chance", "kind"), [(0.1, 0), (0.3, 1), (0.5, 1), (0.6, 2), (0.9, 3), (1.0, 3)])
def test_outlooks_are_of_a_kind_by_their_first_guess(chance: float, kind: int) -> None:
    assert Outlook.of(tree(chance)).kind == kind


def test_what_others_add_is_counted_once() -> None:
    """Alone .8 + .4; with a tree of depth 1 the first is .9, with one of depth 2 the second .9 x .7."""
    outlook = Outlook((0.8, 0.4))
    assert outlook.tokens_with([0.9, 0.7, 0.5]) == pytest.approx([1.2, 1.3, 1.53, 1.845])


def test_others_never_take_away_from_a_promise() -> None:
    assert Outlook((0.8, 0.4)).tokens_with([0.1, 0.1]) == pytest.approx([1.2, 1.2, 1.2])


def test_without_a_promise_others_stand_alone() -> None:
    assert NOTHING.tokens_with([0.5, 0.5]) == [0.0, 0.5, 0.75]


# ── whom they are asked about ────────────────────────────────────────────────────────────────────────────────────────


def test_nobody_is_left_out_before_prices_are_known() -> None:
    assert Glances().choose([1, 2], 0.0) == {1, 2}


def test_glances_that_bring_less_than_they_take_become_rare() -> None:
    """A token is worth 10 ms, a glance takes 1 ms and promises .05 tokens; looks may take 1 % of the time."""
    glances, seen = Glances(), 0
    for _ in range(1000):
        if glances.choose([1], 0.010):
            glances.observe(1, 0.001)
            glances.learn(1, 0.05)
            seen += 1
    assert 80 <= seen <= 140  # once in eleven steps, after a beginning in which they were thought better of


def test_glances_that_have_become_worth_while_are_found_out() -> None:
    glances = Glances()
    for promise in (0.0, 1.0):
        for _ in range(1000):
            if glances.choose([1], 0.010):
                glances.observe(1, 0.001)
                glances.learn(1, promise)
    assert all(glances.choose([1], 0.010) for _ in range(5))


def test_of_two_sequences_the_one_that_copies_is_looked_at() -> None:
    glances = Glances()
    looked_at: list[set[int]] = []
    for _ in range(200):
        chosen = glances.choose([1, 2], 0.010)
        for sequence in chosen:
            glances.observe(1, 0.001)
            glances.learn(sequence, 2.0 if sequence == 1 else 0.0)
        looked_at.append(chosen)
    assert all(1 in chosen for chosen in looked_at[-30:])
    assert sum(2 in chosen for chosen in looked_at[-30:]) <= 3


# ── what they save others ────────────────────────────────────────────────────────────────────────────────────────────


def test_where_quick_guesses_are_sure_nobody_else_is_asked() -> None:
    """Others were asked as ever, so a copied passage paid for a network that had nothing to add."""
    policy = make_policy(1, 1, 1, 1, 1, drafting=0.2)
    assert glance_and_limit(policy, [request()], ALONE, {})[0].limits.max_draft > 0
    (limited,) = glance_and_limit(policy, [request()], ALONE, {0: SURE})
    assert limited.limits.max_draft == 0


def test_where_nobody_guesses_nothing_is_wanted() -> None:
    policy = make_policy(1, 2, 3, 4, drafting=5.0)
    assert glance_and_limit(policy, [request()], ALONE, {}) == []


def test_what_others_add_to_a_kind_of_outlook_says_nothing_about_another() -> None:
    policy = make_policy(*[1] * 5, drafting=0.2)
    for _ in range(50):  # where the quick ones know nothing, nobody does
        glance_and_limit(policy, [request()], ALONE, {})
        policy.learn(0, TokenTree.chain((0, 1)), (9,))
    weak = tree(0.35)
    assert not any(glance_and_limit(policy, [request()], ALONE, {}) for _ in range(3))
    (limited,) = glance_and_limit(policy, [request()], ALONE, {0: weak})
    assert limited.limits.max_draft > 0


def test_quick_trees_are_chosen_from_like_all_others() -> None:
    policy = make_policy(1, 1, 1, 5)
    glance_and_limit(policy, [request()], ALONE, {0: SURE})
    assert policy.choose({0: SURE}, ALONE) == {0: tree(0.95, 0.95)}


def test_limits_are_those_of_the_request() -> None:
    policy = make_policy(*[1] * 9)
    wanted = DraftRequest(0, [1, 2], DraftLimits(2, 2, 8), request().sampling)
    (limited,) = glance_and_limit(policy, [wanted], ALONE, {})
    assert limited.limits == DraftLimits(2, 2, 8)


# ── in an engine ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("p", "per_level", "count"), [(0.8, 0.005, 1), (0.6, 0.003, 2), (0.0, 0.003, 2)])
def test_quick_guesses_save_the_time_of_others_where_they_are_sure(p: float, per_level: float, count: int) -> None:
    """Half of the text is known to the quick one. To ask both about all of it costs more than it brings, and so does to
    ask neither; who is asked was decided by averages.
    """

    def rate(depth: int, *, adaptive: bool) -> tuple[float, float]:
        world = World.measured(
            staircase, p=p, drafting=by_level(per_level), depth=depth, adaptive=adaptive, quick=depth > 0
        )
        if adaptive:
            world.tokens_per_s(4, 60)
        spent = world.drafter.spent
        return world.tokens_per_s(count, 160), world.drafter.spent - spent

    fixed = {depth: rate(depth, adaptive=False) for depth in (0, 2, 5)}
    adaptive, spent = rate(5, adaptive=True)
    assert adaptive >= 1.04 * max(tokens for tokens, _ in fixed.values()), fixed
    assert spent < 0.7 * fixed[5][1]
