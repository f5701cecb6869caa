"""Rounds of a long comparison on disk, so that it can be interrupted, and what they come to.

A round is one prompt at one temperature: plain decoding's answer, and those of all who took part. Speedups are ratios
within a round. Knows names, seconds and counts. Knows no model and no drafter.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verifier.errors import BadSetting
from workers.stats import Speculation


@dataclass(frozen=True)
class Outcome:
    """One answer."""

    seconds: float
    num_tokens: int
    digest: str  # of its ids
    speculation: Speculation
    failures: int = 0  # of the drafter

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        counts: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data["speculation"].items()
        }
        return cls(**{**data, "speculation": Speculation(**counts)})


@dataclass(frozen=True)
class Round:
    """``outcomes`` by contestant. A later round may have others for the same prompt, and a plain answer of its own."""

    prompt: str  # digest of its ids
    category: str
    temperature: float
    plain: Outcome
    outcomes: Mapping[str, Outcome]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Round:
        outcomes = {name: Outcome.from_json(each) for name, each in data["outcomes"].items()}
        return cls(**{**data, "plain": Outcome.from_json(data["plain"]), "outcomes": outcomes})


class RoundsFile:
    """JSON lines: first what all rounds have in common, then a line each, written when the round is over.

    Raises:
        BadSetting: there is a file already, of a run under other conditions or damaged; or none can be written.
    """

    def __init__(self, path: Path, conditions: Mapping[str, Any]) -> None:
        self._path = path
        self.rounds: list[Round] = []
        header = json.dumps(conditions) + "\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or not path.stat().st_size:
                path.write_text(header)
        except OSError as error:
            raise BadSetting("out", str(path.parent), f"a folder that can be written to ({error})") from error
        first, *lines = path.read_text().splitlines(keepends=True)
        if first != header:
            raise BadSetting(
                "out", str(path.parent), f"another folder: the rounds there were run under {first.strip()}"
            )
        if lines and not lines[-1].endswith("\n"):  # cut short
            path.write_text(first + "".join(lines := lines[:-1]))
        try:
            self.rounds = [Round.from_json(json.loads(line)) for line in lines]
        except (ValueError, LookupError, TypeError) as error:
            raise BadSetting("out", str(path.parent), f"another folder: {path.name} there is damaged") from error

    def add(self, finished: Round) -> None:
        self.rounds.append(finished)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(finished)) + "\n")

    def missing(self, prompt: str, temperature: float, contestants: Iterable[str]) -> list[str]:
        """Those who have not answered this prompt at this temperature."""
        done = {
            name
            for each in self.rounds
            if (each.prompt, each.temperature) == (prompt, temperature)
            for name in each.outcomes
        }
        return [name for name in contestants if name not in done]


@dataclass(frozen=True)
class Figures:
    """What one contestant did at one temperature."""

    prompts: int
    speedup: float  # over plain decoding in the same round: the median over the prompts
    speculation: Speculation
    differing: int  # answers that are not plain decoding's
    failures: int  # of the drafter

    @classmethod
    def of(cls, contestant: str, rounds: Sequence[Round]) -> Figures | None:
        """None of no rounds in which it took part."""
        pairs = [(each.plain, each.outcomes[contestant]) for each in rounds if contestant in each.outcomes]
        if not pairs:
            return None
        return cls(
            prompts=len(pairs),
            speedup=statistics.median(_speed(outcome) / _speed(plain) for plain, outcome in pairs),
            speculation=sum((outcome.speculation for _, outcome in pairs), Speculation()),
            differing=sum(plain.digest != outcome.digest for plain, outcome in pairs),
            failures=sum(outcome.failures for _, outcome in pairs),
        )


def _speed(outcome: Outcome) -> float:
    return outcome.num_tokens / outcome.seconds
