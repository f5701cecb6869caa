"""The same draft network here and elsewhere, and where a step's time goes: two engines that answer in turn.

Knows engines and their counters. Knows no processes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

from verifier.errors import DraftreeError
from verifier.sampling import SamplingParams
from workers.engine import Engine
from workers.measuring.contest import Asked
from workers.measuring.table import number, table
from workers.sequence import Request
from workers.stats import RemoteFigures

LOCAL, REMOTE = "local", "remote"
WELCOME_S = 60.0
HEADER = (
    *("draft model", "at a time", "drafter", "tokens/s", "× local", "τ", "verify ms", "propose ms"),
    *("drafter ms", "wire ms", "KB", "missed", "changed"),
)


@dataclass(frozen=True)
class Run:
    """Some requests at the same time, answered by one engine. Times are seconds, altogether."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    verify_s: float = 0.0
    propose_s: float = 0.0
    verify_steps: int = 0  # trees read, one for each sequence and step
    verified_tokens: int = 0  # that came of these
    asked: int = 0  # messages to the drafter
    missed: int = 0  # of these, not answered in time
    waited_s: float = 0.0  # from messages to answers
    drafted_s: float = 0.0  # of that, on the drafter
    bytes_sent: int = 0

    def __sub__(self, earlier: Run) -> Run:
        return Run(*(getattr(self, each.name) - getattr(earlier, each.name) for each in fields(self)))

    def __add__(self, other: Run) -> Run:
        return Run(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def mean_acceptance_length(self) -> float | None:
        return self.verified_tokens / self.verify_steps if self.verify_steps else None

    def per_step(self, amount: float) -> float:
        return amount / self.steps

    def per_message(self, amount: float) -> float | None:
        return amount / self.asked if self.asked else None


@dataclass(frozen=True)
class Place:
    """An engine, and the account of its drafter if that runs elsewhere."""

    engine: Engine
    remote: RemoteFigures | None = None

    def answer(self, prompts: Sequence[Asked], max_tokens: int) -> tuple[Run, list[tuple[int, ...]]]:
        """Greedy answers of ``max_tokens`` tokens each to all prompts at the same time."""
        greedy = SamplingParams(temperature=0)
        requests = [Request(f"{number}", prompt.ids, greedy, max_tokens) for number, prompt in enumerate(prompts)]
        before = self._so_far()
        results = self.engine.run(requests)
        return self._so_far() - before, [result.output_ids for result in results]

    def await_drafter(self, prompt: Asked) -> None:
        """Answers until a drafter elsewhere has welcomed it: before that nothing is drafted that could be measured.

        Raises:
            DraftreeError: none has in `WELCOME_S`.
        """
        ends = time.monotonic() + WELCOME_S
        while self.remote and not self.remote.connected:
            if time.monotonic() > ends:
                raise DraftreeError(f"no drafter has welcomed the verifier: {self.remote.reason}.")
            self.answer([prompt], 4)

    def _so_far(self) -> Run:
        counters, remote = self.engine.stats().counters, self.remote or RemoteFigures()
        return Run(
            time.perf_counter(),
            counters.output_tokens,
            counters.steps,
            counters.verify_s,
            counters.propose_s,
            counters.speculation.steps,
            counters.speculation.verified_tokens,
            remote.asked,
            remote.missed,
            remote.waited_s,
            remote.drafted_s,
            remote.bytes_sent,
        )


@dataclass(frozen=True)
class Match:
    """What came of one draft model with so many requests at a time. A round each."""

    draft_model: str
    at_a_time: int
    local: Sequence[Run]
    remote: Sequence[Run]
    differing: int  # remote answers that are not the local ones

    @property
    def ratio(self) -> float:
        """Of tokens/s, remote over local: the median over the rounds."""
        pairs = zip(self.local, self.remote, strict=True)
        return median(remote.tokens_per_s / local.tokens_per_s for local, remote in pairs)

    def runs(self, place: str) -> Sequence[Run]:
        return self.local if place == LOCAL else self.remote

    def figures(self, place: str) -> dict[str, float | None]:
        """Tokens/s are a median over the rounds; milliseconds are of a step, or of a message to the drafter."""
        runs = self.runs(place)
        whole = sum(runs, Run())
        figures = {
            "tokens_per_s": median(run.tokens_per_s for run in runs),
            "mean_acceptance_length": whole.mean_acceptance_length,
            "verify_ms": whole.per_step(1e3 * whole.verify_s),
            "propose_ms": whole.per_step(1e3 * whole.propose_s),
            "messages_per_step": whole.per_step(whole.asked),
            "drafter_ms": whole.per_message(1e3 * whole.drafted_s),
            "wire_ms": whole.per_message(1e3 * (whole.waited_s - whole.drafted_s)),
            "kilobytes": whole.per_message(1e-3 * whole.bytes_sent),
            "missed": whole.missed,
        }
        return {name: value and round(value, 3) for name, value in figures.items()}

    @property
    def data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "draft_model": self.draft_model,
            "at_a_time": self.at_a_time,
            "rounds": len(self.local),
            "ratio": round(self.ratio, 3),
            "changed": self.differing,
            LOCAL: self.figures(LOCAL),
            REMOTE: self.figures(REMOTE),
        }


def play(
    draft_model: str, places: Mapping[str, Place], asked: Sequence[Asked], at_a_time: int, rounds: int, max_tokens: int
) -> Match:
    """Both places answer the same prompts, in turn, after an unmeasured round. Who begins changes with each round."""
    runs: dict[str, list[Run]] = {LOCAL: [], REMOTE: []}
    differing = 0
    for index in range(-1, rounds):
        prompts = [asked[(index * at_a_time + place) % len(asked)] for place in range(at_a_time)]
        answers: dict[str, list[tuple[int, ...]]] = {}
        for name in (LOCAL, REMOTE) if index % 2 else (REMOTE, LOCAL):
            run, answers[name] = places[name].answer(prompts, max_tokens)
            if index >= 0:
                runs[name].append(run)
        differing += sum(ours != theirs for ours, theirs in zip(answers[LOCAL], answers[REMOTE], strict=True))
    return Match(draft_model, at_a_time, runs[LOCAL], runs[REMOTE], differing)


def show(matches: Sequence[Match]) -> str:
    """As a table, a line for each place."""
    return table(HEADER, [_cells(match, place) for match in matches for place in (LOCAL, REMOTE)])


def _cells(match: Match, place: str) -> list[str]:
    figures = match.figures(place)
    return [
        match.draft_model,
        str(match.at_a_time),
        place,
        number(figures["tokens_per_s"], 1),
        number(match.ratio if place == REMOTE else 1.0),
        number(figures["mean_acceptance_length"]),
        number(figures["verify_ms"], 1),
        number(figures["propose_ms"], 1),
        number(figures["drafter_ms"], 1),
        number(figures["wire_ms"]),
        number(figures["kilobytes"], 1),
        number(figures["missed"], 0),
        str(match.differing if place == REMOTE else 0),
    ]
