"""OpenAI's interface as a FastAPI application.

Knows HTTP, JSON and how long things took. Knows no Ray: everything behind it is a `Service`, which tests fill with
a scripted verifier.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from openai.types import Model
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from deployments.agreement import Agreement
from deployments.errors import ApiError, api_error
from deployments.keys import ApiKey, KeyGuard, KeyRing, key_of
from deployments.metrics import BROKEN, CLIENT_GONE, CONTENT_TYPE, RequestMetrics, RouterCollector
from deployments.responses import DONE, Answer, ChatAnswer, CompletionAnswer, error_event, speculation_view
from deployments.router import Generation, Piece, Router, Verifier
from deployments.schema import ChatRequest, CompletionRequest, DraftModelRequest, GenerationRequest, parse
from deployments.visit import Visit
from drafter.base import DraftLimits
from verifier.sampling import SamplingParams
from workers.stats import EngineStats
from workers.text import Text

log = logging.getLogger("ray.serve")
HEALTH_TIMEOUT_S = 5.0
COMPLETION_TOKENS = 16  # OpenAI's default budget of /v1/completions; a chat may fill the context


@dataclass(frozen=True)
class Service:
    """What stands behind the interface."""

    model: str  # the name clients use
    router: Router
    verifier: Verifier
    text: Text
    draft: DraftLimits  # what the service allows
    agreement: Agreement
    keys: KeyRing = field(default_factory=lambda: KeyRing({}))
    exchange: Callable[[str], Awaitable[int]] | None = None  # of the draft model; returns the number of replicas
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    created: int = field(default_factory=lambda: int(time.time()))  # Unix time, s

    def visit(self, endpoint: str, request: Request) -> Visit:
        return Visit(self.agreement, self.metrics, endpoint, key_of(request))

    def check_model(self, name: str) -> None:
        if name != self.model:
            message = f"There is no such model here; this server has '{self.model}'."
            raise ApiError(404, message, param="model", code="model_not_found")

    def card(self) -> dict[str, object]:
        return Model(id=self.model, created=self.created, object="model", owned_by="draftree").model_dump()

    async def stats(self) -> EngineStats:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            return await self.verifier.stats()


def create_app(service: Service) -> FastAPI:
    """The application: OpenAI's routes, health and metrics."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service.agreement.running():
            yield

    app = FastAPI(title="Draftree", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.add_middleware(KeyGuard, ring=service.keys)
    app.add_exception_handler(ApiError, _error_response)
    app.add_exception_handler(HTTPException, _error_response)

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [service.card()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        service.check_model(name)
        return JSONResponse(service.card())

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.body()
        return await _counted(service.visit("chat", request), partial(_chat, service, body))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await request.body()
        return await _counted(service.visit("completions", request), partial(_completion, service, body))

    @app.get("/v1/speculation")
    async def speculation() -> JSONResponse:
        return JSONResponse(speculation_view(service.model, service.draft, service.agreement))

    @app.post("/v1/draft_model")
    async def draft_model(request: Request) -> Response:
        return await _exchange(service, key_of(request), await request.body())

    @app.get("/health")
    async def health() -> JSONResponse:
        try:
            stats = await service.stats()
        except Exception as error:
            raise ApiError(503, f"Not ready. {api_error(error).message}", code="not_ready") from error
        return JSONResponse({"status": "ok", "running": stats.running, "waiting": stats.waiting})

    @app.get("/metrics")
    async def metrics() -> Response:
        try:
            stats = await service.stats()
        except Exception as error:
            log.warning("the verifier's figures are missing from /metrics: %s", api_error(error).message)
            stats = None
        return Response(service.metrics.render(stats, RouterCollector(service.agreement)), media_type=CONTENT_TYPE)

    return app


async def _error_response(_: Request, error: Exception) -> JSONResponse:
    return api_error(error).response()


async def _counted(visit: Visit, work: Callable[[Visit], Awaitable[Response]]) -> Response:
    """The answer that ``work`` makes, and one count of how it went; a stream counts itself when it ends."""
    try:
        response = await work(visit)
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


async def _exchange(service: Service, key: ApiKey, raw: bytes) -> Response:
    if service.exchange is None or not key.admin:
        message = "The draft model is exchanged with an API key that has admin = true in the file of keys."
        raise ApiError(403, message, code="admin_only")
    body = parse(DraftModelRequest, raw)
    try:
        replicas = await service.exchange(body.draft_model)
    except Exception as error:
        raise api_error(error) from error
    return JSONResponse({"draft_model": body.draft_model, "replicas": replicas})


async def _chat(service: Service, raw: bytes, visit: Visit) -> Response:
    body = parse(ChatRequest, raw)
    service.check_model(body.model)
    ids = service.text.chat_ids([message.for_template() for message in body.messages])
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    budget = body.max_completion_tokens or body.max_tokens
    generation = _generation(visit, body, ids, "messages", field, budget)
    return await _respond(service, body, generation, ChatAnswer(service.model, body.include_usage), visit)


async def _completion(service: Service, raw: bytes, visit: Visit) -> Response:
    body = parse(CompletionRequest, raw)
    service.check_model(body.model)
    ids = service.text.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
    budget = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    generation = _generation(visit, body, ids, "prompt", "max_tokens", budget)
    return await _respond(service, body, generation, CompletionAnswer(service.model, body.include_usage), visit)


def _generation(
    visit: Visit,
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
        salt=visit.key.salt,
    )


async def _respond(
    service: Service, body: GenerationRequest, generation: Generation, answer: Answer, visit: Visit
) -> Response:
    draft = visit.admit(len(generation.prompt_ids), body.temperature, body.speculation.within(service.draft))
    pieces = service.router.generate(replace(generation, draft=draft))
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
