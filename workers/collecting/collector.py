"""Lets an engine write many conversations at once, and keeps the hidden states of what it wrote.

Knows asks and answers, and runs the engine. Knows no recipes, no files and no time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from drafter.base import DraftLimits
from drafter.training.recorder import RECORDED, Recorder
from drafter.training.shards import Conversation
from verifier.errors import BadRequest, DraftreeError
from verifier.sampling import SamplingParams
from workers.collecting.conversations import Ask, Dialogue, Written
from workers.engine import Engine, EngineDead
from workers.sequence import Progress, Request

logger = logging.getLogger(__name__)

MOST_FAILURES = 100  # in a row


@dataclass
class Question:
    """An ask that the engine is at work on, and what it has written so far."""

    dialogue: Dialogue
    ask: Ask
    ids: list[int] = field(default_factory=list)
    end: int | None = None
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.ask.ids) + len(self.ids) + (self.end is not None)

    def hear(self, tokens: tuple[int, ...], stop_ids: frozenset[int]) -> None:
        """Takes what belongs to the text: all up to the first stop id."""
        for token in tokens:
            if self.end is None and token in stop_ids:
                self.end = token
            elif self.end is None:
                self.ids.append(token)


class Collector:
    """Keeps ``batch`` conversations going.

    Attributes:
        failures: conversations that were given up.
    """

    def __init__(
        self,
        engine: Engine,
        recorder: Recorder,
        dialogues: Iterator[Dialogue],
        *,
        stop_ids: frozenset[int],
        batch: int,
    ) -> None:
        self.engine, self.recorder, self.dialogues = engine, recorder, dialogues
        self.stop_ids, self.batch = stop_ids, batch
        self._finished: list[Conversation] = []
        self.failures = 0
        self._failures_in_a_row = 0
        self._num_live = 0
        self._ended: list[Question] = []

    def take(self) -> list[Conversation]:
        """What was recorded since the last time."""
        finished, self._finished = self._finished, []
        return finished

    def step(self) -> bool:
        """One step of the engine. False when all conversations are over.

        Raises:
            DraftreeError: nothing but failures.
            EngineDead: the engine has given up.
        """
        while self._num_live < self.batch and (dialogue := next(self.dialogues, None)):
            self._go_on(dialogue, None)
        self.engine.step()
        ended, self._ended = self._ended, []
        for question in ended:
            self._close(question)
        if self.engine.dead:
            raise EngineDead(self.engine.dead)
        return self._num_live > 0

    def _go_on(self, dialogue: Dialogue, written: Written | None) -> None:
        try:
            ask = next(dialogue) if written is None else dialogue.send(written)
        except StopIteration:
            return
        try:
            self._submit(Question(dialogue, ask))
        except BadRequest as error:
            self._give_up(dialogue, str(error))

    def _submit(self, question: Question) -> None:
        """The engine learns nothing of the last token that it draws. So a text that is recorded is not stopped at its
        end mark, but goes on until the mark has been computed too.
        """
        ask = question.ask
        request = Request(
            id=str(ask.seed),
            prompt_ids=ask.ids,
            sampling=SamplingParams(ask.temperature, seed=ask.seed),
            max_tokens=ask.max_tokens,
            stop_ids=frozenset() if ask.kind else self.stop_ids,
            limits=RECORDED if ask.kind else DraftLimits(),
        )
        self.engine.submit(request, partial(self._hear, question))
        self._num_live += 1

    def _hear(self, question: Question, progress: Progress) -> None:
        question.hear(progress.tokens, self.stop_ids)
        if progress.finish:
            question.error = progress.error
            self._ended.append(question)
        elif question.end is not None and self.recorder.num_recorded(question.ask.seed) >= question.num_tokens:
            self.engine.abort(progress.request_id)

    def _close(self, question: Question) -> None:
        self._num_live -= 1
        if question.error is not None:
            self.recorder.take(question.ask.seed)
            self._give_up(question.dialogue, question.error)
            return
        self._failures_in_a_row = 0
        if question.ask.kind:
            self._keep(question)
        self._go_on(question.dialogue, Written(tuple(question.ids), question.end))

    def _keep(self, question: Question) -> None:
        """The conversation as far as its states were recorded."""
        ask = question.ask
        features, last = self.recorder.take(ask.seed)
        n = min(len(last), question.num_tokens)
        ids = [*ask.ids, *question.ids, *([] if question.end is None else [question.end])][:n]
        mask = [*ask.mask, *[1] * (question.num_tokens - len(ask.ids))][:n]
        if any(mask):
            tokens, trained = torch.tensor(ids, dtype=torch.int32), torch.tensor(mask, dtype=torch.uint8)
            self._finished.append(Conversation(tokens, trained, ask.kind, features[:n], last[:n]))

    def _give_up(self, dialogue: Dialogue, reason: str) -> None:
        dialogue.close()
        self.failures += 1
        self._failures_in_a_row += 1
        logger.warning("a conversation was given up: %s", reason)
        if self._failures_in_a_row == MOST_FAILURES:
            raise DraftreeError(f"{MOST_FAILURES} conversations in a row failed, the last because: {reason}")
