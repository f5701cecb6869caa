"""From an exception to an answer: the one place where mistakes get an HTTP status and OpenAI's error shape.

An answer names the field and never repeats what the client wrote into it: prompts do not belong in logs.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastapi.responses import JSONResponse
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from verifier.errors import BadRequest, DraftreeError

CLIENT_GONE = 499  # nginx's status for a client that left before the end
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer other than 200. ``param`` is the request's field, ``code`` a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    @property
    def body(self) -> dict[str, object]:
        return {"error": {"message": self.message, "type": self._type, "param": self.param, "code": self.code}}

    @property
    def _type(self) -> str:
        return "server_error" if self.status >= 500 else _TYPES.get(self.status, "invalid_request_error")

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def refused(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """The client's mistake, in ``param``."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, taken: str) -> ApiError:
    """Something that OpenAI has and this server does not honour; silence would be a wrong answer."""
    return refused(param, f"'{param}' is not supported by this server: leave it out{taken}.", "unsupported_parameter")


def api_error(error: BaseException) -> ApiError:
    """The answer for any exception. What nobody foresaw is 500, without its text."""
    if isinstance(error, RayTaskError):  # what a deployment raised, wrapped on its way through Ray
        error = error.cause
    match error:
        case ApiError():
            return error
        case BadRequest(field=field, allowed=allowed):
            return refused(field, f"'{field}' must be {allowed}.")
        case DraftreeError():  # such as an engine that has died
            return ApiError(503, f"The model cannot be used at the moment: {error}", code="unavailable")
        case HTTPException(status_code=404):
            return ApiError(404, "There is nothing at this address.", code="unknown_url")
        case HTTPException(status_code=405):
            return ApiError(405, "This address takes another method.", code="method_not_allowed", headers=error.headers)
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case ClientDisconnect():  # nobody reads this; the count of answers has it
            return ApiError(CLIENT_GONE, "The client left.", code="client_gone")
        case BackPressureError():
            headers = {"Retry-After": "1"}
            return ApiError(429, "Too many requests are waiting; try again.", code="overloaded", headers=headers)
        case RayActorError() | DeploymentUnavailableError():
            return ApiError(503, "The model's replica was lost; another one is being started.", code="replica_lost")
        case TimeoutError():
            return ApiError(503, "The model's replica does not answer.", code="replica_busy")
        case _:
            return ApiError(500, "The server made a mistake; its log says which.", code="internal_error")
