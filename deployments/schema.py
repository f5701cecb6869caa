"""The requests of OpenAI's interface that are understood, and how the rest is refused.

Three kinds of fields: those that are honoured; those that only label a request and change no token (`LABELS`); and
those that OpenAI knows and this server does not honour, which are taken only with a value that asks for nothing
(`NEUTRAL`). Everything else is refused by name. null means "left out", as OpenAI's clients write it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

from deployments.errors import ApiError, refused, unsupported
from drafter.base import DraftLimits

MAX_STOPS = 4
LONGEST_PARAM = 80  # characters of a field's name in an answer; clients make up names, too
LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key")

Neutral = dict[str, tuple[object, ...]]
NEUTRAL: Neutral = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "n": (1,),
    "min_tokens": (0,),
}
NEUTRAL_IN_CHAT: Neutral = NEUTRAL | {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
NEUTRAL_IN_COMPLETIONS: Neutral = NEUTRAL | {"best_of": (1,), "echo": (False,), "logprobs": (), "suffix": ("",)}
NEUTRAL_IN_MESSAGES: Neutral = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "name": (),
    "reasoning_content": ("",),
    "refusal": (),
    "tool_calls": ([],),
}


def _same(value: object, neutral: object) -> bool:
    """Equal in JSON's eyes, where 1 and 1.0 are the same number and true is no number."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


class _Strict(BaseModel):
    """No guessing: "5" is not a number, true is not 1, and no field is overlooked."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())
    neutral: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        kept = {name: value for name, value in data.items() if value is not None}
        for name in kept.keys() & cls.neutral.keys():
            value = kept.pop(name)
            if not any(_same(value, each) for each in cls.neutral[name]):
                taken = "".join(f" or set it to {json.dumps(each)}" for each in cls.neutral[name])
                raise PydanticCustomError("unsupported", "{name}{taken}", {"name": name, "taken": taken})
        return kept


def _content(value: object) -> object:
    """The text of a message: a string, or a list of text parts, which are joined by line ends."""
    if not isinstance(value, list):
        return value
    parts: list[str] = []
    for part in value:
        match part:
            case {"type": "text", "text": str(text)} if len(part) == 2:
                parts.append(text)
            case _:
                raise PydanticCustomError("content_part", "a string or a list of parts of type text")
    return "\n".join(parts)


def _stops(value: object) -> object:
    """One stop string or a few of them, none of them empty."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise PydanticCustomError("stop", "a string or a list of strings, none of them empty")
    if len(stops) > MAX_STOPS:
        raise PydanticCustomError("stop", f"at most {MAX_STOPS} strings")
    return tuple(stops)


def _prompt(value: object) -> object:
    """One prompt, as text or as token ids; a list that holds one prompt is taken for that prompt."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, list) and value and all(type(each) is int for each in value):
        return tuple(value)
    if isinstance(value, str) and value:
        return value
    raise PydanticCustomError("prompt", "one prompt that is not empty, as a string or as a list of token ids")


class Message(_Strict):
    """One turn of a chat."""

    neutral = NEUTRAL_IN_MESSAGES

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | None, BeforeValidator(_content)] = None

    @model_validator(mode="after")
    def _only_assistants_are_silent(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("no_content", "a message with content")
        return self

    def for_template(self) -> dict[str, str]:
        """Chat templates know no developer, and join contents as strings."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content or ""}


class StreamOptions(_Strict):
    neutral = {"include_obfuscation": (False,)}

    include_usage: bool = False


class SpeculationLimits(_Strict):
    """A request's own limits of its draft trees; 0 for depth or nodes is plain decoding."""

    max_draft: int | None = None
    draft_top_k: int | None = None
    max_nodes: int | None = None

    def within(self, allowed: DraftLimits) -> DraftLimits:
        """
        Raises:
            ApiError: 400, when a limit is above what is ``allowed``, or is no limit at all.
        """
        wanted = self.model_dump(exclude_none=True)
        for name, value in wanted.items():
            least, most = int(name == "draft_top_k"), getattr(allowed, name)
            if not least <= value <= most:
                why = f"{least} to {most}: a request may only lower what the service allows"
                raise refused(f"speculation.{name}", f"'speculation.{name}' is {value}, but must be {why}.")
        return replace(allowed, **wanted)


class GenerationRequest(_Strict):
    """What both endpoints share. top_k, min_p, ignore_eos and stop_token_ids are vLLM's additions, with its meaning;
    speculation is ours.
    """

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = ()
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list, max_length=64)
    ignore_eos: bool = False
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    speculation: SpeculationLimits = SpeculationLimits()
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", "'stream_options' is only allowed when 'stream' is true.")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class DraftModelRequest(_Strict):
    """POST /v1/draft_model."""

    draft_model: str = Field(min_length=1)


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    neutral = NEUTRAL_IN_CHAT

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise refused("max_tokens", "'max_tokens' and 'max_completion_tokens' are one setting; give one of them.")
        return self


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    neutral = NEUTRAL_IN_COMPLETIONS

    prompt: Annotated[str | tuple[int, ...], BeforeValidator(_prompt)]


Body = TypeVar("Body", bound=_Strict)


def parse(kind: type[Body], body: bytes) -> Body:
    """The request in ``body``.

    Raises:
        ApiError: 400, naming the field.
    """
    try:
        data: Any = from_json(body, allow_inf_nan=False)
    except ValueError as error:  # which says what is wrong and where, and repeats nothing
        raise refused(None, f"The body is not valid JSON: {error}.", "invalid_json") from None
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _in_words(error.errors(include_url=False, include_input=False)[0]) from None


def _in_words(error: ErrorDetails) -> ApiError:
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"])
    param = place.removeprefix(".")[:LONGEST_PARAM]
    match error["type"]:
        case "unsupported":
            context = error["ctx"]
            return unsupported(f"{param}.{context['name']}".removeprefix("."), context["taken"])
        case "missing":
            return refused(param, f"'{param}' is required.", "missing_required_parameter")
        case "extra_forbidden":
            return refused(param, f"There is no field '{param}'.", "unknown_parameter")
        case "model_type" | "model_attributes_type" if not param:
            return refused(None, "The body must be a JSON object.", "invalid_type")
        case "model_type" | "model_attributes_type" | "dict_type":
            return refused(param, f"'{param}' must be a JSON object.", "invalid_type")
        case "string_too_short":
            return refused(param, f"'{param}' must not be empty.")
        case "too_short":  # pydantic's words for these two are no end of a sentence
            return refused(param, f"'{param}' must be a list of {error['ctx']['min_length']} or more.")
        case "too_long":
            return refused(param, f"'{param}' must be a list of {error['ctx']['max_length']} or fewer.")
        case kind:
            wanted = error["msg"].removeprefix("Input should be ")
            code = "invalid_type" if kind.endswith("_type") else "invalid_value"
            return refused(param, f"'{param}' must be {wanted}.", code)
