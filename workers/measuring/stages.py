"""Load and acceptance that change by a script, and what engines make of them: an adaptive one and fixed settings.

A stage is so many requests at a time, each followed by another, and a drafter that is good or useless. Its beginning is
left out of the figures, since that is where an engine finds out. Engines may share pages, so each gives all of them
back at the end of its stage, before the next one has the same. Knows engines and their counters. Knows no models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from drafter.base import DraftRequest, InstantDraft
from drafter.scored import ScoredTree
from workers.engine import Engine
from workers.measuring.table import number, table
from workers.sequence import Progress, Request

GOOD, USELESS = "good", "useless"
PLAIN, ADAPTIVE = "plain", "adaptive"
AGAIN = "best, again"


@dataclass(frozen=True)
class Stage:
    drafter: str
    at_a_time: int


MANY = 16
SCRIPT = (
    *(Stage(drafter, 1) for drafter in (GOOD, USELESS, GOOD)),
    *(Stage(drafter, MANY) for drafter in (GOOD, USELESS, GOOD)),
    Stage(GOOD, 1),
)


@dataclass(frozen=True)
class Length:
    """Of a stage, in tokens of each request that runs at a time."""

    settling: int  # not counted
    counted: int


class SwitchedDraft(InstantDraft):
    """One of several drafters at a time.

    Attributes:
        current: its name.
    """

    def __init__(self, drafters: Mapping[str, InstantDraft]) -> None:
        super().__init__()
        self._drafters = drafters
        self.current = next(iter(drafters))

    def propose(self, request: DraftRequest) -> ScoredTree:
        return self._drafters[self.current].propose(request)


@dataclass(frozen=True)
class Moment:
    """How a step guessed. ``depth`` and ``nodes`` are means over its sequences."""

    at: float  # seconds of this engine's own time
    stage: int
    depth: float
    nodes: float
    lanes: int


@dataclass
class Leg:
    """What an engine made of a stage."""

    seconds: float = 0.0
    tokens: int = 0
    longest_gap: float = 0.0  # seconds between two runs of tokens of any one request
    moments: list[Moment] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class Player:
    """Takes one engine through the stages.

    Args:
        request: another one, by its number; long enough to be followed by others now and then only.
    """

    def __init__(self, engine: Engine, drafter: SwitchedDraft, request: Callable[[int], Request]) -> None:
        self._engine, self._drafter, self._request = engine, drafter, request
        self._next = self._first = 0  # numbers of requests: the next one, and the stage's first
        self._played = 0.0
        self._heard: dict[str, float] = {}  # when each request's last tokens came
        self._gap = 0.0

    def play(self, index: int, stage: Stage, length: Length, *, again: bool = False) -> Leg:
        """
        Args:
            again: with the requests that it played last.
        """
        engine, clock, leg = self._engine, self._engine.clock, Leg()
        self._next = self._first = self._first if again else self._next
        self._drafter.current, self._gap = stage.drafter, 0.0
        began, counters = clock(), engine.counters
        start = counters.output_tokens + length.settling * stage.at_a_time
        counted_from: tuple[float, int] | None = None
        while counted_from is None or counters.output_tokens < counted_from[1] + length.counted * stage.at_a_time:
            if counted_from is None and counters.output_tokens >= start:
                counted_from = clock(), counters.output_tokens
            while len(engine.inbox.live) < stage.at_a_time:
                engine.submit(self._request(self._next), self._listen)
                self._next += 1
            before = counters.speculation
            engine.step()
            done = counters.speculation
            if steps := done.steps - before.steps:
                depth = (sum(done.drafted_by_position) - sum(before.drafted_by_position)) / steps
                nodes = (done.drafted_tokens - before.drafted_tokens) / steps
                moment = Moment(self._played + clock() - began, index, depth, nodes, engine.policy.lanes)
                leg.moments.append(moment)
        leg.seconds, leg.tokens = clock() - counted_from[0], counters.output_tokens - counted_from[1]
        leg.longest_gap = self._gap
        self._played += clock() - began
        self._end_all()
        return leg

    def _listen(self, progress: Progress) -> None:
        if progress.tokens:
            now = self._engine.clock()
            self._gap = max(self._gap, now - self._heard.get(progress.request_id, now))
            self._heard[progress.request_id] = now
        if progress.finish:
            self._heard.pop(progress.request_id, None)

    def _end_all(self) -> None:
        for sequence in self._engine.inbox.live:
            self._engine.abort(sequence.request.id)
        while self._engine.step():
            pass


@dataclass(frozen=True)
class Result:
    """One stage, by contestant; figures are medians over the rounds."""

    stage: Stage
    legs: Mapping[str, Sequence[Leg]]

    def rate(self, name: str) -> float:
        return median(leg.tokens_per_s for leg in self.legs[name])

    @property
    def best(self) -> str:
        """The best of the settings that do not change, plain decoding among them."""
        return max((name for name in self.legs if name not in (ADAPTIVE, AGAIN)), key=self.rate)

    @property
    def ratio(self) -> float:
        """To the best one as it was measured again: whoever is best of many was lucky, too."""
        return self.rate(ADAPTIVE) / self.rate(AGAIN)

    @property
    def stretch(self) -> float:
        """How many times longer than in plain decoding somebody waited for tokens."""
        adaptive, plain = (median(leg.longest_gap for leg in self.legs[name]) for name in (ADAPTIVE, PLAIN))
        return adaptive / plain

    @property
    def settings(self) -> tuple[float, float, float]:
        """Depth, nodes and lanes of the adaptive engine's steps, on average over the stage."""
        moments = [moment for leg in self.legs[ADAPTIVE] for moment in leg.moments]
        sums = (sum(getattr(moment, name) for moment in moments) for name in ("depth", "nodes", "lanes"))
        depth, nodes, lanes = (total / len(moments) for total in sums)
        return depth, nodes, lanes

    @property
    def data(self) -> dict[str, Any]:
        return {
            "drafter": self.stage.drafter,
            "at_a_time": self.stage.at_a_time,
            "tokens_per_s": {name: round(self.rate(name), 2) for name in self.legs},
            "best": self.best,
            "ratio": round(self.ratio, 4),
            "stretch": round(self.stretch, 3),
            "settings": [round(value, 2) for value in self.settings],
        }


