"""The official client against a real server on a free port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import openai
import pytest
import uvicorn
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from deployments.api import create_app
from tests.deployments.fakes import MODEL, ScriptedVerifier, says, service, until
from workers.sequence import Progress, Request

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


@asynccontextmanager
async def served(verifier: ScriptedVerifier) -> AsyncGenerator[AsyncOpenAI, None]:
    server = uvicorn.Server(uvicorn.Config(create_app(service(verifier)), port=0, log_level="error", lifespan="off"))
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        yield client
    server.should_exit = True
    await task


async def test_chat_and_completion() -> None:
    async with served(ScriptedVerifier()) as client:
        chat = await client.chat.completions.create(model=MODEL, messages=HI, temperature=0, max_tokens=20)
        assert chat.choices[0].message.content == "Hello world"
        assert chat.usage is not None
        assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
        completion = await client.completions.create(model=MODEL, prompt="Hi", extra_body={"top_k": 5})
        assert completion.choices[0].text == "Hello world"
        assert [model.id async for model in client.models.list()] == [MODEL]


async def test_a_stream_equals_the_whole() -> None:
    async with served(ScriptedVerifier(says("Hel", "lo ", "wörld"))) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello wörld"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]].count("stop") == 1
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 13


async def test_what_guessing_was_comes_as_an_extra_of_usage() -> None:
    """Whole and streamed, and without being in the way of the client's types."""
    async with served(ScriptedVerifier()) as client:
        extra = {"speculation": {"max_draft": 1}}
        whole = await client.chat.completions.create(model=MODEL, messages=HI, extra_body=extra)
        stream = await client.chat.completions.create(
            model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}, extra_body=extra
        )
        *_, last = [chunk async for chunk in stream]
    for usage in (whole.usage, last.usage):
        assert usage is not None
        assert usage.completion_tokens_details is None, "OpenAI counts something else there"
        spoken = usage.model_dump()["speculation"]
        assert (spoken["max_draft"], spoken["mean_acceptance_length"]) == (1, 2.0)


async def test_the_next_turn_takes_the_last_answer_as_it_was_dumped() -> None:
    """An answer's message goes back in with all its nulls and extras; servers have refused that."""
    async with served(ScriptedVerifier()) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=HI)
        turn: ChatCompletionMessageParam = answer.choices[0].message.model_dump()  # type: ignore[assignment]
        again = await client.chat.completions.create(model=MODEL, messages=[*HI, turn, *HI])
    assert again.choices[0].message.content == "Hello world"


async def test_errors_raise_the_right_class() -> None:
    async with served(ScriptedVerifier()) as client:
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=HI)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=MODEL, messages=HI, n=2)
        assert caught.value.param == "n"


async def test_an_error_in_a_stream_is_raised() -> None:
    def script(request: Request) -> list[Progress]:
        return [Progress(request.id, (1,)), Progress(request.id, (), "error", error="broken")]

    async with served(ScriptedVerifier(script)) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="failed"):
            async for _ in stream:
                pass


async def test_closed_connections_free_their_sequences() -> None:
    """A client that leaves in the middle of a stream must not keep its pages; one server kept them for 14 hours."""
    verifier = ScriptedVerifier(says(*("word " for _ in range(500))), pause_s=0.002)
    async with served(verifier) as client:
        for _ in range(20):
            stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
            for _ in range(3):
                await anext(stream)
            await stream.close()
        await until(lambda: len(verifier.aborted) == 20)
    assert len(verifier.aborted) == 20
    assert not verifier.finished
