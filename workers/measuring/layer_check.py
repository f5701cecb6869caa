"""Whether an EAGLE-3 head reads the layers it was trained on, found by measuring its first guesses one layer off.

Configs number layers in two ways that differ by one, and a head that reads the neighbours of its layers goes on
guessing, only worse: a well-trained one so little worse that its likeliest guess is right as often. What it thought of
the token that came shows more. Knows what guesses say, not what a config says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from drafter.base import Drafter, DraftLimits, DraftRequest, Ticket
from drafter.scored import ScoredTree
from verifier.sampling import SamplingParams
from verifier.verifier import Verifier
from workers.measuring.contest import Asked, beside, engine_of
from workers.measuring.prompts import spread
from workers.sequence import Request

NUM_PROMPTS, MAX_TOKENS = 16, 64
NUM_GUESSES = 8  # that are looked for the token that came
# A gain in its probability is called one when it is large enough to matter and too large to be chance.
LEAST_GAIN, STANDARD_ERRORS = 0.01, 3.0

Ids = tuple[int, ...]
Place = tuple[int, int]  # a request, and a position in its text
Guesses = Mapping[int, float]  # probabilities by token
Create = Callable[[Ids, Verifier], Drafter]  # a drafter that reads these layers of that verifier


class Listening:
    """Asks a drafter for its first guesses at every token and proposes none, so that all guess at the same places."""

    def __init__(self, drafter: Drafter) -> None:
        self.fusion = drafter.fusion
        self.guesses: dict[Place, Guesses] = {}
        self._drafter = drafter
        self._lengths: dict[Ticket, dict[int, int]] = {}

    def start(self, batch: Sequence[DraftRequest]) -> Ticket:
        ticket = self._drafter.start(batch)
        self._lengths[ticket] = {request.sequence: len(request.ids) for request in batch}
        return ticket

    def collect(self, ticket: Ticket, deadline_s: float) -> Mapping[int, ScoredTree]:
        lengths = self._lengths.pop(ticket)
        for sequence, scored in self._drafter.collect(ticket, deadline_s).items():
            guesses = zip(scored.tree.tokens[1:], scored.shares[1:], strict=True)
            self.guesses[sequence, lengths[sequence]] = dict(guesses)
        return {}

    def close(self, sequence: int) -> None:
        self._drafter.close(sequence)


@dataclass(frozen=True)
class FirstGuess:
    """What was thought, place by place, of the token that came."""

    chances: Mapping[Place, float]  # its probability; 0 where it was not among the guesses
    right: Mapping[Place, bool]  # whether it was the likeliest

    @classmethod
    def of(cls, guesses: Mapping[Place, Guesses], texts: Sequence[Sequence[int]]) -> FirstGuess:
        came = {(number, place): texts[number][place] for number, place in guesses}
        chances = {place: guesses[place].get(token, 0.0) for place, token in came.items()}
        return cls(chances, {place: max(each, key=each.__getitem__) == came[place] for place, each in guesses.items()})

    @property
    def rate(self) -> float:
        return sum(self.right.values()) / len(self.right) if self.right else 0.0

    @property
    def chance(self) -> float:
        return fmean(self.chances.values()) if self.chances else 0.0

    def beats(self, other: FirstGuess) -> bool:
        """Clearly: the gain is the mean of differences at the same places, which say more than the two means."""
        gains = [chance - other.chances[place] for place, chance in self.chances.items() if place in other.chances]
        if len(gains) < 2:
            return False
        return fmean(gains) > max(LEAST_GAIN, STANDARD_ERRORS * stdev(gains) / math.sqrt(len(gains)))


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
    engine = engine_of(apart, listening, DraftLimits(max_draft=1, draft_top_k=NUM_GUESSES, max_nodes=NUM_GUESSES))
    stop_ids = frozenset(verifier.config.eos_token_ids)
    requests = [
        Request(str(index), prompt.ids, SamplingParams(temperature=0), MAX_TOKENS, stop_ids)
        for index, prompt in enumerate(spread(asked, NUM_PROMPTS))
    ]
    answers = engine.run(requests)
    texts = [(*request.prompt_ids, *answer.output_ids) for request, answer in zip(requests, answers, strict=True)]
    return FirstGuess.of(listening.guesses, texts)


def diagnosis(name: str, found: Found) -> str:
    """In a sentence, whether the ids that a head was opened with, the first of those found, are probably wrong."""
    (own, here), *others = found.items()
    best, there = max(found.items(), key=lambda each: each[1].chance)
    if not there.beats(here):
        shifted = " and ".join(f"{guess.chance:.3f} after {_listed(ids)}" for ids, guess in others)
        return (
            f"Layer ids: {name} reads its target after layers {_listed(own)}. It gives the token that comes a mean "
            f"probability of {here.chance:.3f}, against {shifted}. That speaks for no others."
        )
    return (
        f"Layer ids: those of {name} are probably one too {'low' if best > own else 'high'}. After layers "
        f"{_listed(own)} it gives the token that comes a mean probability of {here.chance:.3f}, but {there.chance:.3f} "
        f"after {_listed(best)}: set draft_layer_ids={','.join(map(str, best))}."
    )


def _listed(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids))
