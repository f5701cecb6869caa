"""Ingress replicas with one aggregator, and without it: what they agree about, asked over HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx

from deployments.aggregator import LISTEN_S, Aggregator, Decisions, Report
from deployments.agreement import LOOK_S, Agreement, AtHand
from deployments.api import create_app
from deployments.keys import ApiKey, KeyLimits, KeyRing
from deployments.quotas import MINUTE_S, QuotaId
from deployments.speculation import PATIENCE_S
from tests.deployments.fakes import DRAFT, MODEL, ScriptedVerifier, agreement, busy_stats, service, until
from verifier.errors import DraftreeError
from workers.costs import Prices
from workers.measuring.clockwork import ManualClock
from workers.sequence import Progress, Request
from workers.stats import Usage

SECRET = "sk-0123456789abcdef"
RING = KeyRing({SECRET: ApiKey("a", KeyLimits(requests_per_minute=8))})
BODY: dict[str, Any] = {"model": MODEL, "prompt": "Hi", "temperature": 0}


class Flaky:
    """An aggregator that can be lost, or fall silent."""

    def __init__(self, aggregator: Aggregator) -> None:
        self.aggregator = AtHand(aggregator)
        self.lost = self.silent = False
        self.reports: list[Report] = []

    async def exchange(self, report: Report) -> Decisions:
        if self.lost:
            raise ConnectionError("gone")
        if self.silent:
            await asyncio.Event().wait()
        self.reports.append(report)
        return await self.aggregator.exchange(report)


class Ingresses:
    """Two of them on one clock."""

    def __init__(self, verifier: ScriptedVerifier | None = None) -> None:
        self.clock = ManualClock()
        self.aggregate = Flaky(Aggregator(2, DRAFT.max_draft, self.clock))
        self.verifier = verifier or ScriptedVerifier()
        self.agreements = [agreement(self.verifier, 100, 2, self.aggregate, self.clock) for _ in range(2)]
        self.apps = [create_app(service(self.verifier, RING, agreed)) for agreed in self.agreements]

    async def exchange(self, seconds: float = 1) -> None:
        for _ in range(int(seconds)):
            self.clock.now += 1
            for agreed in self.agreements:
                await agreed.exchange()

    async def ask(self, number: int, **fields: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {SECRET}"}
        transport = httpx.ASGITransport(self.apps[number])
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as http:
            return await http.post("/v1/completions", json=BODY | fields)


async def test_a_keys_limit_holds_over_both() -> None:
    ingresses = Ingresses()
    await ingresses.exchange(2 * LISTEN_S)
    answers = [await ingresses.ask(number % 2) for number in range(16)]
    await ingresses.exchange(3)
    answers += [await ingresses.ask(number % 2) for number in range(4)]
    assert [answer.status_code for answer in answers].count(200) == 8
    refused = answers[-1]
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 50 <= int(refused.headers["retry-after"]) <= MINUTE_S
    ingresses.clock.now += MINUTE_S
    assert (await ingresses.ask(0)).status_code == 200


async def test_the_whole_limit_is_had_at_either() -> None:
    ingresses = Ingresses()
    done = 0
    for _ in range(20):
        done += (await ingresses.ask(1)).status_code == 200
        await ingresses.exchange()
    assert done == 8


async def test_without_the_aggregator_requests_go_on_and_the_limit_holds() -> None:
    ingresses = Ingresses()
    await ingresses.exchange(2 * LISTEN_S)
    ingresses.aggregate.lost = True
    await ingresses.exchange(30)
    assert all(agreed.age_s == 30 for agreed in ingresses.agreements)
    answers = [await ingresses.ask(number % 2) for number in range(20)]
    assert [answer.status_code for answer in answers].count(200) == 8
    ingresses.clock.now += MINUTE_S
    assert (await ingresses.ask(0)).status_code == 200
    ingresses.aggregate.lost = False
    await ingresses.exchange()
    assert all(agreed.age_s < 1 for agreed in ingresses.agreements)


async def test_no_request_waits_for_an_aggregator_that_says_nothing() -> None:
    ingresses = Ingresses()
    ingresses.aggregate.silent = True
    task = asyncio.create_task(ingresses.agreements[0].exchange())
    await asyncio.sleep(0)
    async with asyncio.timeout(2):
        assert (await ingresses.ask(0)).status_code == 200
    task.cancel()


async def test_it_runs_beside_the_application() -> None:
    ingresses = Ingresses()
    agreed = ingresses.agreements[0]
    async with agreed.running():
        await until(lambda: agreed.decisions is not None)
    assert agreed.decisions is not None
    assert agreed.decisions.num_ingresses == 1


def wrong_guesses(request: Request) -> list[Progress]:
    """A hundred steps with one guess each, none of them right."""
    used = Usage(100, 100, 100, 0, (100,), (0,), (100,), len(request.prompt_ids), 0, 100)
    return [Progress(request.id, (1,), "length", used)]


async def test_both_learn_what_either_has_seen() -> None:
    """Useless guesses are cut everywhere, and the answer says which limits were in force."""
    figures = replace(busy_stats(), prices=Prices({1: 0.03}, {1: {1: 0.01}}))
    ingresses = Ingresses(ScriptedVerifier(wrong_guesses, figures=figures))
    for _ in range(3):
        await ingresses.ask(0)
        await ingresses.exchange(PATIENCE_S / 2 + 1)
    await ingresses.exchange()
    used = (await ingresses.ask(1)).json()["usage"]["speculation"]
    assert (used["max_draft"], used["max_nodes"]) == (0, 0)
    await ingresses.ask(1, speculation={"max_draft": 3})
    limits = [request.limits for request in ingresses.verifier.requests]
    assert limits[0] == DRAFT
    assert [each.max_draft for each in limits[-2:] if each] == [0, 0]


async def test_prices_are_asked_for_now_and_then_and_only_while_there_are_requests() -> None:
    ingresses = Ingresses(ScriptedVerifier(figures=busy_stats()))
    await ingresses.exchange(5 * LOOK_S)
    assert not any(report.prices for report in ingresses.aggregate.reports)
    for _ in range(3):
        await ingresses.ask(0)
        await ingresses.exchange(2)
    assert sum(report.prices is not None for report in ingresses.aggregate.reports) == 1


async def test_another_drafter_is_named_and_begins_anew() -> None:
    ingresses = Ingresses(ScriptedVerifier(figures=busy_stats()))
    await ingresses.ask(0)
    await ingresses.exchange(LOOK_S + 1)
    decisions = ingresses.agreements[0].decisions
    assert decisions is not None
    assert (decisions.drafter, len(decisions.choices)) == ("ngram", 1)
    ingresses.verifier.figures = replace(busy_stats(), draft_model="ngram+/heads/new")
    await ingresses.ask(0)
    await ingresses.agreements[0].exchange()
    await ingresses.exchange()  # the other one, which has not heard of it, does not take it back
    decisions = ingresses.agreements[0].decisions
    assert decisions is not None
    assert decisions.drafter == "ngram+/heads/new"
    assert [choice.requests for choice in decisions.choices.values()] == [1]


async def test_a_verifier_without_figures_does_not_keep_anybody_from_agreeing() -> None:
    ingresses = Ingresses(ScriptedVerifier(unwell=DraftreeError("gone")))
    await ingresses.ask(0)
    await ingresses.exchange(2 * LISTEN_S)
    decisions = ingresses.agreements[0].decisions
    assert decisions is not None
    assert decisions.parts[QuotaId("a", "requests")].limit == 8


def test_agreement_needs_no_aggregator_to_begin() -> None:
    agreed: Agreement = agreement(ScriptedVerifier(), capacity=7, replicas=2)
    assert agreed.decisions is None
    assert agreed.admission.num_admissible == 4
