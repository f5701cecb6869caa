"""Which replica a prompt should go to: the one that computed its beginning before, unless that has too much to do.

Pure: token ids, counts and an injected clock. What replicas really keep in their caches is not known here; where
prompts were sent is a good guess at it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

CHUNK = 32  # tokens; prefixes are compared in whole chunks
CAPACITY = 32_768  # chunks remembered: a million tokens
EXPIRY_S = 600.0  # after which a cache has probably found other use for its pages
# What a request that is there already costs a new one, in tokens that could have been computed instead. Running beside
# it takes a row of each step; waiting for it to end takes many steps.
RUNNING_TOKENS, WAITING_TOKENS = 8, 256
SLACK = 64  # a difference of as many tokens is none: a step computes more


@dataclass(frozen=True, slots=True)
class Load:
    """What one replica has to do."""

    replica: str
    requests: int  # running and waiting
    max_running: int  # more of them wait
    free_tokens: int  # room in its KV cache
    last_turn: int = 0  # when it was last chosen: of equals, the one that has waited longest is next


def choose(num_tokens: int, cached: Mapping[str, int], loads: Sequence[Load]) -> str:
    """The replica at which a prompt of ``num_tokens`` costs least; of those near that, the one with least to do.

    Args:
        cached: by replica, how many tokens of the prompt it has probably computed before.
        loads: one at least.
    """
    costs = {load.replica: cost(num_tokens - cached.get(load.replica, 0), load) for load in loads}
    limit = min(costs.values()) + SLACK
    near = [load for load in loads if costs[load.replica] < limit]
    return min(near, key=lambda load: (load.requests, load.last_turn)).replica


def cost(num_new: int, load: Load) -> int:
    """In tokens that somebody has to compute: the prompt's new ones, those of others, those of whoever is displaced."""
    waiting = max(0, load.requests + 1 - load.max_running)
    displaced = max(0, num_new - load.free_tokens)
    return num_new + RUNNING_TOKENS * load.requests + WAITING_TOKENS * waiting + displaced


class PrefixMap:
    """Which replicas were sent which beginnings of texts. Bounded: the oldest are forgotten."""

    def __init__(self, capacity: int = CAPACITY, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity, self._clock = capacity, clock
        self._sent: OrderedDict[int, dict[str, float]] = OrderedDict()  # by chain: replicas, and when

    def __len__(self) -> int:
        return len(self._sent)

    def match(self, chains: Sequence[int]) -> dict[str, int]:
        """By replica, how many tokens from the beginning of the text with these `chains` it was sent before."""
        found: dict[str, int] = {}
        for depth, chain in enumerate(chains, start=1):
            fresh = self._fresh(chain)
            holders = [name for name in fresh if found.get(name, 0) == (depth - 1) * CHUNK]
            if not holders:
                break
            found |= dict.fromkeys(holders, depth * CHUNK)
        return found

    def remember(self, chains: Sequence[int], replica: str) -> None:
        for chain in reversed(chains):  # so that a text's end is forgotten before its beginning
            self._sent[chain] = self._fresh(chain) | {replica: self._clock()}
            self._sent.move_to_end(chain)
        while len(self._sent) > self._capacity:
            self._sent.popitem(last=False)

    def _fresh(self, chain: int) -> dict[str, float]:
        oldest = self._clock() - EXPIRY_S
        return {name: at for name, at in self._sent.get(chain, {}).items() if at > oldest}


def chains(ids: Sequence[int], salt: bytes) -> list[int]:
    """A number for each beginning of the text that is whole chunks long. Texts of different salts share none."""
    found = [hash(salt)]
    for start in range(0, len(ids) - CHUNK + 1, CHUNK):
        found.append(hash((found[-1], *ids[start : start + CHUNK])))
    return found[1:]
