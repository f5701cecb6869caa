"""API keys: who may ask, and how much. Off unless a file of keys is named.

The file is TOML, with a table for each key. All but ``key`` may be left out:

    [team-a]
    key = "sk-9bb2c0a7e1f04d53"
    requests_per_minute = 60
    tokens_per_minute = 100000    # of prompts and answers together
    concurrent = 8                # requests at the same time

    [operator]
    key = "sk-1d7e40b2c95a8f36"
    admin = true                  # may exchange the draft model while requests run

Knows that file and the Authorization header. Counts nothing, keeps no key (only digests), and puts none into a message.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.errors import ApiError
from verifier.errors import BadSetting
from verifier.paths import written_path

SETTING = "api_keys"
SHORTEST_KEY = 16  # characters
OPEN_PATHS = ("/health", "/metrics")  # for probes and scrapers, which carry no keys
_SCOPE = "draftree.key"  # where a request's key is kept
_PLAIN = re.compile(r"[!-~]+")  # ASCII without spaces and control characters


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What a key may take from all ingress replicas together; None: as much as there is."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None


NO_LIMITS = KeyLimits()
_LIMITS = tuple(limit.name for limit in fields(KeyLimits))


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key without its secret. ``name`` is the table's in the file."""

    name: str
    limits: KeyLimits = NO_LIMITS
    admin: bool = False

    @property
    def salt(self) -> bytes:
        """Requests of different keys share no cached prefix: how fast an answer begins would tell what others asked."""
        return self.name.encode()


ANYBODY = ApiKey("")


class KeyRing:
    """All keys. An empty ring lets anybody in."""

    def __init__(self, keys: Mapping[str, ApiKey]) -> None:
        """``keys``: by secret."""
        self._keys = [(_digest(secret.encode()), key) for secret, key in keys.items()]

    @classmethod
    def load(cls, path: str) -> KeyRing:
        """The keys of the file at ``path``; none for "".

        Raises:
            BadSetting: the file cannot be read, or says something else than it should. No secret is repeated.
        """
        return cls(_read(path)) if path else cls({})

    def identify(self, authorization: str | None) -> ApiKey:
        """
        Raises:
            ApiError: 401.
        """
        if not self._keys:
            return ANYBODY
        scheme, _, secret = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise _unauthorized("An API key is needed: send it as 'Authorization: Bearer KEY'.", "missing_api_key")
        digest = _digest(secret.strip().encode("latin-1", "replace"))
        # Every key is compared, each in constant time: how long a refusal takes says nothing.
        found = [key for known, key in self._keys if hmac.compare_digest(known, digest)]
        if not found:
            raise _unauthorized("This API key is not known here.", "invalid_api_key")
        return found[0]


class KeyGuard:
    """ASGI middleware that lets nothing pass without a key, but for `OPEN_PATHS`."""

    def __init__(self, app: ASGIApp, ring: KeyRing) -> None:
        self._app, self._ring = app, ring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_open(scope):
            try:
                scope[_SCOPE] = self._ring.identify(HTTPConnection(scope).headers.get("authorization"))
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def key_of(request: HTTPConnection) -> ApiKey:
    """Whose request it is, once the guard has let it pass."""
    key = request.scope[_SCOPE]
    assert isinstance(key, ApiKey)
    return key


def _is_open(scope: Scope) -> bool:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) in OPEN_PATHS


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def _unauthorized(message: str, code: str) -> ApiError:
    return ApiError(401, message, code=code, headers={"WWW-Authenticate": "Bearer"})


def _read(path: str) -> dict[str, ApiKey]:
    try:
        tables = tomllib.loads(written_path(SETTING, path).read_text("utf-8"))
    except OSError as error:
        raise BadSetting(SETTING, path, f"a file that can be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise BadSetting(SETTING, path, "a TOML file in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        place = str(error).rpartition("(")[2].rstrip(")")  # the rest of its text may repeat the file's
        raise BadSetting(SETTING, path, f"a TOML file, which it is not {place}") from None
    if not tables:
        raise BadSetting(SETTING, path, "a file with at least one key")
    keys: dict[str, ApiKey] = {}
    for name, table in tables.items():
        secret, key = _parse(path, name, table)
        if secret in keys:
            raise BadSetting(SETTING, path, f"a file of different keys: {keys[secret].name} and {name} have the same")
        keys[secret] = key
    return keys


def _parse(path: str, name: str, table: object) -> tuple[str, ApiKey]:
    """A table's secret, and the rest."""
    if not isinstance(table, dict):
        # The name of a stray line may be a key that somebody has forgotten to put into a table.
        raise BadSetting(SETTING, path, 'a file of tables: [name], and key = "…" below it')
    secret, admin = table.get("key"), table.get("admin", False)
    limits = {name: value for name, value in table.items() if name not in ("key", "admin")}
    if not isinstance(secret, str) or len(secret) < SHORTEST_KEY or not _PLAIN.fullmatch(secret):
        signs = f"{SHORTEST_KEY} or more ASCII letters, digits and signs"
        raise BadSetting(SETTING, path, f"a file in which the key of [{name}] is a string of {signs}")
    if not isinstance(admin, bool):
        raise BadSetting(SETTING, path, f"a file in which admin of [{name}] is true or false")
    for limit, value in limits.items():
        if limit not in _LIMITS:
            allowed = f"a file in which [{name}] has a key and nothing else but {', '.join((*_LIMITS, 'admin'))}"
            raise BadSetting(SETTING, path, allowed)
        if type(value) is not int or value < 1:
            raise BadSetting(SETTING, path, f"a file in which {limit} of [{name}] is a whole number, 1 or more")
    return secret, ApiKey(name, KeyLimits(**limits), admin)
