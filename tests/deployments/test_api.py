"""The HTTP interface, asked over ASGI by httpx: shapes, errors, streams, health and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from prometheus_client.parser import text_string_to_metric_families

from deployments import service as service_module
from deployments.api import create_app
from deployments.keys import ApiKey, KeyLimits, KeyRing
from drafter.base import DraftLimits
from tests.deployments.fakes import (
    DRAFT,
    MAX_MODEL_LEN,
    MODEL,
    TEXT,
    ScriptedVerifier,
    agreement,
    busy_stats,
    says,
    service,
    until,
)
from verifier.errors import DraftreeError
from workers.sequence import Progress, Request
from workers.text import Text

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
LONG = "context_length_exceeded"
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "Hi"}


def client(verifier: ScriptedVerifier | None = None) -> httpx.AsyncClient:
    app = create_app(service(verifier or ScriptedVerifier()))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def post(path: str, body: dict[str, Any], verifier: ScriptedVerifier | None = None) -> httpx.Response:
    async with client(verifier) as http:
        return await http.post(path, json=body)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The JSON of each event; the end mark must be there, once and last."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def test_a_chat_is_answered() -> None:
    verifier = ScriptedVerifier(says("Hello", " world"))
    answer = await post("/v1/chat/completions", CHAT, verifier)
    parsed = ChatCompletion.model_validate_json(answer.text, strict=True)
    assert parsed.choices[0].message.content == "Hello world"
    assert parsed.choices[0].finish_reason == "stop"
    assert parsed.model == MODEL
    prompt = TEXT.chat_ids(CHAT["messages"])
    assert verifier.requests[0].prompt_ids == tuple(prompt)
    usage = answer.json()["usage"]
    assert usage == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 12,
        "total_tokens": len(prompt) + 12,
        "prompt_tokens_details": {"cached_tokens": 2},
        "speculation": {
            "max_draft": 5,
            "draft_top_k": 2,
            "max_nodes": 8,
            "steps": 6,
            "drafted_tokens": 12,
            "accepted_tokens": 6,
            "mean_acceptance_length": 2.0,
            "acceptance_by_position": [1.0, 0.0],
            "replays": 0,
        },
    }


async def test_a_stream_is_the_same_answer_in_pieces() -> None:
    verifier = ScriptedVerifier(says("He", "llo", " wörld 🎈"))
    chunks = events(await post("/v1/chat/completions", CHAT | {"stream": True}, verifier))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        assert "usage" not in chunk
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [delta["content"] for delta in deltas[1:-1]] == ["He", "llo", " wörld 🎈"]
    assert deltas[-1] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["stop"]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_usage_comes_last_in_a_stream_that_asks_for_it(path: str) -> None:
    body = (CHAT if "chat" in path else COMPLETION) | {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(await post(path, body))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    whole = (await post(path, body | {"stream": False, "stream_options": None})).json()
    assert whole["usage"] == chunks[-1]["usage"]


async def test_completions_whole_and_streamed() -> None:
    whole = (await post("/v1/completions", COMPLETION)).json()
    assert whole["object"] == "text_completion"
    assert whole["choices"] == [{"index": 0, "text": "Hello world", "finish_reason": "stop", "logprobs": None}]
    chunks = events(await post("/v1/completions", COMPLETION | {"stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello world"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]


async def test_text_that_looks_like_the_protocol_stays_text() -> None:
    """Chunks are cut out of a template; no text may be taken for a part of it."""
    text = 'data: [DONE]\n\n\x00"}]} \\u0000 \u2028'
    verifier = ScriptedVerifier(says(text))
    answer = await post("/v1/chat/completions", CHAT | {"stream": True}, verifier)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in events(answer)] == ["", text, None]


@pytest.mark.parametrize("stream", [False, True])
async def test_budgets(stream: bool) -> None:
    """A completion has 16 tokens unless more are asked for, as at OpenAI; a chat may fill the context."""
    verifier = ScriptedVerifier(says("x" * 40))
    await post("/v1/completions", COMPLETION | {"stream": stream}, verifier)
    await post("/v1/completions", COMPLETION | {"stream": stream, "max_tokens": 30}, verifier)
    await post("/v1/chat/completions", CHAT | {"stream": stream, "max_completion_tokens": 7}, verifier)
    answer = await post("/v1/chat/completions", CHAT | {"stream": stream}, verifier)
    budgets = [request.max_tokens for request in verifier.requests]
    assert budgets == [16, 30, 7, MAX_MODEL_LEN - len(verifier.requests[-1].prompt_ids)]
    assert answer.status_code == 200


async def test_sampling_reaches_the_engine() -> None:
    verifier = ScriptedVerifier()
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": -3}
    await post("/v1/chat/completions", CHAT | fields, verifier)
    sampling = verifier.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
    assert sampling.seed == -3


@pytest.mark.parametrize(
    ("wanted", "limits"),
    [
        ({}, DRAFT),
        (None, DRAFT),
        ({"max_draft": 2}, DraftLimits(2, 2, 8)),
        ({"max_draft": 5, "draft_top_k": 1, "max_nodes": 3}, DraftLimits(5, 1, 3)),
        ({"max_draft": 0}, DraftLimits(0, 2, 8)),
        ({"max_nodes": 0}, DraftLimits(5, 2, 0)),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_requests_may_guess_less_than_the_service(path: str, wanted: object, limits: DraftLimits) -> None:
    verifier = ScriptedVerifier()
    body = (CHAT if "chat" in path else COMPLETION) | {"speculation": wanted}
    used = (await post(path, body, verifier)).json()["usage"]["speculation"]
    assert verifier.requests[0].limits == limits
    assert DraftLimits(used["max_draft"], used["draft_top_k"], used["max_nodes"]) == limits


async def test_guesses_beyond_a_stop_string_are_not_more_than_the_text() -> None:
    """One server's count of accepted guesses exceeded the count of the tokens that they were a part of."""
    answer = await post("/v1/completions", COMPLETION | {"stop": "a"}, ScriptedVerifier(says("abcdefgh")))
    usage = answer.json()["usage"]
    assert usage["completion_tokens"] == 1
    assert usage["speculation"]["accepted_tokens"] == 1


