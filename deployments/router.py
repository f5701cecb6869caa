"""From an admitted request to pieces of text: limits, the seed, stop strings, and what was used.

Knows token ids and text. Knows no HTTP and no Ray. The request, its seed and its text state live here, a verifier holds
only caches; so a verifier may be lost (`deployments.replay`), and the text goes on.
"""

from __future__ import annotations

import logging
import secrets
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import NamedTuple

from deployments.errors import ApiError, refused
from deployments.metrics import RequestMetrics
from deployments.replay import Patience, Replays
from deployments.replay import Verifier as Verifier
from drafter.base import DraftLimits
from verifier.sampling import SamplingParams
from workers.sequence import Progress, Request
from workers.stats import Speculation
from workers.text import Detokenizer, StopStrings, Text

log = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model allows."""

    max_model_len: int  # prompt and output together, in tokens
    vocab_size: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Generation:
    """What a client asks for, whichever endpoint it came through."""

    prompt_ids: tuple[int, ...]
    prompt_field: str  # how the endpoint calls the prompt, for messages
    continues: bool  # the answer goes on in the middle of the prompt's text
    budget_field: str  # how the client calls the budget
    max_tokens: int | None  # None: whatever room the prompt leaves
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    sampling: SamplingParams
    has_seed: bool  # without one, the router draws one at admission
    salt: bytes = b""  # requests share cached prefixes with equal salts only


class Usage(NamedTuple):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    speculation: Speculation = Speculation()
    limits: DraftLimits | None = None  # of draft trees, that were in force; None: the engine's
    replays: int = 0


class Piece(NamedTuple):
    """Some more text; ``finish`` ("stop" or "length") and ``usage`` come with the last piece, and only there."""

    text: str
    finish: str | None = None
    usage: Usage | None = None
    num_tokens: int = 0  # of the answer so far


class Router:
    """Admits requests and turns their runs into text."""

    def __init__(
        self,
        verifier: Verifier,
        text: Text,
        limits: Limits,
        metrics: RequestMetrics | None = None,
        patience: Patience | None = None,
        fingerprint: str = "",
    ) -> None:
        self.limits = limits
        self._text = text
        self._replays = Replays(verifier, metrics or RequestMetrics(), patience or Patience(), fingerprint)

    async def generate(self, generation: Generation, request: Request) -> AsyncGenerator[Piece, None]:
        """Pieces of text until one has a finish. Closing the generator aborts the request.

        Args:
            request: that ``generation`` was admitted as.

        Raises:
            ApiError: the request was given up.
        """
        stops = self._text.stop_strings(generation.stop)
        text = _TextOf(self._text.detokenizer(continues=generation.continues), stops, bool(generation.stop))
        async with aclosing(self._replays.generate(request)) as runs:
            async for run in runs:
                if run.finish in ("abort", "error"):
                    log.error("request %s ended with %s: %s", request.id, run.finish, run.error)
                    raise ApiError(500, "The model failed on this request; the server's log says why.", code="failed")
                piece, finish = text.push(run)
                if finish is None:
                    if piece:
                        yield Piece(piece, num_tokens=text.num_tokens)
                    continue
                assert run.usage is not None, "an engine says with each run what was used"
                num_prompt, cached = len(request.prompt_ids), run.usage.cached_tokens
                used = Usage(num_prompt, text.num_tokens, cached, run.usage, request.limits, run.usage.replays)
                yield Piece(piece, finish, used, text.num_tokens)
                return

    def admit(self, generation: Generation) -> Request:
        """The engine's request for ``generation``, with a seed.

        Raises:
            ApiError: 400, when the model's limits do not allow it.
            BadRequest: a sampling parameter out of its range.
        """
        max_tokens = self._budget(generation)
        self._check_ids(generation)
        eos = frozenset[int]() if generation.ignore_eos else self.limits.eos_token_ids
        sampling = generation.sampling
        if not generation.has_seed:
            sampling = replace(sampling, seed=secrets.randbits(63))
        return Request(
            id=uuid.uuid4().hex,
            prompt_ids=generation.prompt_ids,
            sampling=sampling,
            max_tokens=max_tokens,
            stop_ids=eos | frozenset(generation.stop_token_ids),
            salt=generation.salt,
        )

    def _check_ids(self, generation: Generation) -> None:
        vocab_size, field = self.limits.vocab_size, generation.prompt_field
        if not generation.prompt_ids:
            raise refused(field, f"'{field}' must hold at least one token.")
        for name, ids in ((field, generation.prompt_ids), ("stop_token_ids", generation.stop_token_ids)):
            if any(not 0 <= each < vocab_size for each in ids):
                raise refused(name, f"'{name}' must be token ids of 0 to {vocab_size - 1}.")

    def _budget(self, generation: Generation) -> int:
        """How many tokens the request may have; asking for more than there is room for is a mistake, as at OpenAI."""
        limit, used, field = self.limits.max_model_len, len(generation.prompt_ids), generation.prompt_field
        room = limit - used
        if room < 1:
            raise refused(
                field,
                f"This model takes {limit} tokens of prompt and output together; the prompt has {used}.",
                "context_length_exceeded",
            )
        if generation.max_tokens is not None and generation.max_tokens > room:
            raise refused(
                generation.budget_field,
                f"This model takes {limit} tokens of prompt and output together; the prompt has {used}, which leaves "
                f"{room}, and {generation.max_tokens} were asked for.",
                "context_length_exceeded",
            )
        return generation.max_tokens or room


class _TextOf:
    """One request's detokeniser and stop strings."""

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings, has_stops: bool) -> None:
        self._detokenizer, self._stops, self._has_stops = detokenizer, stops, has_stops
        self.num_tokens = 0  # up to the one that completed a stop string, a stop id included

    def push(self, run: Progress) -> tuple[str, str | None]:
        """The text that is certain now, and the finish reason once there is one."""
        # A stop id ends the text and is not part of it.
        shown = run.tokens[:-1] if run.finish == "stop" else run.tokens
        # With stop strings tokens go one by one, so that those behind the stop are not counted.
        steps = [(token,) for token in shown] if self._has_stops else [shown] if shown else []
        parts: list[str] = []
        for tokens in steps:
            self.num_tokens += len(tokens)
            part, stopped = self._stops.push(self._detokenizer.push(tokens))
            parts.append(part)
            if stopped:
                return "".join(parts), "stop"
        if run.finish is not None:
            self.num_tokens += len(run.tokens) - len(shown)
            part, stopped = self._stops.push(self._detokenizer.flush())
            parts.append(part)
            parts.append("" if stopped else self._stops.flush())
            return "".join(parts), "stop" if stopped else run.finish
        return "".join(parts), None
