"""What came of it: from answers, faults, statements and leftovers to which promises were kept. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deployments.chaos.health import Statement
from deployments.chaos.load import Answer, Question
from workers.measuring.table import NONE, number, table
from workers.stats import NEAR_TIE

SHOWN = 5  # examples of what went wrong


@dataclass(frozen=True, slots=True)
class Event:
    """A fault, and what came of it.

    Attributes:
        at_s: since the load began.
        whole_s: until the service had its full capacity again; None: it had not in time.
        replays: requests that went on elsewhere meanwhile.
    """

    kind: str
    target: str
    at_s: float
    whole_s: float | None
    replays: int


@dataclass(frozen=True)
class Verdict:
    """
    Attributes:
        truth: what the fault-free run said, by question.
        gap: how close the choice was at which a text parted from that; None: there is none to be found.
        least: how often each kind of fault had to come.
    """

    truth: Mapping[int, str]
    answers: Sequence[Answer]
    events: Sequence[Event]
    kinds: Sequence[str]
    least: int
    statements: Sequence[Statement]
    leftovers: Sequence[str]
    gap: Callable[[Question, str], float | None]

    @cached_property
    def failed(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.problem]

    @cached_property
    def changed(self) -> list[Answer]:
        return [
            answer
            for answer in self.answers
            if not answer.problem and answer.text != self.truth.get(answer.question.number)
        ]

    @cached_property
    def lies(self) -> list[str]:
        return [statement.lie for statement in self.statements if statement.lie]

    @cached_property
    def broken(self) -> list[str]:
        """A sentence for each promise that was not kept."""
        found = []
        if self.failed:
            found.append(f"{len(self.failed)} requests failed: {_some(answer.problem for answer in self.failed)}")
        if self.changed:
            found.append(f"{len(self.changed)} texts changed: {_some(map(self._change, self.changed))}")
        lost = [event for event in self.events if event.whole_s is None]
        if lost:
            found.append(f"full capacity did not come back: {_some(f'{each.kind} ({each.target})' for each in lost)}")
        if self.lies:
            found.append(f"health lied {len(self.lies)} times: {_some(self.lies)}")
        if self.leftovers:
            found.append(f"something stayed behind: {_some(self.leftovers)}")
        if rare := [kind for kind in self.kinds if self._of(kind) < self.least]:
            found.append(f"faults that did not come {self.least} times: {', '.join(rare)}")
        if not self.answers:
            found.append("nothing was asked")
        return found

    def report(self) -> str:
        """For people."""
        rows = [
            [event.kind, event.target, number(event.at_s, 0), number(event.whole_s, 1), str(event.replays)]
            for event in self.events
        ]
        lines = [
            table(["fault", "hit", "at s", "whole again after s", "replays"], rows),
            "",
            f"{len(self.answers)} requests: {len(self.failed)} failed, {len(self.changed)} with a changed text; "
            f"health asked {len(self.statements)} times, {len(self.lies)} lies.",
            *(f"BROKEN: {each}" for each in self.broken),
        ]
        return "\n".join(lines)

    def data(self) -> dict[str, Any]:
        """For JSON."""
        whole = {kind: [event.whole_s for event in self.events if event.kind == kind] for kind in self.kinds}
        return {
            "kept": not self.broken,
            "requests": len(self.answers),
            "failed": len(self.failed),
            "changed": len(self.changed),
            "faults": len(self.events),
            "replays": sum(event.replays for event in self.events),
            "whole_again_s": {kind: [each and round(each, 1) for each in times] for kind, times in whole.items()},
            "health_statements": len(self.statements),
            "health_lies": len(self.lies),
            "leftovers": list(self.leftovers),
            "broken": self.broken,
        }

    def _of(self, kind: str) -> int:
        return sum(event.kind == kind for event in self.events)

    def _change(self, answer: Answer) -> str:
        question = answer.question
        gap = self.gap(question, answer.text)
        close = NONE if gap is None else f"{gap:.2g}, {'a near-tie' if gap < NEAR_TIE else 'no near-tie'}"
        return f"question {question.number} at temperature {question.temperature:g} (gap {close})"


def _some(examples: Iterable[str]) -> str:
    found = list(dict.fromkeys(examples))
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(found[:SHOWN]) + more