async def test_an_answer_of_one_token_has_no_acceptance_length() -> None:
    answer = await post("/v1/completions", COMPLETION | {"max_tokens": 1})
    spoken = answer.json()["usage"]["speculation"]
    assert (spoken["steps"], spoken["mean_acceptance_length"], spoken["acceptance_by_position"]) == (0, None, [])


async def test_prompts_as_ids() -> None:
    verifier = ScriptedVerifier()
    await post("/v1/completions", COMPLETION | {"prompt": [1, 2, 3]}, verifier)
    assert verifier.requests[0].prompt_ids == (1, 2, 3)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param", "code"),
    [
        (
            "POST",
            "/v1/chat/completions",
            {"model": "other", "messages": CHAT["messages"]},
            404,
            "model",
            "model_not_found",
        ),
        ("POST", "/v1/completions", {"model": "other", "prompt": "x"}, 404, "model", "model_not_found"),
        ("GET", "/v1/models/other", None, 404, "model", "model_not_found"),
        ("GET", "/v1/nothing", None, 404, None, "unknown_url"),
        ("GET", "/v1/chat/completions", None, 405, None, "method_not_allowed"),
        ("POST", "/v1/chat/completions", CHAT | {"logprobs": True}, 400, "logprobs", "unsupported_parameter"),
        ("POST", "/v1/chat/completions", CHAT | {"max_tokens": 10**9}, 400, "max_tokens", LONG),
        ("POST", "/v1/chat/completions", CHAT | {"max_completion_tokens": 2048}, 400, "max_completion_tokens", LONG),
        ("POST", "/v1/completions", {"model": MODEL, "prompt": "x" * 3000}, 400, "prompt", LONG),
        ("POST", "/v1/completions", {"model": MODEL, "prompt": [99999]}, 400, "prompt", "invalid_value"),
        (
            "POST",
            "/v1/completions",
            COMPLETION | {"speculation": {"max_draft": 6}},
            400,
            "speculation.max_draft",
            "invalid_value",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_have_openais_shape(
    method: str, path: str, body: dict[str, Any] | None, status: int, param: str | None, code: str, stream: bool
) -> None:
    async with client() as http:
        answer = await http.request(method, path, json=body and body | {"stream": stream})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"] == "invalid_request_error"


async def test_a_body_larger_than_any_answerable_one_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 50 MB took two gigabytes, and all streams of the ingress stood still for a minute and a half."""
    monkeypatch.setattr(service_module, "OTHER_BYTES", 1000)
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 50_000
            yield b"x" * 50_000

    async with client() as http:
        for path in ("/v1/completions", "/v1/chat/completions"):
            read = 0
            answer = await http.post(path, content=endless())
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
            assert read == 300_000
        longest = await http.post("/v1/completions", json=COMPLETION | {"prompt": "x" * (MAX_MODEL_LEN - 16)})
        assert longest.status_code == 200
        found = await scraped(http)
    assert found["draftree_requests_total", "completions", "413"] == 1


async def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It held its place at the ingress for as long as the client liked."""
    monkeypatch.setattr(service_module, "BODY_S", 0.01)

    async def never() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with client() as http:
        answer = await http.post("/v1/completions", content=never())
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "body_timeout")


async def test_a_client_that_leaves_in_its_body_is_counted_and_no_fault() -> None:
    """Each left a traceback of a hundred lines in the log, and was counted nowhere."""
    app = create_app(service(ScriptedVerifier()))
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.disconnect"}

    async def send(_: MutableMapping[str, Any]) -> None: ...

    await app(scope, receive, send)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        found = await scraped(http)
    assert found["draftree_requests_total", "completions", "499"] == 1


async def test_other_requests_go_on_while_a_long_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte of prompt took a second, in which all streams stood still."""
    may_go_on = threading.Event()

    def encode(text: Text, prompt: str) -> list[int]:
        assert len(prompt) < 100 or may_go_on.wait(20)
        return [1] * min(len(prompt), 100)

    monkeypatch.setattr(Text, "encode", encode)
    async with client() as http:
        long = asyncio.create_task(http.post("/v1/completions", json=COMPLETION | {"prompt": "x" * 100_000}))
        await asyncio.sleep(0.01)
        assert (await http.post("/v1/completions", json=COMPLETION)).status_code == 200
        assert not long.done()
        may_go_on.set()
        assert (await long).status_code == 200


@pytest.mark.parametrize("body", [{"prompt": "x" * 3000}, {"speculation": {"max_draft": 99}}, {"prompt": [99999]}])
async def test_what_cannot_be_served_counts_against_no_limit(body: dict[str, Any]) -> None:
    """A prompt that was too long for the model used up all the tokens of its key's next minute."""
    verifier = ScriptedVerifier()
    ring = KeyRing({"sk-0123456789abcdef": ApiKey("a", KeyLimits(requests_per_minute=1, tokens_per_minute=1000))})
    app = create_app(service(verifier, ring))
    headers = {"Authorization": "Bearer sk-0123456789abcdef"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", headers=headers) as http:
        statuses = [
            (await http.post("/v1/completions", json=COMPLETION | fields)).status_code for fields in (body, body, {})
        ]
    assert statuses == [400, 400, 200]


async def test_bad_json_is_400() -> None:
    async with client() as http:
        answer = await http.post("/v1/chat/completions", content=b"{nope")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


def breaks_after(*runs: str) -> ScriptedVerifier:
    def script(request: Request) -> list[Progress]:
        good = [Progress(request.id, tuple(TEXT.encode(run))) for run in runs]
        return [*good, Progress(request.id, (), "error", error="SECRET")]

    return ScriptedVerifier(script)


async def test_a_failure_before_the_first_text_has_a_status() -> None:
    for stream in (False, True):
        answer = await post("/v1/chat/completions", CHAT | {"stream": stream}, breaks_after())
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")


async def test_a_failure_after_it_is_an_event_and_then_the_end() -> None:
    chunks = events(await post("/v1/chat/completions", CHAT | {"stream": True}, breaks_after("Hel")))
    assert chunks[-2]["choices"][0]["delta"] == {"content": "Hel"}
    assert chunks[-1]["error"]["type"] == "server_error"
    assert "SECRET" not in str(chunks)
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])


