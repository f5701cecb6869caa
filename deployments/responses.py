"""The answers of OpenAI's interface, whole and as server-sent events.

Shapes come from the ``openai`` package's own types. A stream sends hundreds of chunks that differ in one string, so a
chunk is rendered through its type once and cut in two where the string goes.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Literal, Protocol, cast

from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.completion_usage import PromptTokensDetails
from pydantic import BaseModel

from deployments.agreement import Agreement
from deployments.errors import ApiError
from deployments.router import Usage
from drafter.base import DraftLimits

DONE = b"data: [DONE]\n\n"
_HOLE = "\x00"  # stands for a chunk's text in its template; JSON writes it as six characters that nothing else makes
Finish = Literal["stop", "length"]


class SpeculationDetails(BaseModel):
    """How guessing went for one request. OpenAI's accepted_prediction_tokens and rejected_prediction_tokens are another
    matter: they count a text that the client predicted, and are billed.
    """

    max_draft: int  # the limits that were in force
    draft_top_k: int
    max_nodes: int
    steps: int  # in which a tree was read, those without guesses included
    drafted_tokens: int  # guesses in these trees, all branches
    accepted_tokens: int  # guesses that became output
    mean_acceptance_length: float | None  # tokens for each step, the bonus token included; null without a step
    acceptance_by_position: list[float]  # of the walks that came to guesses at a depth, the share that went on
    replays: int  # how often the request went on with another verifier


class ServedUsage(CompletionUsage):
    """OpenAI's shape, and what guessing had to do with it."""

    speculation: SpeculationDetails | None = None


def completion_usage(usage: Usage) -> CompletionUsage:
    answer = ServedUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
    )
    if usage.limits is not None:
        answer.speculation = _speculation(usage, usage.limits)
    return answer


def _speculation(usage: Usage, limits: DraftLimits) -> SpeculationDetails:
    done = usage.speculation
    length = done.mean_acceptance_length
    return SpeculationDetails(
        **asdict(limits),
        steps=done.steps,
        drafted_tokens=done.drafted_tokens,
        # A stop string may end the text in the middle of a step's run, whose guesses are all counted.
        accepted_tokens=min(done.accepted_tokens, usage.completion_tokens),
        mean_acceptance_length=None if length is None else round(length, 3),
        acceptance_by_position=[round(share, 3) for share in done.acceptance_where_tried],
        replays=usage.replays,
    )


def speculation_view(model: str, allowed: DraftLimits, agreement: Agreement) -> dict[str, object]:
    """GET /v1/speculation: how far is guessed and why, as the router decides on the slow scale."""
    decisions = agreement.decisions
    prices = decisions.prices if decisions else None
    drafter = decisions.drafter if decisions and decisions.drafter else agreement.drafter
    return {
        "object": "speculation",
        "model": model,
        "drafter": "+".join(Path(part).name for part in drafter.split("+")),  # of a folder, its name is enough
        "allowed": asdict(allowed),
        "kinds": [kind._asdict() | asdict(choice) for kind, choice in (decisions.choices if decisions else {}).items()],
        # Seconds: of a pass by rows, of drafting by batch and depth.
        "costs": prices and asdict(prices),
        "ingress_replicas": decisions.num_ingresses if decisions else 0,
        "age_s": round(agreement.age_s, 3),
    }


def event(answer: BaseModel) -> bytes:
    return b"data: " + _json(answer) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    return b"data: " + json.dumps(error.body).encode() + b"\n\n"


def _json(answer: BaseModel) -> bytes:
    # As any: OpenAI's types hold parts of ours, which say more than theirs.
    return answer.model_dump_json(exclude_unset=True, serialize_as_any=True).encode()


class Answer(Protocol):
    """One answer in the making."""

    def whole(self, text: str, finish: str, usage: Usage) -> bytes: ...

    def opening(self) -> bytes: ...

    def delta(self, text: str) -> bytes: ...

    def ending(self, finish: str) -> bytes: ...

    def usage(self, usage: Usage) -> bytes: ...


class _Events:
    """What both answers do alike: cut a rendered chunk open, and fill it."""

    _head: bytes
    _tail: bytes

    def _cut(self, chunk: BaseModel) -> None:
        self._head, self._tail = event(chunk).split(json.dumps(_HOLE).encode())

    def delta(self, text: str) -> bytes:
        return self._head + json.dumps(text, ensure_ascii=False).encode() + self._tail


class ChatAnswer(_Events):
    """POST /v1/chat/completions. With ``include_usage``, chunks say ``usage: null`` and a last one has it."""

    def __init__(self, model: str, include_usage: bool = False) -> None:
        self._id, self._created, self._model = f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), model
        self._no_usage: dict[str, None] = {"usage": None} if include_usage else {}
        self._cut(self._chunk(ChoiceDelta(content=_HOLE)))

    def whole(self, text: str, finish: str, usage: Usage) -> bytes:
        message = ChatCompletionMessage(role="assistant", content=text, refusal=None)
        choice = Choice(index=0, message=message, finish_reason=cast(Finish, finish), logprobs=None)
        return _json(
            ChatCompletion(
                id=self._id,
                object="chat.completion",
                created=self._created,
                model=self._model,
                choices=[choice],
                usage=completion_usage(usage),
            )
        )

    def opening(self) -> bytes:
        return event(self._chunk(ChoiceDelta(role="assistant", content="")))

    def ending(self, finish: str) -> bytes:
        return event(self._chunk(ChoiceDelta(), cast(Finish, finish)))

    def usage(self, usage: Usage) -> bytes:
        return event(
            ChatCompletionChunk(
                id=self._id,
                object="chat.completion.chunk",
                created=self._created,
                model=self._model,
                choices=[],
                usage=completion_usage(usage),
            )
        )

    def _chunk(self, delta: ChoiceDelta, finish: Finish | None = None) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model,
            choices=[ChunkChoice(index=0, delta=delta, finish_reason=finish, logprobs=None)],
            **self._no_usage,
        )


class CompletionAnswer(_Events):
    """POST /v1/completions; whole and streamed answers share one shape."""

    def __init__(self, model: str, include_usage: bool = False) -> None:
        self._id, self._created, self._model = f"cmpl-{uuid.uuid4().hex}", int(time.time()), model
        self._no_usage: dict[str, None] = {"usage": None} if include_usage else {}
        self._cut(self._chunk(_HOLE))

    def whole(self, text: str, finish: str, usage: Usage) -> bytes:
        return _json(self._completion([self._choice(text, finish)], usage=completion_usage(usage)))

    def opening(self) -> bytes:
        return b""

    def ending(self, finish: str) -> bytes:
        return event(self._chunk("", finish))

    def usage(self, usage: Usage) -> bytes:
        return event(self._completion([], usage=completion_usage(usage)))

    def _chunk(self, text: str, finish: str | None = None) -> Completion:
        return self._completion([self._choice(text, finish)], **self._no_usage)

    def _choice(self, text: str, finish: str | None) -> CompletionChoice:
        # The type knows only finished choices; a stream's others carry null.
        return CompletionChoice.model_construct(
            {"index", "text", "finish_reason", "logprobs"}, index=0, text=text, finish_reason=finish, logprobs=None
        )

    def _completion(self, choices: list[CompletionChoice], **usage: CompletionUsage | None) -> Completion:
        return Completion.model_construct(
            {"id", "object", "created", "model", "choices", *usage},
            id=self._id,
            object="text_completion",
            created=self._created,
            model=self._model,
            choices=choices,
            **usage,
        )
