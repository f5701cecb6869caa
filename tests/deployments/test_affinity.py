"""Prompts follow their beginnings, unless that would pile them up."""

from __future__ import annotations

from collections import Counter

from deployments.affinity import CHUNK, EXPIRY_S, Load, PrefixMap, chains, choose
from workers.measuring.clockwork import ManualClock

PROMPT = list(range(8 * CHUNK))


def load(name: str, requests: int = 0, *, free_tokens: int = 10_000, last_turn: int = 0) -> Load:
    return Load(name, requests, max_running=16, free_tokens=free_tokens, last_turn=last_turn)


def test_a_prompt_follows_its_beginning() -> None:
    assert choose(1000, {"b": 500}, [load("a"), load("b")]) == "b"
    assert choose(1000, {"a": 500, "b": 700}, [load("a"), load("b")]) == "b"


def test_without_one_the_least_busy_replica_is_next_and_of_equals_the_one_not_chosen_for_longest() -> None:
    assert choose(100, {}, [load("a", 3), load("b", 2)]) == "b"
    assert choose(100, {}, [load("a", last_turn=2), load("b", last_turn=1)]) == "b"


def test_a_short_beginning_that_all_prompts_share_draws_nobody() -> None:
    """A chat template's first words would else send every chat to one replica."""
    assert choose(100, {"a": CHUNK}, [load("a", last_turn=2), load("b", last_turn=1)]) == "b"


def test_a_beginning_is_worth_some_company_but_no_queue() -> None:
    cached = {"a": 128}
    assert choose(140, cached, [load("a", 5), load("b")]) == "a"
    assert choose(140, cached, [load("a", 40), load("b")]) == "b"
    assert choose(5000, {"a": 4000}, [load("a", 15), load("b")]) == "a"
    assert choose(5000, {"a": 4000}, [load("a", 40), load("b")]) == "b"


def test_a_full_cache_counts_against_a_replica() -> None:
    """What finds no room there displaces others, who compute it again later."""
    assert choose(2000, {"a": 300}, [load("a", free_tokens=100), load("b")]) == "b"


def test_ten_prompts_with_a_common_beginning_land_together_and_twenty_others_apart() -> None:
    prefixes, turns = PrefixMap(), {"a": 0, "b": 0}

    def send(prompt: list[int]) -> str:
        found = chains(prompt, b"")
        names = [load(name, last_turn=turn) for name, turn in turns.items()]
        name = choose(len(prompt), prefixes.match(found), names)
        prefixes.remember(found, name)
        turns[name] = max(turns.values()) + 1
        return name

    template = list(range(1000, 1000 + CHUNK))
    together = Counter(send([*range(128), 500 + i, *range(20)]) for i in range(10))
    apart = Counter(send([*template, *range(2000 + 50 * i, 2050 + 50 * i)]) for i in range(20))
    assert max(together.values()) == 10
    assert max(apart.values()) <= 14


def test_matches_are_whole_chunks_from_the_beginning_and_of_one_salt() -> None:
    prefixes = PrefixMap()
    prefixes.remember(chains(PROMPT[:100], b""), "a")
    prefixes.remember(chains(PROMPT[:50], b""), "b")
    assert prefixes.match(chains(PROMPT, b"")) == {"a": 96, "b": 32}
    assert prefixes.match(chains([7, *PROMPT], b"")) == {}
    assert prefixes.match(chains([*PROMPT[:40], 7, *PROMPT[41:]], b"")) == {"a": 32, "b": 32}
    assert prefixes.match(chains(PROMPT, b"other")) == {}


def test_what_is_remembered_is_bounded_and_ages() -> None:
    clock = ManualClock()
    prefixes = PrefixMap(capacity=10, clock=clock)
    prefixes.remember(chains(PROMPT, b""), "a")
    prefixes.remember(chains(PROMPT, b"other"), "a")
    assert len(prefixes) == 10
    assert prefixes.match(chains(PROMPT, b"other")) == {"a": len(PROMPT)}
    clock.now = EXPIRY_S + 1
    assert prefixes.match(chains(PROMPT, b"other")) == {}
