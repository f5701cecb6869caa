"""Remote drafting as a user gets it: `serve run`, a head in its own deployment, and what happens when that is lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest

from deployments.autoscaling import DRAFTER
from tests.deployments.test_serve import Server, eventually, serving
from tests.deployments.tiny import make_tiny_model
from tests.drafter.heads import HeadShape, random_weights, safeailab_config, save_head
from verifier.config import ModelConfig

pytestmark = pytest.mark.slow

DRAFTED = "draftree_remote_answers_total"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("remote")
    model = make_tiny_model(folder / "tiny")
    shape = HeadShape(target_hidden=72, target_vocab=ModelConfig.from_hf(model).vocab_size, hidden=72, head_dim=16)
    config = safeailab_config(shape) | {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    head = save_head(folder / "head", random_weights(shape), config)
    settings = {"draft_model": f"ngram+{head}", "drafter_placement": "remote", "adaptive": False}
    with serving(folder, threads=1, **settings) as server:
        eventually(lambda: bool(say(server, 0, 20)) and connected(server), 120)  # it is looked for when it is wanted
        yield server


def connected(server: Server) -> bool:
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    return 'draftree_remote_connected{reason=""} 1.0' in text


def say(server: Server, seed: int, max_tokens: int = 200) -> str:
    with server.client() as client:
        answer = client.completions.create(
            model="tiny", prompt="abcabc", seed=seed, max_tokens=max_tokens, extra_body={"ignore_eos": True}
        )
        return answer.choices[0].text


def drafter_pid(server: Server) -> int | None:
    return next(iter(server.running(DRAFTER).values()), None)


def test_the_head_drafts_from_its_own_deployment(server: Server) -> None:
    before = server.metric(DRAFTED)
    assert say(server, 1) == say(server, 1)
    assert server.metric(DRAFTED) > before + 10
    assert server.metric("draftree_drafter_failures_total") == 0


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_drafter_changes_no_text_and_comes_back(server: Server, blow: signal.Signals) -> None:
    truth = [say(server, seed) for seed in range(4)]
    pid = drafter_pid(server)
    assert pid is not None
    texts: dict[int, str] = {}
    threads = [threading.Thread(target=lambda seed=seed: texts.update({seed: say(server, seed)})) for seed in range(4)]
    asked = server.metric("draftree_remote_questions_total")
    for thread in threads:
        thread.start()
    eventually(lambda: server.metric("draftree_remote_questions_total") > asked, 30)
    os.kill(pid, blow)
    for thread in threads:
        thread.join(60)
    assert [texts[seed] for seed in range(4)] == truth
    assert say(server, 0) == truth[0]  # without a drafter, too
    eventually(lambda: drafter_pid(server) not in (None, pid), 120)

    def drafts() -> bool:
        answers = server.metric(DRAFTED)
        return say(server, 0) == truth[0] and server.metric(DRAFTED) > answers + 10

    eventually(drafts, 60)
    if blow == signal.SIGSTOP:
        with suppress(ProcessLookupError):  # Serve has done so
            os.kill(pid, signal.SIGKILL)
