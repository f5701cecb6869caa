"""Who may ask: the file of keys, the header, and what stays open."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from deployments.api import create_app
from deployments.errors import ApiError
from deployments.keys import ANYBODY, ApiKey, KeyLimits, KeyRing
from tests.deployments.fakes import MODEL, ScriptedVerifier, service
from verifier.errors import BadSetting

SECRET, OTHER = "sk-0123456789abcdef", "sk-fedcba9876543210"
RING = KeyRing({SECRET: ApiKey("a"), OTHER: ApiKey("b", KeyLimits(5))})
BODY = {"model": MODEL, "prompt": "Hi"}


def client(verifier: ScriptedVerifier | None = None) -> httpx.AsyncClient:
    app = create_app(service(verifier or ScriptedVerifier(), RING))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def loaded(folder: Path, text: str | bytes) -> KeyRing:
    file = folder / "keys.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return KeyRing.load(str(file))


def test_without_a_file_anybody_may_ask() -> None:
    assert KeyRing.load("").identify(None) == ANYBODY
    assert KeyRing.load("").identify("Bearer whatever") == ANYBODY


def test_a_file_of_keys(tmp_path: Path) -> None:
    text = f'[a]\nkey = "{SECRET}"\n["team b"]\nkey = "{OTHER}"\nrequests_per_minute = 5\nconcurrent = 2\n'
    ring = loaded(tmp_path, text)
    assert ring.identify(f"Bearer {SECRET}") == ApiKey("a", KeyLimits())
    assert ring.identify(f"bearer   {OTHER} ") == ApiKey("team b", KeyLimits(5, None, 2))
    assert ApiKey("a").salt != ApiKey("team b").salt


WRONG = (SECRET, f"Basic {SECRET}", f"Bearer {SECRET}x", f"Bearer {SECRET[:-1]}", f"Bearer {SECRET} {OTHER}")
ODD = ("", "Bearer", "Bearer ", f"Bearer {SECRET}\x00", "Bearer \udcff", "Bearer ключ", "Bearer " + "x" * 100_000)


@pytest.mark.parametrize("header", [None, *WRONG, *ODD])
def test_everything_else_is_401(header: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        RING.identify(header)
    assert caught.value.status == 401
    assert SECRET not in caught.value.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "at least one key"),
        (f"{SECRET}\n", "at line 1"),
        (f'key = "{SECRET}"', "a file of tables"),
        ("[a]\n", "the key of [a]"),
        ('[a]\nkey = "short"', "16 or more"),
        ('[a]\nkey = "sk-0123456789 bcdef"', "ASCII"),
        ('[a]\nkey = "sk-0123456789äbcdef"', "ASCII"),
        ("[a]\nkey = 12345678901234567890", "is a string"),
        (f'[a]\nkey = "{SECRET}"\nrequests = 5', "nothing else but requests_per_minute"),
        (f'[a]\nkey = "{SECRET}"\nrequests_per_minute = 0', "requests_per_minute of [a]"),
        (f'[a]\nkey = "{SECRET}"\ntokens_per_minute = 1.5', "tokens_per_minute of [a]"),
        (f'[a]\nkey = "{SECRET}"\nconcurrent = true', "concurrent of [a]"),
        (f'[a]\nkey = "{SECRET}"\n[b]\nkey = "{SECRET}"', "a and b have the same"),
        (b"\xff\xfe", "UTF-8"),
    ],
)
def test_mistakes_in_the_file_are_named_and_no_secret_is(tmp_path: Path, text: str | bytes, words: str) -> None:
    with pytest.raises(BadSetting) as caught:
        loaded(tmp_path, text)
    assert words in str(caught.value)
    assert "sk-" not in str(caught.value).replace(str(tmp_path), "")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(BadSetting, match="api_keys"):
            KeyRing.load(str(path))


async def test_all_but_health_and_metrics_is_behind_the_key() -> None:
    async with client() as http:
        for path in (
            "/v1/models",
            f"/v1/models/{MODEL}",
            "/v1/nothing",
            "/",
            "/v1/../health/",
            "/health/x",
            "//health",
        ):
            answer = await http.get(path)
            assert (path, answer.status_code) == (path, 401)
            assert answer.json()["error"]["type"] == "authentication_error"
            assert answer.headers["www-authenticate"] == "Bearer"
        assert (await http.post("/v1/completions", json=BODY)).status_code == 401
        assert (await http.get("/health")).status_code == (await http.get("/metrics")).status_code == 200
        assert (await http.get("/v1/models", headers=bearer(SECRET))).status_code == 200
        assert (await http.get("/v1/nothing", headers=bearer(SECRET))).status_code == 404


async def test_health_stays_open_under_a_prefix() -> None:
    app = create_app(service(ScriptedVerifier(), RING))
    transport = httpx.ASGITransport(app, root_path="/llm")
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await http.get("/llm/health")).status_code == 200
        assert (await http.get("/llm/v1/models")).status_code == 401


async def test_keys_share_no_prefix() -> None:
    verifier = ScriptedVerifier()
    async with client(verifier) as http:
        for secret in (SECRET, OTHER, SECRET):
            await http.post("/v1/completions", json=BODY, headers=bearer(secret))
    salts = [request.salt for request in verifier.requests]
    assert salts[0] == salts[2] != salts[1]
    assert b"" not in salts