async def test_what_nobody_foresaw_is_500_without_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def chat_ids(*_: object) -> list[int]:
        raise RuntimeError("SECRET")

    monkeypatch.setattr(Text, "chat_ids", chat_ids)
    answer = await post("/v1/chat/completions", CHAT)
    assert answer.status_code == 500
    assert "SECRET" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_request_is_aborted(stream: bool) -> None:
    """What Serve does to the handler when its client leaves before an answer."""
    verifier = ScriptedVerifier(says("a", "b"), pause_s=60)
    task = asyncio.create_task(post("/v1/chat/completions", CHAT | {"stream": stream}, verifier))
    await until(lambda: bool(verifier.requests))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert verifier.aborted == [verifier.requests[0].id]


async def test_models() -> None:
    """A newer openai package knows more fields of a model; they were in the answer, as null."""
    async with client() as http:
        models = (await http.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == [MODEL]
        assert set(models["data"][0]) == {"id", "created", "object", "owned_by"}
        assert (await http.get(f"/v1/models/{MODEL}")).json() == models["data"][0]


async def test_health_tells_the_truth() -> None:
    async with client() as http:
        assert (await http.get("/health")).json() == {"status": "ok", "running": 0, "waiting": 0}
    async with client(ScriptedVerifier(unwell=DraftreeError("the engine's thread failed"))) as http:
        answer = await http.get("/health")
    assert answer.status_code == 503
    assert "the engine's thread failed" in answer.json()["error"]["message"]


async def scraped(http: httpx.AsyncClient) -> dict[tuple[str, ...], float]:
    text = (await http.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert not [sample for sample in samples if not math.isfinite(sample.value)]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


async def test_a_fresh_server_has_metrics_and_no_nan() -> None:
    async with client() as http:
        found = await scraped(http)
    assert found["draftree_drafted_tokens_total",] == 0
    assert found["draftree_kv_pages", "total"] == 64


async def test_metrics_tell_speculation_and_requests() -> None:
    async with client(ScriptedVerifier(figures=busy_stats())) as http:
        await http.post("/v1/chat/completions", json=CHAT)
        await http.post("/v1/chat/completions", json=CHAT | {"stream": True})
        await http.post("/v1/chat/completions", json=CHAT | {"n": 2})
        found = await scraped(http)
    assert found["draftree_drafted_tokens_total",] == 30
    assert found["draftree_accepted_tokens_total",] == 15
    for counted, counts in {"drafted": [10, 9, 8], "tried": [10, 9, 4], "accepted": [9, 4, 2]}.items():
        name = f"draftree_{counted}_by_position_total"
        assert [found[name, str(position)] for position in (1, 2, 3)] == counts
    assert found["draftree_verified_tokens_total",] / found["draftree_verify_steps_total",] == 2.5
    assert (found["draftree_running",], found["draftree_waiting",]) == (2, 1)
    assert found["draftree_requests_total", "chat", "200"] == 2
    assert found["draftree_requests_total", "chat", "400"] == 1
    assert found["draftree_time_to_first_text_seconds_count",] == 2


async def test_metrics_survive_a_lost_verifier() -> None:
    async with client(ScriptedVerifier(unwell=DraftreeError("gone"))) as http:
        await http.post("/v1/chat/completions", json=CHAT)
        found = await scraped(http)
    assert found["draftree_requests_total", "chat", "200"] == 1
    assert ("draftree_running",) not in found


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_service_answers_429_and_says_when_to_come_back(stream: bool) -> None:
    """In OpenAI's shape; those that were let in are answered."""
    verifier = ScriptedVerifier(says("a", "b"), pause_s=0.05)
    agreed = agreement(verifier, capacity=2)
    app = create_app(service(verifier, agreed=agreed))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        body = CHAT | {"stream": stream}
        answers = await asyncio.gather(*(http.post("/v1/chat/completions", json=body) for _ in range(5)))
        found = await scraped(http)
        later = await http.post("/v1/chat/completions", json=body)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert refused.json()["error"]["code"] == "overloaded"
    assert int(refused.headers["retry-after"]) >= 1
    assert later.status_code == 200
    assert found["draftree_refused_total", "service"] == found["draftree_requests_total", "chat", "429"] == 3
    assert (found["draftree_admitted",], found["draftree_admissible",]) == (0, 2)


@pytest.mark.parametrize(
    "body",
    [
        CHAT,
        CHAT | {"stream": True},
        CHAT | {"max_tokens": 10**9},
        CHAT | {"stream": True, "max_tokens": 10**9},
        CHAT | {"speculation": {"max_draft": 99}},
    ],
)
async def test_every_request_gives_its_place_back(body: dict[str, Any]) -> None:
    for verifier in (ScriptedVerifier(), breaks_after(), breaks_after("a")):
        agreed = agreement(verifier)
        app = create_app(service(verifier, agreed=agreed))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            await http.post("/v1/chat/completions", json=body)
        assert agreed.admission.num_admitted == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pause_s", [60, 0.002])
async def test_a_request_that_is_left_gives_its_place_back(stream: bool, pause_s: float) -> None:
    verifier = ScriptedVerifier(says(*"abcdefgh" * 20), pause_s=pause_s)
    agreed = agreement(verifier)
    app = create_app(service(verifier, agreed=agreed))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        task = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT | {"stream": stream}))
        await until(lambda: agreed.admission.num_admitted == 1 and bool(verifier.requests))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert agreed.admission.num_admitted == 0


