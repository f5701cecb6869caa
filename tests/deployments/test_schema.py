"""Every field of OpenAI's requests is honoured, a mere label, or refused by name."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from deployments.errors import ApiError
from deployments.schema import ChatRequest, CompletionRequest, DraftModelRequest, GenerationRequest, parse
from drafter.base import DraftLimits

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "Hi"}


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps(CHAT | fields).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps(COMPLETION | fields).encode())


def refusal(kind: type[GenerationRequest] | type[DraftModelRequest], body: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(kind, body if isinstance(body, bytes) else json.dumps(body).encode())
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("kind", "openai"),
    [
        (ChatRequest, chat_create_params.CompletionCreateParamsStreaming),
        (CompletionRequest, completion_create_params.CompletionCreateParamsStreaming),
    ],
)
def test_every_field_of_openai_is_known(kind: type[GenerationRequest], openai: type) -> None:
    known = set(kind.model_fields) | set(kind.neutral)
    assert not set(get_type_hints(openai)) - known
    assert not set(kind.model_fields) & set(kind.neutral)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("n", 0),
        ("n", True),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "auto"),
        ("response_format", {"type": "json_object"}),
        ("logit_bias", {"5": 1}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content", "content": "x"}),
        ("store", True),
        ("service_tier", "priority"),
        ("reasoning_effort", "high"),
        ("min_tokens", 3),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(field: str, value: object) -> None:
    error = refusal(ChatRequest, CHAT | {field: value})
    assert (error.param, error.code) == (field, "unsupported_parameter")
    assert field in error.message


@pytest.mark.parametrize(("field", "value"), [("best_of", 2), ("echo", True), ("logprobs", 0), ("suffix", "end")])
def test_what_is_not_honoured_in_completions(field: str, value: object) -> None:
    """logprobs=0 asks for the chosen token's there, while in chats it would be nonsense."""
    assert refusal(CompletionRequest, COMPLETION | {field: value}).param == field


def test_neutral_values_and_labels_are_taken() -> None:
    neutral = {
        "n": 1,
        "logprobs": False,
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "store": False,
        "service_tier": "auto",
    }
    labels = {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"}
    assert chat(**neutral, **labels).messages == chat().messages
    assert completion(best_of=1, echo=False, suffix=None).prompt == "Hi"


def test_null_means_left_out() -> None:
    every = dict.fromkeys((set(ChatRequest.model_fields) | set(ChatRequest.neutral)) - {"messages", "model"})
    assert chat(**every) == chat()
    assert chat().temperature == chat().top_p == 1.0


def test_unknown_fields_are_refused() -> None:
    assert refusal(ChatRequest, CHAT | {"max_token": 5}).param == "max_token"
    assert refusal(ChatRequest, CHAT | {"messages": [{"role": "user", "content": "x", "foo": 1}]}).param == (
        "messages[0].foo"
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", "5"),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_completion_tokens", 0),
        ("temperature", 3),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", 2),
        ("top_k", -2),
        ("seed", 2**63),
        ("seed", 1.5),
        ("stream", "yes"),
        ("stop", ""),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", [1]),
        ("stop_token_ids", ["2"]),
        ("model", 5),
        ("messages", []),
        ("messages", "SECRET"),
        ("messages", ["SECRET"]),
        ("user", 5),
    ],
)
def test_wrong_values_name_the_field_and_nothing_else(field: str, value: object) -> None:
    error = refusal(ChatRequest, CHAT | {field: value})
    assert error.param is not None
    assert error.param.startswith(field)
    assert "SECRET" not in error.message


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "system", "content": None},
        {"role": "tool", "content": "SECRET", "tool_call_id": "1"},
        {"role": "robot", "content": "SECRET"},
        {"content": "SECRET"},
        {"role": "user", "content": 5},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "SECRET"}}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]},
        {"role": "user", "content": "x", "name": "SECRET"},
    ],
)
def test_wrong_messages_are_refused(message: dict[str, object]) -> None:
    error = refusal(ChatRequest, CHAT | {"messages": [{"role": "user", "content": "x"}, message]})
    assert error.param is not None
    assert error.param.startswith("messages[1]")
    assert "SECRET" not in error.message


def test_contents_that_clients_send() -> None:
    """The next turn of a chat holds what the last answer was, dumped with all its nulls; contents may be lists."""
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "refusal": None, "annotations": None, "audio": None, "tool_calls": None},
        {"role": "user", "content": ""},
        {"role": "user", "content": "größe 🎈"},
    ]
    assert [message.for_template() for message in chat(messages=messages).messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
        {"role": "user", "content": "größe 🎈"},
    ]


@pytest.mark.parametrize(
    ("given", "understood"),
    [("Hi", "Hi"), (["Hi"], "Hi"), ([1, 2], (1, 2)), ([[1, 2]], (1, 2))],
)
def test_one_prompt_in_all_its_forms(given: object, understood: object) -> None:
    assert completion(prompt=given).prompt == understood


