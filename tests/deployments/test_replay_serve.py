"""Two verifiers as a user gets them, one of which is killed, frozen or told to stop while it writes."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.deployments.test_serve import Server, eventually, serving, verifiers

pytestmark = pytest.mark.slow

SEEDS = range(4)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("replay")
    with serving(folder, verifier_replicas=2, threads=1, max_running=2, stall_timeout_s=4, drain_timeout_s=1) as server:
        eventually(lambda: len(verifiers(server)) == 2, 60)
        yield server


def write(server: Server, seed: int, *, stream: bool = True) -> str:
    """At temperature 0 for one seed, at 1 for the others."""
    options: dict[str, Any] = {
        "model": "tiny",
        "prompt": f"{seed}abcabc",
        "seed": seed,
        "temperature": float(seed > 0),
        "max_tokens": 120,
        "extra_body": {"ignore_eos": True},
    }
    with server.client() as client:
        if not stream:
            text: str = client.completions.create(stream=False, **options).choices[0].text
            return text
        return "".join(chunk.choices[0].text for chunk in client.completions.create(stream=True, **options))


def busy(server: Server) -> float:
    return server.metric("draftree_running") + server.metric("draftree_waiting")


def asked(server: Server, happens: Callable[[], None]) -> dict[int, str]:
    """What is written when something happens meanwhile."""
    texts: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda seed=seed: texts.update({seed: write(server, seed, stream=seed % 3 > 0)}))
        for seed in SEEDS
    ]
    for thread in threads:
        thread.start()
    eventually(lambda: server.metric("draftree_in_flight") == len(threads) and busy(server) > 0, 20)
    happens()
    for thread in threads:
        thread.join(90)
    return texts


@pytest.fixture(scope="module")
def truth(server: Server) -> dict[int, str]:
    return {seed: write(server, seed, stream=False) for seed in SEEDS}


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_texts_are_the_same_when_a_verifier_is_lost(
    server: Server, truth: dict[int, str], blow: signal.Signals
) -> None:
    victim, pid = next(iter(verifiers(server).items()))
    assert asked(server, lambda: os.kill(pid, blow)) == truth
    eventually(lambda: len(verifiers(server)) == 2 and victim not in verifiers(server), 90)
    eventually(lambda: busy(server) == 0, 10)
    assert server.metric('draftree_kv_pages{state="used"}') == 0


def test_a_verifier_that_is_to_stop_leaves_no_text_unfinished(server: Server, truth: dict[int, str]) -> None:
    """What it cannot finish in the time it is given, the one that stays does."""
    application = server.config["applications"][0] | {"deployments": [{"name": "VerifierReplica", "num_replicas": 1}]}
    config = json.dumps(server.config | {"applications": [application]})

    def scale_down() -> None:
        httpx.put(f"{server.dashboard}/api/serve/applications/", content=config, timeout=30).raise_for_status()
        eventually(lambda: len(verifiers(server)) == 1, 30)

    assert asked(server, scale_down) == truth
    assert server.metric("draftree_given_up_total") == 0
