"""Quick guesses first: what they promise, whom they are asked about, and what they save others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from drafter.base import DraftLimits, DraftRequest
from drafter.scored import ScoredTree
from tests.workers.test_policy import ALONE, make_policy, request, tree
from tests.workers.worlds import QuickScript, World, by_level, memory_bound, staircase
from verifier.tree import TokenTree
from workers.adaptive import AdaptivePolicy
from workers.costs import Work
from workers.engine import Engine
from workers.glances import NOTHING, Glances, Outlook, bought
from workers.policy import Load
from workers.profile import profile

SURE = tree(0.95, 0.95, 0.95)


def glance_and_limit(
    policy: AdaptivePolicy, requests: Sequence[DraftRequest], load: Load, trees: dict[int, ScoredTree]
) -> list[DraftRequest]:
    """One step's questions; glances take no time."""
    asked = policy.glance(requests, load)
    policy.observe_glance(asked, trees, 0.0)
    return policy.limit(requests, load, trees)


# ── what they promise ────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_outlook_is_the_chance_of_coming_to_each_depth() -> None:
    bush = ScoredTree(TokenTree((7, 1, 2, 3, 4), (-1, 0, 0, 1, 3)), (1.0, 0.6, 0.2, 0.7, 0.5))
    outlook = Outlook.of(bush)
    assert outlook.reach == pytest.approx((0.8, 0.42, 0.21))
    assert outlook.tokens == pytest.approx(1.43)
    assert outlook.rows == 2  # the third depth is too unlikely to count on


def test_others_add_what_the_quick_ones_leave_open() -> None:
    """With a tree of depth 1 that is right in half of the other cases .8 becomes .9, then .4 becomes .65, 0 .325."""
    expected = pytest.approx([1.2, 1.3, 1.55, 1.875])
    assert Outlook((0.8, 0.4)).tokens_with([0.5, 0.5, 0.5]) == expected


def test_others_that_know_nothing_add_nothing() -> None:
    assert Outlook((0.8, 0.4)).tokens_with([0.0, 0.0, 0.0]) == pytest.approx([1.2] * 4)


def test_without_a_promise_others_stand_alone() -> None:
    assert NOTHING.tokens_with([0.5, 0.5]) == [0.0, 0.5, 0.75]


# ── whom they are asked about ────────────────────────────────────────────────────────────────────────────────────────


def look(glances: Glances, sequences: Sequence[int], brought: Callable[[int], float], price: float = 0.001) -> set[int]:
    """One step of 10 ms, in which a token more is worth as much."""
    chosen = glances.choose(sequences, 0.010, 0.010)
    glances.observe(sorted(chosen), price * len(chosen))
    for sequence in chosen:
        glances.learn(sequence, brought(sequence))
    return chosen


def test_nobody_is_left_out_before_prices_are_known() -> None:
    assert Glances().choose([1, 2], 0.0, 0.0) == {1, 2}


def test_glances_that_bring_less_than_they_take_become_rare() -> None:
    """One takes a tenth of a step and brings half as much; a hundredth of the time pays for one in ten steps."""
    glances = Glances()
    seen = [bool(look(glances, [1], lambda _: 0.05)) for _ in range(1000)]
    assert 8 <= sum(seen[-100:]) <= 12


def test_many_sequences_are_not_looked_at_more_often_than_one_is() -> None:
    glances = Glances()
    seen = [look(glances, range(16), lambda _: 0.0) for _ in range(1000)]
    assert 8 <= sum(map(len, seen[-100:])) <= 12
    assert set.union(*seen[-200:]) == set(range(16))


def test_looks_are_found_worth_while_though_all_answers_are_short() -> None:
    """Each sequence counted its own steps up to a look, and ended before."""
    glances, brought = Glances(), 0.0
    for brought in (0.0, 1.0):
        for number in range(200):
            for _ in range(5):
                look(glances, [number], lambda _, brought=brought: brought)  # type: ignore[misc]
            glances.forget(number)
    assert glances.choose([1000], 0.010, 0.010) == {1000}