def play_all(
    players: Mapping[str, Player], length: Callable[[Stage], Length], rounds: int, report: Callable[[str], None]
) -> list[Result]:
    """Every player plays every stage, in turn, and then the best of those that do not change once more."""
    legs: list[dict[str, list[Leg]]] = [{name: [] for name in (*players, AGAIN)} for _ in SCRIPT]
    for turn in range(rounds):
        for index, (stage, played) in enumerate(zip(SCRIPT, legs, strict=True), start=turn * len(SCRIPT)):
            for name, player in players.items():
                played[name].append(player.play(index, stage, length(stage)))
            best = players[Result(stage, played).best]
            played[AGAIN].append(best.play(index, stage, length(stage), again=True))
            report(f"round {turn + 1}, {stage.drafter} drafter, {stage.at_a_time} at a time: done")
    return [Result(stage, each) for stage, each in zip(SCRIPT, legs, strict=True)]


def show(results: Sequence[Result]) -> str:
    header = ("drafter", "at a time", "plain", "best fixed", "tokens/s", "adaptive", "ratio", "stretch")
    rows = [
        (
            result.stage.drafter,
            str(result.stage.at_a_time),
            number(result.rate(PLAIN), 1),
            result.best,
            number(result.rate(AGAIN), 1),
            number(result.rate(ADAPTIVE), 1),
            number(result.ratio, 3),
            number(result.stretch),
            *(number(value, 1) for value in result.settings),
        )
        for result in results
    ]
    return table((*header, "depth", "nodes", "lanes"), rows)
