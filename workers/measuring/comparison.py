"""Who answers which prompt at which temperature, until all have: the rounds of a comparison of methods.

The methods answer in turn, prompt by prompt, and plain decoding takes part in every round. An answer ends where the
model ends it, and its prompt is part of its time. Knows engines and rounds. Knows no figures.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from drafter.base import DraftLimits, NoDraft
from verifier.errors import DraftreeError
from verifier.sampling import SamplingParams
from verifier.verifier import Verifier
from workers.engine import Engine, Result
from workers.measuring.contest import Asked, beside, digest_of, engine_of, take_turns
from workers.measuring.methods import Entry
from workers.measuring.rounds import Outcome, Round, RoundsFile
from workers.sequence import Request
from workers.stats import Speculation

PLAIN = "plain"
WARM_UP_TOKENS = 8
GOLDEN = (math.sqrt(5) - 1) / 2

Answer = tuple[Result, int]  # with how often the drafter failed meanwhile


def conditions(verifier: Verifier, max_tokens: int) -> dict[str, Any]:
    """What rounds must have in common to be compared."""
    return {
        "model": verifier.fingerprint,
        "max_tokens": max_tokens,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


@dataclass(frozen=True)
class Comparison:
    """
    Attributes:
        entries: those that take part, and those that do not.
        engines: by key, plain decoding's among them.
    """

    entries: Sequence[Entry]
    engines: Mapping[str, Engine]
    max_tokens: int

    @classmethod
    def load(cls, entries: Sequence[Entry], verifier: Verifier, max_tokens: int) -> Comparison:
        """A method that cannot be loaded, for whatever reason, is told and stays away."""
        engines = {PLAIN: engine_of(beside(verifier), NoDraft(), DraftLimits())}
        loaded = []
        for entry in entries:
            try:
                engines |= _load(entry, verifier)
            except Exception as error:
                entry = replace(entry, plan=None, problem=f"could not be loaded: {type(error).__name__}: {error}")
            loaded.append(entry)
        return cls(loaded, engines, max_tokens)

    def run(
        self, asked: Sequence[Asked], temperatures: Sequence[float], file: RoundsFile, report: Callable[[str], None]
    ) -> None:
        """All that ``file`` lacks. However far it comes, what it has done is spread over the prompts."""
        order = sorted(range(len(asked)), key=lambda index: index * GOLDEN % 1)
        names = [name for name in self.engines if name != PLAIN]
        due = [
            (asked[index], temperature, missing)
            for index in order
            for temperature in temperatures
            if (missing := file.missing(asked[index].digest, temperature, names))
        ]
        if due:
            prompt, temperature, missing = due[0]
            take_turns(self._contestants(missing), self._request(prompt, temperature, WARM_UP_TOKENS))
        began = time.monotonic()
        for done, (prompt, temperature, missing) in enumerate(due, start=1):
            file.add(self._round(prompt, temperature, missing))
            left_s = (time.monotonic() - began) / done * (len(due) - done)
            report(f"{done} of {len(due)} rounds, about {left_s / 60:.0f} minutes left")

    def _round(self, prompt: Asked, temperature: float, names: Sequence[str]) -> Round:
        answers = take_turns(self._contestants(names), self._request(prompt, temperature, self.max_tokens))
        outcomes = {name: _outcome(answer, seconds) for name, (answer, seconds) in answers.items()}
        plain = outcomes.pop(PLAIN)
        return Round(prompt.digest, prompt.category, temperature, plain, outcomes)

    def _contestants(self, names: Sequence[str]) -> dict[str, Callable[[Request], Answer]]:
        return {name: partial(_answer, self.engines[name]) for name in (PLAIN, *names)}

    def _request(self, prompt: Asked, temperature: float, max_tokens: int) -> Request:
        sampling = SamplingParams(temperature=temperature, seed=int(prompt.digest[:8], 16))
        stop_ids = frozenset(self.engines[PLAIN].verifier.config.eos_token_ids)
        return Request("bench", prompt.ids, sampling, max_tokens, stop_ids)


def _load(entry: Entry, verifier: Verifier) -> dict[str, Engine]:
    """One drafter, and an engine for each size of trees; they run one at a time."""
    if entry.plan is None:
        return {}
    apart, method = beside(verifier), entry.method
    drafter = entry.plan.create(apart)
    return {
        entry.key(limits): engine_of(apart, drafter, limits, acceptance=method.acceptance, adaptive=method.adaptive)
        for limits in method.limits
    }


def _answer(engine: Engine, request: Request) -> Answer:
    failures = engine.stats().drafter_failures
    result = engine.run([request])[0]
    if result.error:
        raise DraftreeError(f"a prompt of {len(request.prompt_ids)} tokens could not be answered: {result.error}.")
    return result, engine.stats().drafter_failures - failures


def _outcome(answer: Answer, seconds: float) -> Outcome:
    result, failures = answer
    ids = result.output_ids
    return Outcome(seconds, len(ids), digest_of(ids), Speculation() + result.usage, failures)