def test_of_two_sequences_the_one_that_copies_is_looked_at() -> None:
    glances = Glances()
    seen = [look(glances, [1, 2], lambda sequence: 2.0 if sequence == 1 else 0.0) for _ in range(300)]
    assert all(1 in chosen for chosen in seen[-30:])
    assert sum(2 in chosen for chosen in seen[-30:]) <= 4


def test_reading_a_text_first_is_no_price() -> None:
    glances = Glances()
    look(glances, [1], lambda _: 1.0, price=0.1)
    look(glances, [1], lambda _: 1.0, price=0.0001)
    for number in range(2, 20):
        look(glances, [number], lambda _: 1.0, price=0.1)
    assert glances._price == 0.0001


def test_a_hiccup_is_no_price() -> None:
    glances = Glances()
    for price in (0.001, 0.001, 1.0):
        look(glances, [1], lambda _: 1.0, price)
    assert glances._price <= 0.0011


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


def test_what_is_learnt_about_others_is_what_they_add() -> None:
    """A network that added nothing was credited with what n-grams held beside it."""
    policy = make_policy(*[1] * 5, drafting=0.2)
    weak = tree(0.25, 0.5)
    for right in (True, False, False, False) * 20:
        glance_and_limit(policy, [request()], ALONE, {0: weak})
        policy._experience.of(0).asked = 1
        policy.learn(0, weak.tree, (1,) if right else (9,))
    assert policy._experience.of(0).hazards.rate(1) < 0.05
    limited = [glance_and_limit(policy, [request()], ALONE, {0: weak})[0] for _ in range(10)]
    assert sum(each.limits.max_draft > 0 for each in limited) <= 1  # a probe


def test_what_others_did_not_answer_says_nothing_about_them() -> None:
    """While a drafter was away, what n-grams guessed was taken for what it was worth."""
    policy = make_policy(*[1] * 5, drafting=0.2)
    for _ in range(50):
        (limited,) = glance_and_limit(policy, [request()], ALONE, {})
        policy.observe_drafting([limited], 1e-6, answered=set())
        policy.learn(0, TokenTree.chain((0, 1)), (9,))
    assert policy._experience.of(0).hazards.rate(1) == 0.5


def test_quick_trees_are_chosen_from_like_all_others() -> None:
    policy = make_policy(1, 1, 1, 5)
    glance_and_limit(policy, [request()], ALONE, {0: SURE})
    assert policy.choose({0: SURE}, ALONE) == {0: tree(0.95, 0.95)}


def test_quick_guesses_that_are_never_bought_are_not_worth_a_look() -> None:
    """What they promised counted as what they brought, so they were looked at in every step for nothing."""
    policy = make_policy(1, 2, 3, drafting=5.0)
    looks = 0
    for _ in range(300):
        asked = policy.glance([request()], ALONE)
        policy.observe_glance(asked, {0: tree(0.5)} if asked else {}, 0.1 * len(asked))
        if policy.limit([request()], ALONE, {0: tree(0.5)} if asked else {}):
            policy.choose({0: tree(0.5)}, ALONE)
        looks += bool(asked)
    assert looks < 100


def test_others_are_no_cheaper_beside_quick_guesses_that_do_not_pay() -> None:
    """There was no plain step to compare with, so whoever lifted a bad one a little was asked."""
    policy = make_policy(0.005, 0.009, 0.013, drafting=0.001)
    for _ in range(300):
        glance_and_limit(policy, [request(max_draft=1)], ALONE, {0: tree(0.35)})
        policy._experience.of(0).asked = 1
        policy.learn(0, TokenTree.chain((0, 1)), (1,))
    policy._experience.of(0).hazards._hits[0] *= 0.6
    limited = [glance_and_limit(policy, [request(max_draft=1)], ALONE, {0: tree(0.35)})[0] for _ in range(10)]
    assert sum(each.limits.max_draft > 0 for each in limited) <= 1  # a probe


