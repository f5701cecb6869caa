"""A request's life in the engine: what was asked, what is written so far, what the client is told.

Knows token ids and counts. Knows no tensors, no drafters and no other sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from drafter.base import DraftLimits
from verifier.errors import BadRequest
from verifier.pages import PageLease
from verifier.sampling import SamplingParams
from workers.config import EngineConfig
from workers.stats import Speculation, Usage

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Request:
    """Everything that a continuation depends on; the same request gives the same tokens in any engine."""

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int  # of output, earlier ones included
    stop_ids: frozenset[int] = frozenset()  # any of these ends the text, and is its last token
    output_ids: tuple[int, ...] = ()  # a replay's tokens so far; not reported again
    limits: DraftLimits | None = None  # None: the engine's
    salt: bytes = b""  # requests share cached prefixes with equal salts only


@dataclass(frozen=True)
class Progress:
    """A run of new tokens, the end of a request, or both."""

    request_id: str
    tokens: tuple[int, ...]
    finish: FinishReason | None = None
    usage: Usage | None = None  # so far
    error: str | None = None  # with finish "error"


Listener = Callable[[Progress], None]


class TokenSequence:
    """One request in the engine.

        ids:  0              num_committed          len(ids)         end
              ├── committed ───┼── pending ───────────┼── to be drawn ──┤
                KV in place      to be computed

    With one token pending it decodes: that token is the root of a tree. With more, these are computed in chunks first,
    whether they are a prompt, a replay, or what a preemption has thrown away.
    """

    def __init__(self, number: int, request: Request, listener: Listener, limits: DraftLimits, end: int) -> None:
        self.number = number  # order of arrival; names the draft session
        self.request = request
        self.listener = listener
        self.limits = limits
        self.end = end  # the most tokens that ``ids`` may hold
        self.ids = [*request.prompt_ids, *request.output_ids]
        self.lease: PageLease | None = None  # held while running
        self.finished = False
        self.cached_tokens: int | None = None  # set at the first admission
        self.preemptions = 0
        self.speculation = Speculation()

    @property
    def num_pending(self) -> int:
        return len(self.ids) - (self.lease.num_committed if self.lease else 0)

    @property
    def num_output(self) -> int:
        return len(self.ids) - len(self.request.prompt_ids)

    @property
    def remaining(self) -> int:
        """Tokens that may still be drawn."""
        return self.end - len(self.ids)

    @property
    def finish(self) -> FinishReason | None:
        """Whether what is written so far is complete."""
        if self.num_output and self.ids[-1] in self.request.stop_ids:
            return "stop"
        return "length" if self.remaining <= 0 else None

    def extend(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Appends the run up to and with its first stop id, as far as there is room, and returns what was appended."""
        run = tokens[: self.remaining]
        length = next((i for i, token in enumerate(run, start=1) if token in self.request.stop_ids), len(run))
        self.ids.extend(run[:length])
        return tuple(run[:length])

    def usage(self) -> Usage:
        return Usage(
            **vars(self.speculation),
            prompt_tokens=len(self.request.prompt_ids),
            cached_tokens=min(self.cached_tokens or 0, len(self.request.prompt_ids)),
            output_tokens=self.num_output,
            preemptions=self.preemptions,
        )


def longest(request: Request, config: EngineConfig, vocab_size: int) -> int:
    """The most tokens that the request's sequence may come to hold.

    Raises:
        BadRequest: it could never be served.
    """
    num_prompt = len(request.prompt_ids)
    if request.max_tokens < 1:
        raise BadRequest("max_tokens", request.max_tokens, "at least 1")
    if not 0 < num_prompt < config.max_model_len:
        allowed = f"at least 1 token and fewer than the model's limit of {config.max_model_len}"
        raise BadRequest("prompt", f"{num_prompt} tokens", allowed)
    ids = (*request.prompt_ids, *request.output_ids)
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise BadRequest("prompt", "a list with unknown token ids", f"made of ids from 0 to {vocab_size - 1}")
    end = min(num_prompt + request.max_tokens, config.max_model_len)
    capacity = config.num_pages * config.page_size
    if end - 1 > capacity:  # the last token's KV is never needed
        allowed = f"short enough for prompt and answer to fit the KV cache of {capacity} tokens"
        raise BadRequest("prompt", f"{num_prompt} tokens with {end - num_prompt} to come", allowed)
    return end
