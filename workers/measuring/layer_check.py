"""Whether an EAGLE-3 head reads the layers it was trained on, found by measuring its first guess one layer off.

Configs number layers in two ways that differ by one, and a head that reads the neighbours of its layers goes on
guessing, only worse. Knows what acceptance says, not what a config says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from drafter.base import Drafter, DraftLimits, DraftRequest, Ticket
from drafter.scored import ScoredTree
from verifier.sampling import SamplingParams
from verifier.verifier import Verifier
from workers.measuring.contest import Asked, beside, engine_of
from workers.measuring.prompts import spread
from workers.sequence import Request

NUM_PROMPTS, MAX_TOKENS = 16, 64
# A gain is called one when it is large enough to matter and too large to be chance.
LEAST_GAIN, STANDARD_ERRORS = 0.03, 3.0

Ids = tuple[int, ...]
Place = tuple[int, int]  # a request, and a position in its text
Create = Callable[[Ids, Verifier], Drafter]  # a drafter that reads these layers of that verifier


class Listening:
    """Asks a drafter for its first guess at every token and proposes none, so that all guess at the same places."""

    def __init__(self, drafter: Drafter) -> None:
        self.fusion = drafter.fusion
        self.guesses: dict[Place, int] = {}
        self._drafter = drafter
        self._lengths: dict[Ticket, dict[int, int]] = {}

    def start(self, batch: Sequence[DraftRequest]) -> Ticket:
        ticket = self._drafter.start(batch)
        self._lengths[ticket] = {request.sequence: len(request.ids) for request in batch}
        return ticket

    def collect(self, ticket: Ticket, deadline_s: float) -> Mapping[int, ScoredTree]:
        lengths = self._lengths.pop(ticket)
        for sequence, scored in self._drafter.collect(ticket, deadline_s).items():
            self.guesses[sequence, lengths[sequence]] = scored.tree.tokens[1]
        return {}

    def close(self, sequence: int) -> None:
        self._drafter.close(sequence)


@dataclass(frozen=True)
class FirstGuess:
    """Whether the first guess was right, place by place."""

    right: Mapping[Place, bool]

    @property
    def rate(self) -> float:
        return sum(self.right.values()) / len(self.right) if self.right else 0.0

    def beats(self, other: FirstGuess) -> bool:
        """Clearly, by McNemar's test: places where both are right or both are wrong say nothing."""
        places = self.right.keys() & other.right.keys()
        won = sum(self.right[place] and not other.right[place] for place in places)
        lost = sum(other.right[place] and not self.right[place] for place in places)
        return won - lost > max(LEAST_GAIN * len(places), STANDARD_ERRORS * math.sqrt(won + lost))


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
    listening = Listening(create(ids, apart))
    engine = engine_of(apart, listening, DraftLimits(max_draft=1, draft_top_k=1, max_nodes=1))
    stop_ids = frozenset(verifier.config.eos_token_ids)
    requests = [
        Request(str(index), prompt.ids, SamplingParams(temperature=0), MAX_TOKENS, stop_ids)
        for index, prompt in enumerate(spread(asked, NUM_PROMPTS))
    ]
    answers = engine.run(requests)
    texts = [(*request.prompt_ids, *answer.output_ids) for request, answer in zip(requests, answers, strict=True)]
    guesses = listening.guesses.items()
    return FirstGuess({(number, place): texts[number][place] == token for (number, place), token in guesses})


def diagnosis(name: str, found: Found) -> str:
    """In a sentence, whether the ids that a head was opened with, the first of those found, are probably wrong."""
    (own, here), *others = found.items()
    best, there = max(found.items(), key=lambda each: each[1].rate)
    if not there.beats(here):
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
