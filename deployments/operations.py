"""The routes for those who run the service: health, metrics, how far is guessed, and another draft model."""

from __future__ import annotations

import logging

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from deployments.errors import ApiError, api_error
from deployments.keys import key_of
from deployments.metrics import CONTENT_TYPE, RouterCollector
from deployments.responses import speculation_view
from deployments.schema import DraftModelRequest, parse
from deployments.service import Service

log = logging.getLogger("ray.serve")


def operations(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> JSONResponse:
        try:
            stats = await service.stats()
        except Exception as error:
            raise ApiError(503, f"Not ready. {api_error(error).message}", code="not_ready") from error
        return JSONResponse({"status": "ok", "running": stats.running, "waiting": stats.waiting})

    @routes.get("/metrics")
    async def metrics() -> Response:
        try:
            stats = await service.stats()
        except Exception as error:
            log.warning("the verifier's figures are missing from /metrics: %s", api_error(error).message)
            stats = None
        return Response(service.metrics.render(stats, RouterCollector(service.agreement)), media_type=CONTENT_TYPE)

    @routes.get("/v1/speculation")
    async def speculation() -> JSONResponse:
        return JSONResponse(speculation_view(service.model, service.draft, service.agreement))

    @routes.post("/v1/draft_model")
    async def draft_model(request: Request) -> JSONResponse:
        return await _exchange(service, request)

    return routes


async def _exchange(service: Service, request: Request) -> JSONResponse:
    if service.exchange is None or not key_of(request).admin:
        message = "The draft model is exchanged with an API key that has admin = true in the file of keys."
        raise ApiError(403, message, code="admin_only")
    body = parse(DraftModelRequest, await service.body(request))
    try:
        replicas = await service.exchange(body.draft_model)
    except Exception as error:
        raise api_error(error) from error
    return JSONResponse({"draft_model": body.draft_model, "replicas": replicas})
