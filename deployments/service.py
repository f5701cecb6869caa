"""What stands behind the interface: all that its routes need, and how they read what they are sent.

Knows HTTP. Knows no Ray: tests fill a `Service` with a scripted verifier.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from fastapi import Request
from openai.types import Model

from deployments.agreement import Agreement
from deployments.errors import ApiError
from deployments.keys import KeyRing, key_of
from deployments.metrics import RequestMetrics
from deployments.router import Router, Verifier
from deployments.visit import Visit
from drafter.base import DraftLimits
from workers.stats import EngineStats
from workers.text import Text

HEALTH_TIMEOUT_S = 5.0
BODY_S = 60.0  # for a request's body to come; until then the request takes up room
# Of a body, at most: for the longest token of any vocabulary in place of each that the model takes, and for the rest.
TOKEN_BYTES, OTHER_BYTES = 128, 2**20


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
        model = Model(id=self.model, created=self.created, object="model", owned_by="draftree")
        return model.model_dump(exclude_unset=True)

    async def stats(self) -> EngineStats:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            return await self.verifier.stats()

    async def body(self, request: Request) -> bytes:
        """
        Raises:
            ApiError: it is larger than any that could be answered (413), or comes too slowly (408).
            ClientDisconnect: the client left before it was all there.
        """
        try:
            async with asyncio.timeout(BODY_S):
                return await self._read(request)
        except TimeoutError:
            raise ApiError(408, f"The body was not there within {BODY_S:g} seconds.", code="body_timeout") from None

    async def _read(self, request: Request) -> bytes:
        most, body = OTHER_BYTES + TOKEN_BYTES * self.router.limits.max_model_len, bytearray()
        async for part in request.stream():
            body += part
            if len(body) > most:
                message = f"The body has more than {most} bytes, which is more than this model can need."
                raise ApiError(413, message, code="body_too_large")
        return bytes(body)
