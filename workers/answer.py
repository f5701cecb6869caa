"""Answers for whoever waits for them: text as it comes, figures when it is done.

Knows an engine that steps on its own thread, and text. Knows no terminal, and needs no torch of its own.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

from drafter.base import DraftLimits
from verifier.errors import DraftreeError
from verifier.sampling import SamplingParams
from workers.sequence import Progress, Request
from workers.stats import Usage
from workers.text import Detokenizer, Text

if TYPE_CHECKING:
    from workers.engine import Engine


@dataclass(frozen=True)
class Answer:
    """What was said, and how fast. Times are seconds since the request was submitted."""

    text: str
    ids: tuple[int, ...]
    usage: Usage
    interrupted: bool
    first_tokens: int  # tokens of the first run
    first_s: float  # when it came: the time to first token
    total_s: float

    @property
    def tokens_per_s(self) -> float:
        """After the first run, so that the prompt's length does not matter; over all when there is nothing after it."""
        later = len(self.ids) - self.first_tokens
        return later / (self.total_s - self.first_s) if later else len(self.ids) / self.total_s

    def figures(self, plain: Answer | None = None) -> str:
        """One line: tokens, speed, how guessing went, and how that compares with ``plain`` decoding."""
        length, rate = self.usage.mean_acceptance_length, self.usage.acceptance_rate
        parts = [
            f"{len(self.ids)} tokens",
            f"{self.tokens_per_s:.1f} tokens/s",
            "mean acceptance length " + ("-" if length is None else f"{length:.2f}"),
            "acceptance rate " + ("-" if rate is None else f"{rate:.1%}"),
        ]
        if plain is not None:
            speedup = self.tokens_per_s / plain.tokens_per_s
            parts.append(f"{speedup:.2f} times plain decoding ({plain.tokens_per_s:.1f} tokens/s)")
            parts.append("same text" if self.ids == plain.ids else "ANOTHER TEXT than plain decoding")
        return ", ".join(parts)


class Session:
    """An engine, started, and how it is asked: one prompt after the other."""

    def __init__(self, engine: Engine, text: Text, sampling: SamplingParams, max_tokens: int) -> None:
        self.engine, self.text, self.sampling, self.max_tokens = engine, text, sampling, max_tokens
        self._request_id = ""
        self._interrupted = False

    def interrupt(self) -> None:
        """Ends the answer that is being given, with what there is of it. Safe in a signal handler."""
        self._interrupted = True
        self.engine.abort(self._request_id)

    def answer(
        self,
        ids: Sequence[int],
        show: Callable[[str], None] = lambda piece: None,
        *,
        continues: bool = False,
        limits: DraftLimits | None = None,
        salt: bytes = b"",
    ) -> Answer:
        """Gives ``show`` the text piece by piece. ``continues``: the prompt is a text and not a conversation.

        ``salt`` keeps runs that are compared from finding each other's prompt in the prefix cache.

        Raises:
            BadRequest: the engine cannot serve this prompt.
            DraftreeError: the engine gave up on it.
        """
        request = Request(
            id=uuid.uuid4().hex,
            prompt_ids=tuple(ids),
            sampling=self.sampling,
            max_tokens=self.max_tokens,
            stop_ids=frozenset(self.engine.verifier.config.eos_token_ids),
            limits=limits,
            salt=salt,
        )
        self._request_id, self._interrupted = request.id, False
        return self._follow(request, self.text.detokenizer(continues=continues), show)

    def _follow(self, request: Request, detokenizer: Detokenizer, show: Callable[[str], None]) -> Answer:
        mailbox: SimpleQueue[Progress] = SimpleQueue()
        began = time.perf_counter()
        self.engine.submit(request, mailbox.put)
        pieces: list[str] = []
        tokens: list[int] = []
        arrivals: list[tuple[int, float]] = []  # tokens so far, seconds so far
        finish = None
        while finish is None:
            progress = mailbox.get()
            tokens.extend(progress.tokens)
            arrivals.append((len(tokens), time.perf_counter() - began))
            # A stop id ends the text and is no part of it.
            pieces.append(detokenizer.push(progress.tokens[:-1] if progress.finish == "stop" else progress.tokens))
            show(pieces[-1])
            finish = progress.finish
        if finish == "error":
            raise DraftreeError(f"The engine gave up on this prompt: {progress.error}.")
        pieces.append(detokenizer.flush())
        show(pieces[-1])
        assert progress.usage is not None
        (first_tokens, first_s), (_, total_s) = arrivals[0], arrivals[-1]
        return Answer("".join(pieces), tuple(tokens), progress.usage, self._interrupted, first_tokens, first_s, total_s)
