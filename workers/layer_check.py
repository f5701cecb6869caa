"""Whether an EAGLE-3 head reads the layers it was trained on, found by measuring its first guess one layer off.

Configs number layers in two ways that differ by one, and a head that reads the neighbours of its layers goes on
guessing, only worse. Knows what acceptance says, not what a config says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from drafter.base import Drafter, DraftLimits
from verifier.sampling import SamplingParams
from verifier.verifier import Verifier
from workers.contest import Asked, beside, engine_of
from workers.prompts import spread
from workers.sequence import Request

FIRST_GUESS = DraftLimits(max_draft=1, draft_top_k=1, max_nodes=1)
NUM_PROMPTS, MAX_TOKENS = 16, 64
# A difference is called one when it is large enough to matter and too large to be chance.
LEAST_GAIN, STANDARD_ERRORS = 0.05, 3.0


@dataclass(frozen=True)
class FirstGuess:
    """How often the first guess was right in so many steps."""

    right: int
    steps: int

    @property
    def rate(self) -> float:
        return self.right / self.steps if self.steps else 0.0

    @property
    def variance(self) -> float:
        """Of the rate; that of one right guess and one wrong one more, so that none is certain."""
        rate = (self.right + 1) / (self.steps + 2)
        return rate * (1 - rate) / (self.steps + 2)


Ids = tuple[int, ...]
Create = Callable[[Ids, Verifier], Drafter]  # a drafter that reads these layers of that verifier
Found = Mapping[Ids, FirstGuess]


def fused_layers(drafter: Drafter) -> Ids:
    """Boundary ids of the layers that a head fuses; none for any other drafter."""
    return drafter.fusion.taps if drafter.fusion and drafter.fusion.projection else ()


def measure_shifts(layer_ids: Ids, create: Create, verifier: Verifier, asked: Sequence[Asked]) -> Found:
    """These ids first, then all of them one lower and one higher, as far as the target has such layers."""
    shifted = [tuple(each + shift for each in layer_ids) for shift in (0, -1, 1)]
    last = verifier.config.num_layers
    existing = [ids for ids in shifted if min(ids) >= 0 and max(ids) <= last]
    return {ids: _first_guess(ids, create, verifier, asked) for ids in existing}


def _first_guess(ids: Ids, create: Create, verifier: Verifier, asked: Sequence[Asked]) -> FirstGuess:
    """Over greedy answers: the same ones for all ids, since guesses never change a token."""
    apart = beside(verifier)
    engine = engine_of(apart, create(ids, apart), FIRST_GUESS)
    stop_ids = frozenset(verifier.config.eos_token_ids)
    requests = [
        Request(str(index), prompt.ids, SamplingParams(temperature=0), MAX_TOKENS, stop_ids)
        for index, prompt in enumerate(spread(asked, NUM_PROMPTS))
    ]
    engine.run(requests)
    done = engine.stats().counters.speculation
    return FirstGuess(sum(done.accepted_by_position), sum(done.tried_by_position))


def diagnosis(name: str, found: Found) -> str:
    """In a sentence, whether the ids that a head was opened with, the first of those found, are probably wrong."""
    (own, here), *others = found.items()
    best, there = max(found.items(), key=lambda each: each[1].rate)
    needed = max(LEAST_GAIN, STANDARD_ERRORS * math.sqrt(here.variance + there.variance))
    if there.rate - here.rate < needed:
        shifted = " and ".join(f"{guess.rate:.2f} after {_listed(ids)}" for ids, guess in others)
        return (
            f"Layer ids: {name} reads its target after layers {_listed(own)}, where its first guess is right "
            f"{here.rate:.2f} of the time, against {shifted}. That speaks for no others."
        )
    return (
        f"Layer ids: those of {name} are probably one too {'low' if best > own else 'high'}. After layers "
        f"{_listed(own)} its first guess is right {here.rate:.2f} of the time, but {there.rate:.2f} after "
        f"{_listed(best)}: set draft_layer_ids={','.join(map(str, best))}."
    )


def _listed(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids))
