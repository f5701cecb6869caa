"""Clients that ask the same few questions again and again, and what they are told.

A question says all that decides its answer, so that every answer to it must be the same text. Knows HTTP and OpenAI's
shapes; knows of no faults.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx

MAX_TOKENS = 120
ANSWER_S = 600.0  # longer than the service itself waits for a replica
PAUSE_S = 0.2  # of a client, between two questions


@dataclass(frozen=True, slots=True)
class Question:
    number: int
    prompt: str
    temperature: float
    stream: bool

    def body(self, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": self.prompt,
            "temperature": self.temperature,
            "seed": self.number,
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "stream": self.stream,
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """``problem``: why there is no whole text; "" if there is."""

    question: Question
    text: str
    problem: str
    asked_at: float  # by `time.monotonic`
    seconds: float


def questions(count: int) -> list[Question]:
    """Prompts of many lengths, some of them with a beginning in common; half at temperature 0, a third not streamed."""
    common = "What I say to this makes no sense, "
    return [
        Question(number, common * (number % 3) + f"{number} " * (1 + number), float(number % 2), number % 3 > 0)
        for number in range(count)
    ]


class Load:
    """So many clients, until it is stopped. Which questions they ask, and in which order, is the seed's."""

    def __init__(self, url: str, model: str, asked: Sequence[Question]) -> None:
        self.answers: list[Answer] = []
        self._url, self._model, self._asked = url, model, asked
        self._writing = 0
        self._changed = threading.Condition()
        self._enough = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, clients: int, seed: int) -> None:
        for number in range(clients):
            thread = threading.Thread(target=self._run, args=(Random(f"{seed} {number}"),), daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Returns when all questions that were asked are answered."""
        self._enough.set()
        for thread in self._threads:
            thread.join()

    def await_streams(self, count: int, within_s: float) -> bool:
        """Returns once so many streams are in the middle of their text; False if they were not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._writing >= count, within_s)

    def _run(self, random: Random) -> None:
        while not self._enough.wait(PAUSE_S):
            answer = self.ask(random.choice(self._asked))
            self.answers.append(answer)

    def ask(self, question: Question) -> Answer:
        asked_at = time.monotonic()
        texts: list[str] = []
        problem = ""
        try:
            with httpx.Client(base_url=self._url, timeout=ANSWER_S) as client:
                pieces = self._streamed(client, question) if question.stream else self._whole(client, question)
                texts.extend(pieces)
        except (httpx.HTTPError, LookupError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
        return Answer(question, "".join(texts), problem, asked_at, time.monotonic() - asked_at)

    def _whole(self, client: httpx.Client, question: Question) -> Iterator[str]:
        answer = client.post("/v1/completions", json=question.body(self._model))
        if answer.status_code != 200:
            raise ValueError(f"status {answer.status_code}: {answer.text}")
        yield answer.json()["choices"][0]["text"]

    def _streamed(self, client: httpx.Client, question: Question) -> Iterator[str]:
        ended = False
        with client.stream("POST", "/v1/completions", json=question.body(self._model)) as answer:
            if answer.status_code != 200:
                raise ValueError(f"status {answer.status_code}: {answer.read().decode()}")
            try:
                self._count(1)
                for line in answer.iter_lines():
                    ended |= line == "data: [DONE]"
                    if line.startswith("data: {"):
                        yield _piece(json.loads(line.removeprefix("data: ")))
            finally:
                self._count(-1)
        if not ended:
            raise ValueError("the stream ended before its text")

    def _count(self, change: int) -> None:
        with self._changed:
            self._writing += change
            self._changed.notify_all()


def _piece(event: dict[str, Any]) -> str:
    if "error" in event:
        raise ValueError(f"an error in the stream: {event['error']}")
    return "".join(choice["text"] for choice in event["choices"])
