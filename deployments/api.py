"""OpenAI's interface as a FastAPI application.

Knows HTTP, JSON and how long things took. Knows no Ray: everything behind it is a `deployments.service.Service`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from deployments.errors import CLIENT_GONE, ApiError, api_error
from deployments.keys import ApiKey, KeyGuard
from deployments.metrics import BROKEN
from deployments.operations import operations
from deployments.responses import DONE, Answer, ChatAnswer, CompletionAnswer, error_event
from deployments.router import Generation, Piece
from deployments.schema import ChatRequest, CompletionRequest, GenerationRequest, parse
from deployments.service import Service
from deployments.visit import Visit
from verifier.sampling import SamplingParams

log = logging.getLogger("ray.serve")
COMPLETION_TOKENS = 16  # OpenAI's default budget of /v1/completions; a chat may fill the context
LONG_BODY = 32_768  # bytes; fewer are understood in less time than it takes to ask another thread to


def create_app(service: Service) -> FastAPI:
    """The application, all its routes."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service.agreement.running():
            yield

    app = FastAPI(title="Draftree", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.add_middleware(KeyGuard, ring=service.keys)
    for kind in (ApiError, HTTPException, ClientDisconnect):
        app.add_exception_handler(kind, _error_response)
    app.include_router(_openai(service))
    app.include_router(operations(service))
    return app


def _openai(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [service.card()]})

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        service.check_model(name)
        return JSONResponse(service.card())

    @routes.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answered(service, service.visit("chat", request), request, _chat)

    @routes.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _answered(service, service.visit("completions", request), request, _completion)

    return routes


async def _error_response(_: Request, error: Exception) -> JSONResponse:
    return api_error(error).response()


class _Asked(NamedTuple):
    """A request as it was understood."""

    body: GenerationRequest
    generation: Generation
    answer: Answer


async def _answered(
    service: Service, visit: Visit, request: Request, understand: Callable[[Service, ApiKey, bytes], _Asked]
) -> Response:
    """The answer, and one count of how it went; a stream counts itself when it ends."""
    try:
        raw = await service.body(request)
        # Of a long one, reading and cutting into tokens takes a while, in which all streams would stand still.
        understood = partial(understand, service, visit.key, raw)
        asked = understood() if len(raw) < LONG_BODY else await asyncio.to_thread(understood)
        response = await _respond(service, asked, visit)
    except asyncio.CancelledError:
        visit.finish(CLIENT_GONE)
        raise
    except Exception as error:
        answer = api_error(error)
        visit.finish(answer.status)
        if answer.status >= 500:
            log.exception("A request to %s failed", visit.endpoint)
        raise answer from error
    if not isinstance(response, EventStream):
        visit.finish(response.status_code)
    return response


def _chat(service: Service, key: ApiKey, raw: bytes) -> _Asked:
    body = parse(ChatRequest, raw)
    service.check_model(body.model)
    ids = service.text.chat_ids([message.for_template() for message in body.messages])
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    budget = body.max_completion_tokens or body.max_tokens
    generation = _generation(key, body, ids, "messages", field, budget)
    return _Asked(body, generation, ChatAnswer(service.model, body.include_usage))


def _completion(service: Service, key: ApiKey, raw: bytes) -> _Asked:
    body = parse(CompletionRequest, raw)
    service.check_model(body.model)
    ids = service.text.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
    budget = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    generation = _generation(key, body, ids, "prompt", "max_tokens", budget)
    return _Asked(body, generation, CompletionAnswer(service.model, body.include_usage))


def _generation(
    key: ApiKey,
    body: GenerationRequest,
    ids: Sequence[int],
    prompt_field: str,
    budget_field: str,
    max_tokens: int | None,
) -> Generation:
    return Generation(
        prompt_ids=tuple(ids),
        prompt_field=prompt_field,
        continues=prompt_field == "prompt",
        budget_field=budget_field,
        max_tokens=max_tokens,
        stop=body.stop,
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        sampling=SamplingParams(body.temperature, body.top_k, body.top_p, body.min_p, seed=body.seed or 0),
        has_seed=body.seed is not None,
        salt=key.salt,
    )


async def _respond(service: Service, asked: _Asked, visit: Visit) -> Response:
    body, answer = asked.body, asked.answer
    # What cannot be served at all is refused first: it takes no place, and its prompt counts against no limit.
    request, wanted = service.router.admit(asked.generation), body.speculation.within(service.draft)
    limits = visit.admit(len(request.prompt_ids), body.temperature, wanted)
    pieces = service.router.generate(asked.generation, replace(request, limits=limits))
    if not body.stream:
        return Response(await _whole(pieces, answer, visit), media_type="application/json")
    # Errors still have a status until the first piece is there.
    first = await anext(pieces)
    events = _events(first, pieces, answer, body.include_usage, visit)
    await anext(events)
    return EventStream(events)


async def _whole(pieces: AsyncGenerator[Piece, None], answer: Answer, visit: Visit) -> bytes:
    texts: list[str] = []
    async with aclosing(pieces):
        async for piece in pieces:
            visit.piece(piece)
            texts.append(piece.text)
            if piece.finish is not None and piece.usage is not None:
                return answer.whole("".join(texts), piece.finish, piece.usage)
    raise AssertionError("the router's last piece has a finish and a usage")


async def _events(
    first: Piece, pieces: AsyncGenerator[Piece, None], answer: Answer, include_usage: bool, visit: Visit
) -> AsyncGenerator[bytes, None]:
    """Nothing, so that it has begun; then server-sent events: the opening, one for each piece, the finish reason, the
    usage if asked for, the end mark.

    Closing a generator that has not begun does nothing, and the request would keep its place.
    """
    status: int | str = CLIENT_GONE
    try:
        async with aclosing(pieces):
            yield b""
            visit.piece(first)
            yield answer.opening() + _event(first, answer, include_usage)
            async for piece in pieces:
                visit.piece(piece)
                yield _event(piece, answer, include_usage)
        status = 200
        yield DONE
    except Exception as error:  # the status line has left; the client learns of it in the stream
        log.exception("A stream broke")
        status = BROKEN
        yield error_event(api_error(error)) + DONE
    finally:
        visit.finish(status)


def _event(piece: Piece, answer: Answer, include_usage: bool) -> bytes:
    text = answer.delta(piece.text) if piece.text else b""
    if piece.finish is None or piece.usage is None:
        return text
    return text + answer.ending(piece.finish) + (answer.usage(piece.usage) if include_usage else b"")


class EventStream(StreamingResponse):
    """A stream of server-sent events that is closed, and with it the request, however sending ends."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        # A buffering proxy between us and the client would undo the streaming.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)
