"""A head is exchanged as an operator does it: over HTTP, while requests run, with a drafter in its own deployment."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from tests.deployments.test_remote import drafter_pid
from tests.deployments.test_serve import Server, eventually, serving
from tests.deployments.tiny import make_tiny_model
from tests.drafter.heads import HeadShape, random_weights, safeailab_config, save_head
from verifier.config import ModelConfig

pytestmark = pytest.mark.slow

KEY = "an-operators-key-0123456789"
DRAFTED = "draftree_remote_answers_total"


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and heads for it: two that fit and read different layers, one that is too wide, one cut short."""
    folder = tmp_path_factory.mktemp("exchange")
    target_vocab = ModelConfig.from_hf(make_tiny_model(folder / "tiny")).vocab_size
    shape = HeadShape(target_hidden=72, target_vocab=target_vocab, hidden=72, head_dim=16)
    wide = HeadShape(target_vocab=target_vocab)
    for name, of, layers in (
        ("a", shape, [0, 1, 2]),
        ("b", shape, [0, 0, 1]),
        ("cut", shape, [0, 1, 2]),
        ("wide", wide, [0, 1, 2]),
    ):
        config = safeailab_config(of) | {"eagle_aux_hidden_state_layer_ids": layers}
        save_head(folder / name, random_weights(of, seed=len(name) + layers[1]), config)
    file = folder / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-500])
    (folder / "keys.toml").write_text(f'[operator]\nkey = "{KEY}"\nadmin = true\n')
    return folder


@pytest.fixture(scope="module")
def server(heads: Path) -> Iterator[Server]:
    settings = {"draft_model": f"ngram+{heads / 'a'}", "drafter_placement": "remote", "adaptive": False}
    with serving(heads, threads=1, api_keys=str(heads / "keys.toml"), **settings) as server:
        eventually(lambda: bool(say(server, 0, 20)) and server.metric(DRAFTED) > 10, 120)
        yield server


def say(server: Server, seed: int, max_tokens: int = 200) -> str:
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        answer = client.completions.create(
            model="tiny", prompt="abcabc", seed=seed, max_tokens=max_tokens, extra_body={"ignore_eos": True}
        )
        return answer.choices[0].text


def exchange(server: Server, draft_model: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.post(f"{server.url}/v1/draft_model", json={"draft_model": draft_model}, headers=headers, timeout=120)


def drafts_with(server: Server, draft_model: str, truth: str) -> bool:
    """Whether that head answers the questions about a text."""
    answers = server.metric(DRAFTED)
    drafting = f'draftree_drafting{{draft_model="{draft_model}"}} 1.0' in httpx.get(f"{server.url}/metrics").text
    return say(server, 0) == truth and drafting and server.metric(DRAFTED) > answers + 10


def test_a_head_is_exchanged_under_load(server: Server, heads: Path) -> None:
    truth = [say(server, seed) for seed in range(3)]
    texts: list[tuple[int, str]] = []
    enough = threading.Event()

    def load(seed: int) -> None:
        while not enough.is_set():
            texts.append((seed, say(server, seed)))

    threads = [threading.Thread(target=load, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        for name in ("wide", "cut", "nowhere"):
            answer = exchange(server, f"ngram+{heads / name}")
            assert answer.status_code == 400, answer.text
            assert name in answer.json()["error"]["message"]
        before = len(texts)
        good = f"ngram+{heads / 'b'}"
        answer = exchange(server, good)
        assert (answer.status_code, answer.json()) == (200, {"draft_model": good, "replicas": 2})
        eventually(lambda: len(texts) > before + 3, 60)
        eventually(lambda: drafts_with(server, good, truth[0]), 60)
    finally:
        enough.set()
        for thread in threads:
            thread.join(60)
    assert all(text == truth[seed] for seed, text in texts)
    pid = drafter_pid(server)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)  # its successor must come up with the new head, or the verifier would refuse it
    eventually(lambda: drafter_pid(server) not in (None, pid), 120)
    eventually(lambda: drafts_with(server, good, truth[0]), 60)