def test_quick_guesses_that_do_not_pay_for_some_do_not_keep_others_from_asking() -> None:
    """All quick guesses or none of any guesses: so a network that paid for one sequence was not asked."""
    policy = make_policy(*[0.020 + 0.010 * rows for rows in range(1, 20)], drafting=0.0001)
    all_four, load = [request(sequence, 1) for sequence in range(4)], Load(4, Work(4), 0)
    weak, asked = {sequence: tree(0.5, 0.8, 0.9) for sequence in range(3)}, 0
    for _ in range(100):
        limited = {each.sequence: each for each in glance_and_limit(policy, all_four, load, weak)}
        asked += 3 in limited and limited[3].limits.max_draft == 1
        policy._experience.of(3).asked = 1
        policy.learn(3, TokenTree.chain((0, 1)), (1,))
    assert asked > 80


def test_what_a_glance_brings_are_the_quick_guesses_that_are_bought() -> None:
    quick = TokenTree((5, 7, 8, 9), (-1, 0, 1, 1))
    chosen = ScoredTree(TokenTree((5, 6, 7, 9, 7), (-1, 0, 0, 2, 1)), (1.0, 0.5, 0.4, 0.5, 0.9))
    assert bought(quick, chosen) == pytest.approx(0.4 + 0.2)


def test_a_sequence_that_has_ended_is_not_remembered_again() -> None:
    """In two lanes its trees came after its end."""
    policy = make_policy(1, 1, 1)
    policy.limit([request()], ALONE, {})
    policy.forget(0)
    policy.observe_drafting([request()], 0.1, answered=set())
    policy.choose({0: tree(0.9)}, ALONE)
    assert not policy._experience._known


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


def test_n_grams_alone_are_no_drafter_that_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World.measured(staircase, p=0.0, drafting=by_level(0.0), depth=5, adaptive=True)
    engine = Engine(world.engine.verifier, QuickScript(world._truth), world.engine.config, world.clock)
    profile(engine.verifier, engine.pages, engine.costs, world.clock)
    depths: set[int] = set()  # that others are allowed
    limit = engine.policy.limit

    def watch(requests: Sequence[DraftRequest], *rest: Any) -> list[DraftRequest]:
        depths.update(request.limits.max_draft for request in requests)
        return limit(requests, *rest)

    monkeypatch.setattr(engine.policy, "limit", watch)
    results = engine.run(world.requests(2, 100))
    assert [len(result.output_ids) for result in results] == [100, 100]
    assert engine.counters.speculation.accepted_tokens > 50
    assert depths == {0}
    assert not engine.costs.prices().drafting


def test_a_drafter_that_was_away_is_asked_again_as_before() -> None:
    """Its silence beside n-grams was taken for an answer: it looked cheap and worthless."""
    world = World.measured(staircase, p=0.8, drafting=by_level(0.003), depth=5, adaptive=True, quick=True)
    before = [world.tokens_per_s(2, 160) for _ in range(3)][-1]
    price = world.engine.costs.drafting(1, 2)
    world.drafter.silent, world.drafter.price = True, by_level(0.0)
    world.tokens_per_s(2, 400)
    world.drafter.silent, world.drafter.price = False, by_level(0.003)
    assert world.engine.costs.drafting(1, 2) == pytest.approx(price, rel=0.3)
    assert world.tokens_per_s(2, 160) >= 0.97 * before


def test_lanes_do_not_flip_with_every_copied_passage() -> None:
    """They were weighed by what n-grams promised in this step, and each change costs a step without guesses."""
    world = World.measured(
        memory_bound, p=0.9, drafting=by_level(0.010), depth=4, adaptive=True, elsewhere=True, quick=True, max_lanes=2
    )
    world.tokens_per_s(4, 60)
    lanes: list[int] = []
    for wanted in world.requests(4, 120):
        world.engine.submit(wanted, lambda progress: None)
    while world.engine.step():
        lanes.append(world.engine.policy.lanes)
    changes = sum(now != then for now, then in zip(lanes[1:], lanes, strict=False))
    assert changes <= 3
