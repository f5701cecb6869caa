"""Two verifiers as a user gets them, one of which is killed, frozen or told to stop while it writes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.deployments.test_serve import Server, eventually, serving, verifiers

pytestmark = pytest.mark.slow

SEEDS = range(4)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("replay")
    with serving(folder, verifier_replicas=2, threads=1, max_running=2, stall_timeout_s=4) as server:
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


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_texts_are_the_same_when_a_verifier_is_lost(server: Server, blow: signal.Signals) -> None:
    truth = [write(server, seed, stream=False) for seed in SEEDS]
    texts: dict[int, str] = {}

    def ask(seed: int) -> None:
        texts[seed] = write(server, seed, stream=seed % 3 > 0)

    before = verifiers(server)
    threads = [threading.Thread(target=ask, args=(seed,)) for seed in SEEDS]
    for thread in threads:
        thread.start()
    eventually(lambda: server.metric("draftree_in_flight") == len(threads), 20)
    eventually(lambda: busy(server) > 0, 20)
    victim, pid = next(iter(before.items()))
    os.kill(pid, blow)
    for thread in threads:
        thread.join(60)
    assert [texts.get(seed) for seed in SEEDS] == truth
    eventually(lambda: len(verifiers(server)) == 2 and victim not in verifiers(server), 90)
    eventually(lambda: busy(server) == 0, 10)
    assert server.metric('draftree_kv_pages{state="used"}') == 0