@pytest.mark.parametrize("prompt", ["", [], [""], ["a", "b"], [[1], [2]], [[]], [1, "a"], [True], [1.0], 5, {}])
def test_other_prompts_are_refused(prompt: object) -> None:
    assert refusal(CompletionRequest, COMPLETION | {"prompt": prompt}).param == "prompt"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"5", b'"x"', b"null", b'{"model": "m", "temperature": NaN}', b"\xff", b"[" * 100_000]
)
def test_bodies_that_are_no_json_object(body: bytes) -> None:
    assert refusal(ChatRequest, body).param is None


def test_lists_of_the_wrong_length_are_refused_in_a_sentence() -> None:
    """The answer read "'messages' must be List should have at least 1 item after validation, not 0."."""
    assert refusal(ChatRequest, CHAT | {"messages": []}).message == "'messages' must be a list of 1 or more."
    message = refusal(ChatRequest, CHAT | {"stop_token_ids": [2] * 65}).message
    assert message == "'stop_token_ids' must be a list of 64 or fewer."


def test_missing_fields_are_named() -> None:
    error = refusal(ChatRequest, {"model": "m"})
    assert (error.param, error.code) == ("messages", "missing_required_parameter")
    assert refusal(ChatRequest, {"messages": CHAT["messages"]}).param == "model"


def test_stream_options() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True).include_usage
    assert refusal(ChatRequest, CHAT | {"stream_options": {"include_usage": True}}).param == "stream_options"
    body = CHAT | {"stream": True, "stream_options": {"include_obfuscation": True}}
    assert refusal(ChatRequest, body).param == "stream_options.include_obfuscation"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("max_draft", 6, "is 6, but must be 0 to 5"),
        ("max_draft", -1, "is -1, but must be 0 to 5"),
        ("max_draft", 2**70, "must be 0 to 5"),
        ("draft_top_k", 0, "is 0, but must be 1 to 2"),
        ("draft_top_k", 3, "is 3, but must be 1 to 2"),
        ("max_nodes", 9, "is 9, but must be 0 to 8"),
    ],
)
def test_limits_above_the_services_are_refused_in_full(field: str, value: int, words: str) -> None:
    wanted = completion(speculation={field: value}).speculation
    with pytest.raises(ApiError, match=words) as caught:
        wanted.within(DraftLimits(5, 2, 8))
    assert (caught.value.status, caught.value.param) == (400, f"speculation.{field}")


@pytest.mark.parametrize(
    ("speculation", "param"),
    [
        (False, "speculation"),
        ("off", "speculation"),
        ([], "speculation"),
        ({"max_draft": "2"}, "speculation.max_draft"),
        ({"max_draft": True}, "speculation.max_draft"),
        ({"max_draft": 2.0}, "speculation.max_draft"),
        ({"max_drafts": 2}, "speculation.max_drafts"),
        ({"max_draft": {"SECRET": 1}}, "speculation.max_draft"),
    ],
)
def test_speculation_is_an_object_of_whole_numbers(speculation: object, param: str) -> None:
    error = refusal(CompletionRequest, COMPLETION | {"speculation": speculation})
    assert error.param == param
    assert "SECRET" not in error.message


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        (CompletionRequest, COMPLETION | {"speculation": "off"}, "'speculation' must be a JSON object."),
        (ChatRequest, CHAT | {"stream": True, "stream_options": []}, "'stream_options' must be a JSON object."),
        (ChatRequest, CHAT | {"metadata": ["x"]}, "'metadata' must be a JSON object."),
        (DraftModelRequest, {"draft_model": ""}, "'draft_model' must not be empty."),
        (DraftModelRequest, {"draft_model": 5}, "'draft_model' must be a valid string."),
    ],
)
def test_refusals_are_sentences(
    kind: type[GenerationRequest] | type[DraftModelRequest], body: dict[str, Any], words: str
) -> None:
    """They named our classes, or Python's, and one said "must be String should have at least 1 character"."""
    assert refusal(kind, body).message == words


@pytest.mark.parametrize("body", [CHAT | {"metadata": {"x" * 100_000: 5}}, CHAT | {"x" * 100_000: 5}])
def test_a_name_that_the_client_made_up_is_cut_short(body: dict[str, Any]) -> None:
    """A wrong value under a long name in ``metadata`` was answered with that name twice."""
    error = refusal(ChatRequest, body)
    assert error.param is not None
    assert max(len(error.param), len(error.message)) < 150


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "EOF while parsing a value at line 1 column 0"),
        (b'{"prompt": "SECRET\\ud800"}', "unexpected end of hex escape at line 1 column 25"),
        (b'{"prompt": SECRET}', "expected value at line 1 column 12"),
    ],
)
def test_what_is_no_json_is_told_why(body: bytes, why: str) -> None:
    """Half of a surrogate pair, which Python's json writes without a word, was "not valid JSON", and that was all."""
    error = refusal(CompletionRequest, body)
    assert (error.message, error.code) == (f"The body is not valid JSON: {why}.", "invalid_json")


def test_two_budgets_are_one_too_many() -> None:
    assert refusal(ChatRequest, CHAT | {"max_tokens": 5, "max_completion_tokens": 5}).param == "max_tokens"
