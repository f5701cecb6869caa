"""Load and acceptance that change by a script, and what engines make of them: an adaptive one and fixed settings.

A stage is so many requests at a time, each followed by another, and a drafter that is good or useless. Its beginning is
left out of the figures, since that is where an engine finds out. Engines may share pages, so each gives all of them
back at the end of its stage, before the next one has the same. Knows engines and their counters. Knows no models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
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
TURN = 8  # steps
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
        self._stopped_at = engine.clock()
        self._paused = self._stopped_at  # seconds that others had
        self._heard: dict[str, float] = {}  # when each request's last tokens came
        self._gap = 0.0

    def play(self, index: int, stage: Stage, length: Length, *, again: bool = False) -> Iterator[Leg]:
        """The leg as it is after each step. Between two steps this engine's time stands still.

        Args:
            again: with the requests that it played last.
        """
        engine, leg, counters = self._engine, Leg(), self._engine.counters
        self._go_on()
        self._next = self._first = self._first if again else self._next
        self._drafter.current, self._gap = stage.drafter, 0.0
        start = counters.output_tokens + length.settling * stage.at_a_time
        counted_from: tuple[float, int] | None = None
        while counted_from is None or leg.tokens < length.counted * stage.at_a_time:
            if counted_from is None and counters.output_tokens >= start:
                counted_from = self._now(), counters.output_tokens
            while len(engine.inbox.live) < stage.at_a_time:
                engine.submit(self._request(self._next), self._listen)
                self._next += 1
            before = counters.speculation
            engine.step()
            done = counters.speculation
            if steps := done.steps - before.steps:
                depth = (sum(done.drafted_by_position) - sum(before.drafted_by_position)) / steps
                nodes = (done.drafted_tokens - before.drafted_tokens) / steps
                leg.moments.append(Moment(self._now(), index, depth, nodes, engine.policy.lanes))
            if counted_from:
                leg.seconds, leg.tokens = self._now() - counted_from[0], counters.output_tokens - counted_from[1]
            leg.longest_gap = self._gap
            self._stopped_at = engine.clock()
            yield leg
            self._go_on()
        self._end_all()
        self._stopped_at = engine.clock()

    def _go_on(self) -> None:
        self._paused += self._engine.clock() - self._stopped_at

    def _now(self) -> float:
        """Seconds that this engine has had."""
        return self._engine.clock() - self._paused

    def _listen(self, progress: Progress) -> None:
        if progress.tokens:
            now = self._now()
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
    """Every player that does not change plays every stage, one after the other; then the adaptive one plays it against
    the best of them, in turns of a few steps, so that both have the same machine.

    The adaptive one needs pages of its own.
    """
    legs: list[dict[str, list[Leg]]] = [{name: [] for name in (*players, AGAIN)} for _ in SCRIPT]
    for turn in range(rounds):
        for index, (stage, played) in enumerate(zip(SCRIPT, legs, strict=True), start=turn * len(SCRIPT)):
            for name, player in players.items():
                if name != ADAPTIVE:
                    played[name] += in_turns(player.play(index, stage, length(stage)))
            best = players[Result(stage, played).best]
            adaptive, again = in_turns(
                players[ADAPTIVE].play(index, stage, length(stage)), best.play(index, stage, length(stage), again=True)
            )
            played[ADAPTIVE].append(adaptive)
            played[AGAIN].append(again)
            report(f"round {turn + 1}, {stage.drafter} drafter, {stage.at_a_time} at a time: done")
    return [Result(stage, each) for stage, each in zip(SCRIPT, legs, strict=True)]


def in_turns(*legs: Iterator[Leg]) -> list[Leg]:
    """Plays all of them to their ends, a few steps of each in turn."""
    last: dict[int, Leg] = {}
    going = dict(enumerate(legs))
    while going:
        for place, leg in list(going.items()):
            steps = list(islice(leg, TURN))
            last |= {place: steps[-1]} if steps else {}
            if len(steps) < TURN:
                del going[place]
    return [last[place] for place in range(len(legs))]


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
