"""How far to guess: as far as it pays, seen on a clock on which every price is known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from drafter.base import DraftLimits, DraftRequest
from drafter.scored import ScoredTree
from tests.workers.worlds import Price, World, by_guess, by_level, compute_bound, memory_bound, staircase
from verifier.sampling import SamplingParams
from verifier.tree import TokenTree
from workers.adaptive import AdaptivePolicy
from workers.costs import Costs, Work
from workers.hazards import Hazards
from workers.policy import FixedPolicy, Load, Policy

ALONE = Load(decoding=1, work=Work(1), context=0)


def make_policy(*seconds_by_rows: float, drafting: float = 0.0, max_stretch: float = 100.0) -> AdaptivePolicy:
    costs = Costs(lambda rows: rows, max_rows=len(seconds_by_rows))
    for rows, seconds in enumerate(seconds_by_rows, start=1):
        costs.observe_verifying(Work(rows), seconds)
    costs.observe_drafting(1, 1, drafting)
    return AdaptivePolicy(costs, max_stretch)


def request(sequence: int = 0, max_draft: int = 3) -> DraftRequest:
    return DraftRequest(sequence, [1, 2], DraftLimits(max_draft, 2, 8), SamplingParams())


def limit(policy: Policy, requests: Sequence[DraftRequest], load: Load) -> list[DraftRequest]:
    return policy.limit(requests, load, {})


def tree(*shares: float) -> ScoredTree:
    return ScoredTree(TokenTree.chain(range(len(shares) + 1)), (1.0, *shares))


# ── how many nodes ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_free_rows_are_filled() -> None:
    assert make_policy(1, 1, 1, 1).choose({0: tree(0.5, 0.1, 0.1)}, ALONE) == {0: tree(0.5, 0.1, 0.1)}


def test_rows_are_bought_as_far_as_they_pay() -> None:
    """With prices 1, 1.1, 1.2, 2 and chances .5, .25, .2 the yields are 1, 1.36, 1.46, 0.97."""
    assert make_policy(1, 1.1, 1.2, 2).choose({0: tree(0.5, 0.5, 0.8)}, ALONE) == {0: tree(0.5, 0.5)}


def test_nothing_is_bought_where_nothing_pays() -> None:
    assert make_policy(1, 2, 3).choose({0: tree(0.9, 0.9)}, ALONE) == {}


def test_a_step_behind_a_dear_first_row_is_still_seen() -> None:
    """Prices 1, 2, 2, 2: the second row alone does not pay, three do."""
    assert make_policy(1, 2, 2, 2).choose({0: tree(0.9, 0.9, 0.9)}, ALONE) == {0: tree(0.9, 0.9, 0.9)}


def test_guesses_pay_for_the_keys_that_they_attend_to() -> None:
    """Prices 1 and 1.2 before any keys, and 0.001 a key for each row: after 1000 of them they are 2 and 3.2."""
    policy = make_policy(1, 1.2)
    policy.costs.learn_keys(1000, 2.0, 2, 3.2)
    assert policy.choose({0: tree(0.5)}, ALONE) == {0: tree(0.5)}
    assert policy.choose({0: tree(0.5)}, Load(1, Work.of_roots(1, 1000), 1000)) == {}


def test_keys_that_are_read_anyway_make_guesses_cheap() -> None:
    """Prices 1 and 1.6 before any keys, and 0.001 to read each: after 1000 of them they are 2 and 2.6."""
    policy = make_policy(1, 1.6)
    policy.costs.learn_keys(1000, 2.0, 2, 2.6)
    assert policy.choose({0: tree(0.5)}, ALONE) == {}
    assert policy.choose({0: tree(0.5)}, Load(1, Work.of_roots(1, 1000), 1000)) == {0: tree(0.5)}


def test_what_drafting_took_is_spent_whether_its_guesses_are_bought_or_not() -> None:
    """At prices 1 and 1.4, after a second of drafting: 1.35 tokens in 2.4 s beat 1 in 2 s, but would not 1 in 1 s."""
    policy = make_policy(1, 1.4)
    assert policy.choose({0: tree(0.35)}, ALONE) == {}
    policy.observe_drafting([request()], 1.0, answered={0})
    assert policy.choose({0: tree(0.35)}, ALONE) == {0: tree(0.35)}


def test_the_likeliest_guesses_of_all_sequences_come_first() -> None:
    trees = {0: tree(0.9, 0.1), 1: tree(0.3, 0.9)}
    chosen = make_policy(1, 1, 1.01, 1.05, 5, 5).choose(trees, Load(2, Work(2), 0))
    assert chosen == {0: tree(0.9), 1: tree(0.3)}


def test_no_request_waits_much_longer_for_another_ones_gain() -> None:
    policy = make_policy(1, 1.4, 1.9, 2.4, max_stretch=2.0)
    assert policy.choose({0: tree(0.99, 0.99, 0.99)}, ALONE) == {0: tree(0.99, 0.99)}


def test_prompt_chunks_do_not_make_guesses_look_cheap() -> None:
    """Beside a chunk of 6 rows a guess adds 1 second to 8, but the 8 fall due anyway: what counts is 0.5 tokens for
    a second in which decoding alone makes nearly one.
    """
    policy = make_policy(*range(1, 12))
    assert policy.choose({0: tree(0.5)}, Load(decoding=1, work=Work(7), context=0)) == {}


# ── how deep ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_drafting_goes_as_deep_as_the_levels_pay() -> None:
    policy = make_policy(*[1] * 9, drafting=0.3)
    for _ in range(200):
        limit(policy, [request(max_draft=8)], ALONE)
        policy.learn(0, TokenTree.chain(range(9)), range(1, 3))  # two levels hit, the third was not put to the test
        policy.learn(0, TokenTree.chain(range(9)), (1, 2, 9))  # two hit, the third missed
    (limited,) = limit(policy, [request(max_draft=8)], ALONE)
    assert limited.limits.max_draft == 2


def test_requests_keep_their_own_limits() -> None:
    policy = make_policy(*[1] * 9)
    limited = limit(policy, [request(0, 1), request(1, 4)], Load(2, Work(2), 0))
    assert [each.limits.max_draft for each in limited] == [1, 4]


def test_a_drafter_that_does_not_pay_is_asked_now_and_then_only() -> None:
    policy = make_policy(1, 1, drafting=0.5)
    asked = 0
    for _ in range(1000):
        if limit(policy, [request()], ALONE):
            asked += 1
            policy.learn(0, TokenTree.chain((0, 1)), (9,))
    assert 10 < asked < 40


def test_a_drafter_that_is_away_is_not_taken_to_be_cheap() -> None:
    """Its silence came at once, and was learnt as a price of nothing: when it was back it was asked too much."""
    policy = make_policy(*[1] * 9, drafting=0.5)
    for _ in range(100):
        policy.observe_drafting([request(max_draft=1)], 1e-5, answered=set())
    assert policy.costs.drafting(1, 1) == 0.5


def test_a_drafter_that_is_away_from_the_start_is_not_taken_to_be_free() -> None:
    policy = AdaptivePolicy(make_policy(1.0, 1.0).costs)
    policy.start_over()
    policy.observe_drafting([request(max_draft=1)], 1e-5, answered=set())
    assert not policy.costs.prices().drafting


def test_waiting_in_vain_is_a_price() -> None:
    policy = make_policy(*[1] * 9, drafting=0.01)
    for _ in range(100):
        policy.observe_drafting([request(max_draft=1)], 0.5, answered=set())
    assert policy.costs.drafting(1, 1) == pytest.approx(0.5, rel=0.01)


def test_of_two_sequences_the_one_with_good_guesses_drafts() -> None:
    policy = make_policy(*[1 + 0.1 * rows for rows in range(9)], drafting=0.2)
    asked: list[list[int]] = []
    for _ in range(120):
        limited = limit(policy, [request(0), request(1)], Load(2, Work(2), 0))
        asked.append([each.sequence for each in limited])
        policy.learn(0, TokenTree.chain((0, 1)), (1,))
        policy.learn(1, TokenTree.chain((0, 1)), (9,))
    assert all(0 in sequences for sequences in asked[-20:])
    assert sum(1 in sequences for sequences in asked[-20:]) <= 4  # probes


# ── what is learnt ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_hazards_are_learnt_where_they_were_put_to_the_test() -> None:
    hazards = Hazards()
    for _ in range(300):
        hazards.learn([True, False])
        hazards.learn([True])
    assert hazards.rate(1) == pytest.approx(1.0, abs=0.02)
    assert hazards.rate(2) == pytest.approx(0.0, abs=0.02)


def test_what_was_not_put_to_the_test_teaches_nothing() -> None:
    hazards = Hazards()
    for _ in range(300):
        hazards.learn([None, False])
    assert hazards.rate(1) == 0.5
    assert hazards.rate(2) == pytest.approx(0.0, abs=0.02)


def test_unknown_depths_are_taken_to_be_like_the_one_before() -> None:
    hazards = Hazards()
    for _ in range(300):
        hazards.learn([True])
    assert hazards.rate(5) == pytest.approx(1.0, abs=0.02)


def test_a_few_hits_in_a_row_do_away_with_a_bad_name() -> None:
    """Bad guesses are seldom asked for, so it took hundreds of steps until good ones were believed."""
    hazards = Hazards()
    for _ in range(300):
        hazards.learn([False])
    for _ in range(4):
        hazards.learn([True])
    assert hazards.rate(1) > 0.8
    hazards.learn([False])
    assert hazards.rate(1) < 0.8


def test_good_guesses_that_turn_bad_are_found_out_however_long_they_were_good() -> None:
    """Hundreds of hits in a row counted as hundreds, where no more than fifty are to."""
    hazards = Hazards()
    for _ in range(2000):
        hazards.learn([True])
    for _ in range(50):
        hazards.learn([False])
    assert hazards.rate(1) < 0.5


def test_hits_and_misses_that_take_turns_are_no_news() -> None:
    hazards = Hazards()
    for _ in range(300):
        hazards.learn([True])
        hazards.learn([False])
        assert 0.2 < hazards.rate(1) < 0.8


def test_a_new_sequence_begins_with_what_all_have_seen() -> None:
    everybody = Hazards()
    for _ in range(300):
        everybody.learn([True])
    assert Hazards(everybody).rate(1) == everybody.rate(1)


def test_the_end_of_a_run_teaches_nothing_about_what_lies_beyond() -> None:
    policy = make_policy(1, 1, 1, 1)
    limit(policy, [request()], ALONE)
    policy.learn(0, TokenTree.chain((0, 1, 2, 3)), (1,))
    assert policy._experience.of(0).hazards._tries == [1.0]


# ── in an engine, against the best fixed depth ───────────────────────────────────────────────────────────────────────


def make_world(
    price: Price, p: float, per_level: float, max_draft: int, *, adaptive: bool, known: bool = True
) -> World:
    """``known``: it has guessed before."""
    world = World.measured(price, p=p, drafting=by_level(per_level), depth=max_draft, adaptive=adaptive)
    if adaptive and known:
        world.tokens_per_s(4, 40)  # it gets to know the drafter
    return world


@pytest.mark.parametrize(
    ("price", "p", "per_level", "count"),
    [
        (staircase, 0.0, 0.003, 1),
        (staircase, 0.6, 0.003, 4),
        (staircase, 0.9, 0.0, 4),
        (memory_bound, 0.9, 0.012, 1),
        (memory_bound, 0.3, 0.003, 8),
        (compute_bound, 0.9, 0.0, 4),
    ],
)
def test_guessing_is_never_worth_less_than_the_best_fixed_depth(
    price: Price, p: float, per_level: float, count: int
) -> None:
    fixed = {
        depth: make_world(price, p, per_level, depth, adaptive=False).tokens_per_s(count, 80)
        for depth in (0, 1, 2, 4, 8)
    }
    adaptive = make_world(price, p, per_level, 8, adaptive=True).tokens_per_s(count, 80)
    assert adaptive >= 0.97 * max(fixed.values()), fixed


def test_drafts_for_many_are_priced_though_together_they_read_much() -> None:
    """What sixteen leave to be read in a step passed for a long text, so such drafts were never priced."""
    world = World.measured(memory_bound, p=1.0, drafting=by_guess(0.001), depth=5, adaptive=True, max_stretch=100.0)
    world.tokens_per_s(16, 60)
    assert world.engine.costs.drafting(5, 16) == pytest.approx(0.08, rel=0.2)


def test_many_short_texts_are_not_taken_for_the_price_of_drafts() -> None:
    """They were priced at all the text that was read before the first of them, and then bought no more."""
    world = World.measured(staircase, p=0.9, drafting=by_level(0.003), depth=4, adaptive=True)
    world.drafter.per_unread = 0.001
    world.tokens_per_s(16, 60, num_prompt=60)
    assert world.engine.costs.drafting(4, 16) < 0.05


def test_a_draft_that_was_there_in_time_is_not_known_to_have_taken_longer() -> None:
    policy = make_policy(1, 1, 1, 1, drafting=0.1)
    limit(policy, [request()], ALONE)
    policy._experience.of(0).reading = 60
    policy.costs.observe_reading(1, 1, 60, 10.0)
    policy.observe_drafting([request(max_draft=1)], 9.0, answered={0}, hidden=True)
    assert policy.costs.drafting(1, 1) == pytest.approx(0.1)


@pytest.mark.parametrize(("answered", "price"), [({0}, 0.06), (set[int](), 0.1)])
def test_what_draft_and_text_took_together_is_more_than_the_draft_takes(answered: set[int], price: float) -> None:
    """Drafts for texts that were always read anew kept a price that had become too high, unless none was drafted."""
    policy = make_policy(1, 1, 1, 1, drafting=0.1)
    limit(policy, [request()], ALONE)
    for _ in range(100):
        policy._experience.of(0).reading = 100
        policy.observe_drafting([request(max_draft=1)], 0.06, answered=answered)
    assert policy.costs.drafting(1, 1) == pytest.approx(price, rel=0.1)


@pytest.mark.parametrize(("per_level", "depth"), [(0.60, 3), (0.65, 2)])
def test_drafts_that_take_a_little_longer_than_expected_are_not_in_vain(per_level: float, depth: int) -> None:
    """The bound on the time between tokens was then missed by anything, so nothing of what they said was verified."""
    policy = make_policy(1, 1, 1, 1, drafting=per_level, max_stretch=3.0)
    for _ in range(300):
        policy._experience._all.learn([True, True, True])
    assert [asked.limits.max_draft for asked in limit(policy, [request()], ALONE)] == [depth]


def test_a_long_first_prompt_does_not_make_guesses_look_dear() -> None:
    """Reading it was taken for the price of the guesses, which were then bought no more."""
    world = make_world(staircase, 0.9, 0.003, 8, adaptive=True, known=False)
    world.drafter.per_unread = 0.0002
    world.tokens_per_s(1, 20, num_prompt=900)
    assert world.engine.costs.drafting(1, 1) == pytest.approx(0.003, rel=0.2)
    assert world.engine.costs.reading(1000) == pytest.approx(0.2, rel=0.2)
    before = world.engine.stats().counters.speculation.accepted_tokens
    world.tokens_per_s(1, 100)
    assert world.engine.stats().counters.speculation.accepted_tokens > before + 50


def test_no_text_is_read_for_the_few_tokens_that_are_left_to_guess() -> None:
    """To read a prompt takes longer here than all guesses about its answer could save."""

    def rate(*, guessing: bool) -> float:
        world = make_world(staircase, 0.9, 0.003, 8 if guessing else 0, adaptive=guessing, known=False)
        world.drafter.per_unread = 0.001
        for _ in range(20):  # how long answers are is not known before some have ended
            world.tokens_per_s(1, 4, num_prompt=200)
        return sum(world.tokens_per_s(1, 4, num_prompt=200) for _ in range(10))

    assert rate(guessing=True) >= 0.97 * rate(guessing=False)


@pytest.mark.parametrize("count", [1, 4])
def test_a_drafter_that_takes_its_time_and_says_nothing_is_asked_no_more(count: int) -> None:
    """It was asked in every step for good: what it would be worth was learnt from its trees alone, and it had none."""

    def rate(*, guessing: bool) -> float:
        world = make_world(staircase, 0.9, 0.005, 4 if guessing else 0, adaptive=guessing, known=False)
        world.drafter.silent = True
        world.tokens_per_s(count, 100)
        return world.tokens_per_s(count, 100)

    assert rate(guessing=True) >= 0.97 * rate(guessing=False)


@pytest.mark.parametrize("length", [4, 20, 400])
def test_a_drafter_that_was_dear_is_found_to_be_cheap_though_all_answers_are_short(length: int) -> None:
    """Each sequence counted its own steps up to its probe, and ended before."""
    world = make_world(staircase, 0.9, 0.05, 4, adaptive=True)
    world.drafter.price = by_level(0.001)
    for _ in range(1200 // length):
        world.tokens_per_s(1, length)
    assert world.engine.costs.drafting(1, 1) < 0.02


def test_a_drafter_that_takes_over_is_not_taken_to_be_as_silent_as_the_last() -> None:
    policy = make_policy(1.0, 1.0, 1.0, 1.0, drafting=0.1)
    for _ in range(30):
        policy.observe_drafting([request(max_draft=1)], 0.1, answered=set())
        policy.choose({}, ALONE)
    policy.start_over()
    asked = limit(policy, [request(max_draft=1)], ALONE)
    policy.observe_drafting(asked, 0.1, answered={0})
    policy.choose({0: tree(0.9)}, ALONE)
    assert limit(policy, [request(max_draft=1)], ALONE)


def test_many_sequences_do_not_probe_more_than_one_does() -> None:
    """Each counted for itself: sixteen that had begun one after the other took sixteen times their share, and with a
    drafter that was dear enough, probes had a least frequency whatever they cost.
    """
    world = make_world(staircase, 0.0, 0.1, 4, adaptive=True)
    drafter, engine = world.drafter, world.engine
    began, spent = world.clock(), drafter.spent
    for request in world.requests(16, 250):
        engine.submit(request, lambda progress: None)
        engine.step()
        engine.step()
    while engine.step():
        pass
    assert 0 < drafter.spent - spent <= 0.02 * (world.clock() - began)


def test_fixed_means_fixed() -> None:
    policy = FixedPolicy()
    assert limit(policy, [request()], ALONE) == [request()]
    assert policy.choose({0: tree(0.1)}, ALONE) == {0: tree(0.1)}
