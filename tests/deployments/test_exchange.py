"""A draft model is exchanged: what the operator is told, and what each replica does, without Ray and without models."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest

from deployments.api import create_app
from deployments.errors import ApiError
from deployments.exchange import Chosen, ClusterChoice, Exchange, FleetExchange, with_choice
from deployments.keys import ApiKey, KeyRing
from deployments.settings import Settings
from tests.deployments.fakes import ScriptedVerifier, service
from verifier.errors import CheckpointError

KEYS = KeyRing({"operators-key": ApiKey("ops", admin=True), "somebodys-key": ApiKey("team")})


@dataclass
class Memory:
    """A choice that is kept in this process."""

    chosen: Chosen | None = None

    def read(self) -> Chosen | None:
        return self.chosen

    def write(self, chosen: Chosen) -> None:
        self.chosen = chosen


class Replica:
    """Can load the draft models that it is told of."""

    def __init__(self, choice: Memory, *known: str) -> None:
        self.known = set(known)
        self.loaded: list[str] = []
        self.guessing: list[str] = []
        self.exchange = Exchange("first", choice, choice.read(), self._load, self.guessing.append)

    def _load(self, name: str) -> str:
        self.loaded.append(name)
        if name == "bomb":
            raise ZeroDivisionError("by design")
        if name not in self.known:
            raise CheckpointError(f"{name} is damaged.")
        return name


@dataclass
class Fleet:
    """A deployment's handle, as far as it is used."""

    replicas: Sequence[Replica]
    calls: list[str] = field(default_factory=list)

    def broadcast(self, method: str, *arguments: str) -> Any:
        self.calls.append(method)
        call = {"check_draft_model": "check", "take_up_draft_model": "take_up"}[method]

        class Response:
            async def results_async(_, timeout_s: float) -> list[str]:
                return list(await asyncio.gather(*(getattr(each.exchange, call)(*arguments) for each in self.replicas)))

        return Response()


def fleets(choice: Memory, *known: str) -> tuple[Fleet, Fleet, FleetExchange]:
    verifiers, drafters = (Fleet([Replica(choice, *known) for _ in range(2)]) for _ in range(2))
    return verifiers, drafters, FleetExchange(verifiers, drafters, choice)  # type: ignore[arg-type]


async def test_all_replicas_take_up_what_all_can_load() -> None:
    choice = Memory()
    verifiers, drafters, exchange = fleets(choice, "good")
    assert await exchange("good") == 4
    assert choice.chosen is not None
    assert choice.chosen.draft_model == "good"
    for replica in (*verifiers.replicas, *drafters.replicas):
        assert replica.guessing == ["good"]
        assert replica.exchange.draft_model == "good"
        replica.exchange.follow()
        assert replica.guessing == ["good"], "it was taken up twice"


@pytest.mark.parametrize("name", ["bad", "bomb"])
async def test_one_that_cannot_is_enough_to_change_nothing(name: str) -> None:
    choice = Memory()
    verifiers, drafters, exchange = fleets(choice, "good", name)
    verifiers.replicas[1].known.remove(name)
    with pytest.raises(ApiError) as refusal:
        await exchange(name)
    assert (refusal.value.status, refusal.value.param) == (400, "draft_model")
    assert name in refusal.value.message
    assert "\n" not in refusal.value.message
    assert choice.chosen is None
    assert not any(replica.guessing for replica in (*verifiers.replicas, *drafters.replicas))


async def test_nobody_to_ask_is_no_consent() -> None:
    choice = Memory()
    with pytest.raises(ApiError, match="No replica"):
        await FleetExchange(Fleet([]), None, choice)("good")  # type: ignore[arg-type]
    assert choice.chosen is None


async def test_a_replica_that_was_not_reached_follows() -> None:
    """It was being started while the others were told."""
    choice = Memory()
    _, _, exchange = fleets(choice, "good")
    late = Replica(choice, "good")
    await exchange("good")
    assert late.guessing == []
    late.exchange.follow()
    assert late.guessing == ["good"]


async def test_the_same_name_again_is_another_head() -> None:
    """The folder was written to since."""
    choice = Memory()
    verifiers, _, exchange = fleets(choice, "good")
    await exchange("good")
    await exchange("good")
    assert verifiers.replicas[0].guessing == ["good", "good"]


def test_a_choice_that_is_refused_here_is_not_tried_for_ever() -> None:
    """The folder is on every node but this one; what serves, serves on."""
    choice = Memory()
    replica = Replica(choice)
    choice.write(Chosen("elsewhere", "1"))
    for _ in range(3):
        replica.exchange.follow()
    assert replica.loaded == ["elsewhere"]
    assert replica.exchange.draft_model == "first"


def test_replicas_start_with_what_was_chosen() -> None:
    settings = Settings(draft_model="ngram")
    assert with_choice(settings, None) is settings
    assert with_choice(settings, Chosen("head", "1")) == settings.model_copy(update={"draft_model": "head"})


def test_there_is_no_choice_outside_of_a_cluster() -> None:
    assert ClusterChoice(Settings()).read() is None


async def post(exchange: Any, key: str | None, body: object) -> httpx.Response:
    app = create_app(replace(service(ScriptedVerifier()), keys=KEYS, exchange=exchange))
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        return await http.post("/v1/draft_model", json=body, headers=headers)


async def test_an_operator_exchanges_it() -> None:
    _, _, exchange = fleets(Memory(), "good")
    answer = await post(exchange, "operators-key", {"draft_model": "good"})
    assert (answer.status_code, answer.json()) == (200, {"draft_model": "good", "replicas": 4})
    answer = await post(exchange, "operators-key", {"draft_model": "bad"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "bad is damaged."
    assert answer.json()["error"]["param"] == "draft_model"


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("nobodys-key", 401), ("somebodys-key", 403)])
async def test_others_may_not(key: str | None, status: int) -> None:
    verifiers, _, exchange = fleets(Memory(), "good")
    assert (await post(exchange, key, {"draft_model": "good"})).status_code == status
    assert not verifiers.calls


@pytest.mark.parametrize("body", [{}, {"draft_model": ""}, {"draft_model": 1}, {"draft_model": "good", "when": "now"}])
async def test_other_bodies_are_refused(body: object) -> None:
    verifiers, _, exchange = fleets(Memory(), "good")
    assert (await post(exchange, "operators-key", body)).status_code == 400
    assert not verifiers.calls
