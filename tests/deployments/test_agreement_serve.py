"""Two ingress replicas and their aggregator on Ray: a limit holds over both, and what they tell is true."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.deployments.test_serve import Server, eventually, serving

pytestmark = pytest.mark.slow

LIMITED, FREE = "sk-0123456789abcdef", "sk-fedcba9876543210"
KEYS = f'[limited]\nkey = "{LIMITED}"\nrequests_per_minute = 10\n[free]\nkey = "{FREE}"\n'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("agreement")
    (folder / "keys.toml").write_text(KEYS)
    with serving(folder, threads=1, ingress_replicas=2, api_keys=str(folder / "keys.toml")) as server:
        eventually(lambda: told(server).get("ingress_replicas") == 2, 60)
        yield server


def ask(server: Server, key: str, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": "abcabc", "max_tokens": 8, "ignore_eos": True, **fields}
    # A connection each, so that neither ingress is preferred.
    headers = {"Authorization": f"Bearer {key}", "Connection": "close"}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)


def told(server: Server) -> dict[str, Any]:
    answer = httpx.get(f"{server.url}/v1/speculation", headers={"Authorization": f"Bearer {FREE}"}, timeout=60)
    found: dict[str, Any] = answer.json()
    return found


def answering_ingresses(server: Server) -> int:
    """How many have answered a completion with 200, told apart by when they did so first."""
    pattern = r'^draftree_requests_created\{endpoint="completions",status="200"\} (\S+)$'
    scrapes = [httpx.get(f"{server.url}/metrics", timeout=60).text for _ in range(20)]
    return len({found[1] for text in scrapes if (found := re.search(pattern, text, re.MULTILINE))})


def test_a_keys_limit_holds_over_both_and_the_figures_are_true(server: Server) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: ask(server, LIMITED, temperature=0), range(24)))
    granted = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(granted) <= 10
    assert len(granted) + len(refused) == 24
    assert all(1 <= int(answer.headers["retry-after"]) <= 60 for answer in refused)
    assert refused[0].json()["error"]["type"] == "rate_limit_error"
    assert answering_ingresses(server) == 2

    # Either ingress may answer, and each goes by what it heard last: what is looked at together is asked for once.
    steps = sum(answer.json()["usage"]["speculation"]["steps"] for answer in granted)
    agreed = {"endpoint": "completions", "requests": len(granted), "steps": steps, "max_draft": 3}

    def whole(found: dict[str, Any]) -> bool:
        kinds = [each for each in found["kinds"] if each["temperature"] == "zero"]
        costs = found["costs"]  # null until an ingress has told of some
        return bool(costs and costs["verifying"]) and any(agreed.items() <= each.items() for each in kinds)

    eventually(lambda: all(whole(told(server)) for _ in range(8)), 20)
    found = told(server)
    assert (found["model"], found["drafter"], found["allowed"]["max_draft"]) == ("tiny", "ngram", 3)
    assert all(seconds > 0 for seconds in found["costs"]["verifying"].values())


def test_requests_go_on_without_the_aggregator_and_it_comes_back(server: Server) -> None:
    def pids() -> list[int]:
        return list(server.running("Aggregator").values())

    before = pids()
    os.kill(before[0], signal.SIGKILL)
    assert [ask(server, FREE).status_code for _ in range(10)] == [200] * 10
    eventually(lambda: bool(pids()) and pids() != before, 60)
    eventually(lambda: told(server)["age_s"] < 2 and told(server)["ingress_replicas"] == 2, 30)
    assert ask(server, FREE).status_code == 200
