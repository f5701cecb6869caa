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

from deployments.autoscaling import VERIFIER
from tests.deployments.test_serve import Server, eventually, serving

pytestmark = pytest.mark.slow

SEEDS = range(4)
STREAMED = {1, 2}  # the others are written whole


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("replay")
    with serving(folder, verifier_replicas=2, threads=1, max_running=2, stall_timeout_s=4, drain_timeout_s=1) as server:
        eventually(lambda: len(server.running(VERIFIER)) == 2, 60)
        yield server


def write(server: Server, seed: int, *, stream: bool = True, begun: Callable[[], None] = lambda: None) -> str:
    """At temperature 0 for one seed, at 1 for the others. A stream that has ``begun`` has most of its text to come."""
    options: dict[str, Any] = {
        "model": "tiny",
        "prompt": f"{seed}abcabc",
        "seed": seed,
        "temperature": float(seed > 0),
        "max_tokens": 240,
        "extra_body": {"ignore_eos": True},
    }
    with server.client() as client:
        if not stream:
            text: str = client.completions.create(stream=False, **options).choices[0].text
            return text
        pieces: list[str] = []
        for chunk in client.completions.create(stream=True, **options):
            pieces.append(chunk.choices[0].text)
            begun()
        return "".join(pieces)


def busy(server: Server) -> float:
    return server.metric("draftree_running") + server.metric("draftree_waiting")


def asked(server: Server, happens: Callable[[], None]) -> dict[int, str]:
    """What is written when something happens meanwhile: when all streams have begun, as their clients know first."""
    texts: dict[int, str] = {}
    writing: set[int] = set()

    def run(seed: int) -> None:
        texts[seed] = write(server, seed, stream=seed in STREAMED, begun=lambda: writing.add(seed))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in SEEDS]
    for thread in threads:
        thread.start()
    eventually(lambda: writing == STREAMED, 60)
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
    victim, pid = next(iter(server.running(VERIFIER).items()))
    assert asked(server, lambda: os.kill(pid, blow)) == truth
    eventually(lambda: len(server.running(VERIFIER)) == 2 and victim not in server.running(VERIFIER), 90)
    eventually(lambda: busy(server) == 0, 10)
    assert server.metric('draftree_kv_pages{state="used"}') == 0


def test_a_verifier_that_is_to_stop_leaves_no_text_unfinished(server: Server, truth: dict[int, str]) -> None:
    """What it cannot finish in the time it is given, the one that stays does."""
    application = server.config["applications"][0] | {"deployments": [{"name": VERIFIER, "num_replicas": 1}]}
    config = json.dumps(server.config | {"applications": [application]})

    def scale_down() -> None:
        httpx.put(server.applications, content=config, timeout=30).raise_for_status()
        eventually(lambda: len(server.running(VERIFIER)) == 1, 30)

    assert asked(server, scale_down) == truth
    assert server.metric("draftree_given_up_total") == 0
