"""Whether ``GET /health`` tells the truth: asked all the time, and compared with which verifiers could answer then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx

EVERY_S = 0.5
ANSWER_S = 60.0


@dataclass(frozen=True, slots=True)
class Statement:
    """``before``, ``after``: the verifiers that could answer when the question was sent and when it was answered."""

    well: bool
    said: str
    before: frozenset[str]
    after: frozenset[str]
    at_s: float  # since the first one

    @property
    def lie(self) -> str:
        """What is wrong with it; "" if it may be true: somebody may have come or gone while it was made."""
        if self.well and not self.before | self.after:
            return f"at {self.at_s:.0f} s it said that it was well when no verifier was"
        if not self.well and (able := self.before & self.after):
            return f"at {self.at_s:.0f} s it said that it was not well when {len(able)} verifiers were: {self.said}"
        return ""


class HealthWatch:
    """Asks on a thread of its own until it is stopped.

    Args:
        able: the verifiers that can answer at a moment.
        look: makes sure that ``able`` is not out of date.
    """

    def __init__(self, url: str, able: Callable[[], frozenset[str]], look: Callable[[], object]) -> None:
        self.statements: list[Statement] = []
        self._url, self._able, self._look = url, able, look
        self._began, self._enough = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._enough.set()
        self._thread.join()

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=ANSWER_S) as client:
            while not self._enough.wait(EVERY_S):
                self.statements.append(self._ask(client))

    def _ask(self, client: httpx.Client) -> Statement:
        before, at_s = self._able(), time.monotonic() - self._began
        try:
            answer = client.get("/health")
            well, said = answer.status_code == 200, answer.text
        except httpx.HTTPError as error:
            well, said = False, f"{type(error).__name__}: {error}"
        statement = Statement(well, said, before, self._able(), at_s)
        if statement.lie:  # or is it the last look that is out of date?
            self._look()
            statement = Statement(well, said, before, self._able(), at_s)
        return statement