async def test_a_stream_whose_client_is_gone_before_it_begins_gives_its_place_back() -> None:
    """Closing a generator that has not begun runs nothing of it, so the request kept its place for ever."""
    verifier = ScriptedVerifier()
    agreed = agreement(verifier)
    app = create_app(service(verifier, agreed=agreed))
    body = json.dumps(CHAT | {"stream": True}).encode()
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b""}
    unread, sent = [body], list[MutableMapping[str, Any]]()

    async def receive() -> MutableMapping[str, Any]:
        if unread:
            return {"type": "http.request", "body": unread.pop()}
        return await asyncio.Future()

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)
        raise OSError("the connection is closed")

    with contextlib.suppress(Exception):
        await app(scope, receive, send)
    assert sent
    assert agreed.admission.num_admitted == 0
    assert verifier.aborted


async def test_what_is_guessed_and_why_is_told() -> None:
    verifier = ScriptedVerifier(figures=busy_stats())
    agreed = agreement(verifier)
    app = create_app(service(verifier, agreed=agreed))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        fresh = (await http.get("/v1/speculation")).json()
        await http.post("/v1/chat/completions", json=CHAT | {"temperature": 0})
        await agreed.exchange()
        told = (await http.get("/v1/speculation")).json()
        found = await scraped(http)
    assert (fresh["kinds"], fresh["costs"], fresh["ingress_replicas"]) == ([], None, 0)
    assert (told["model"], told["drafter"]) == (MODEL, "ngram")
    assert told["allowed"] == {"max_draft": 5, "draft_top_k": 2, "max_nodes": 8}
    assert told["costs"] == {"verifying": {"1": 0.03}, "drafting": {"1": {"2": 0.01}}}
    (kind,) = told["kinds"]
    assert (kind["endpoint"], kind["temperature"], kind["max_draft"], kind["requests"]) == ("chat", "zero", 5, 1)
    assert kind["acceptance_by_position"] == [1.0, 0.0]
    assert (kind["steps"], kind["mean_acceptance_length"]) == (6, 2.0)
    assert found["draftree_draft_depth", "chat", "zero"] == 5
    assert found["draftree_aggregator_age_seconds",] >= 0


async def test_broken_and_abandoned_streams_are_counted_as_such() -> None:
    async with client(breaks_after("a")) as http:
        await http.post("/v1/chat/completions", json=CHAT | {"stream": True})
        assert (await scraped(http))["draftree_requests_total", "chat", "broken"] == 1
