"""The service as a user gets it: `serve run` on a config file, a tiny model, the official client."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openai import BadRequestError, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from deployments.autoscaling import VERIFIER
from deployments.bench import free_port
from tests.deployments.tiny import make_tiny_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
AT_ONCE_S = 18.0  # less than a silent rank is waited for
HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "abcabcabcabc"}]


@dataclass(frozen=True)
class Server:
    url: str
    dashboard: str
    config: dict[str, Any]
    folder: Path

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def metric(self, name: str) -> float:
        (value,) = self.metrics(name)
        return value

    def metrics(self, *names: str) -> list[float]:
        """As of one moment. A verifier that was late with its figures is asked again."""
        deadline = time.monotonic() + 60
        while True:
            text = httpx.get(f"{self.url}/metrics", timeout=60).text
            found = [re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE) for name in names]
            if all(found) or time.monotonic() > deadline:
                assert all(found), names
                return [float(each[1]) for each in found if each]
            time.sleep(0.1)

    @property
    def applications(self) -> str:
        """Where Serve is told of its applications, and tells of them."""
        return f"{self.dashboard}/api/serve/applications/"

    def replicas(self, deployment: str) -> list[dict[str, Any]]:
        """All there are, whatever they do."""
        application = httpx.get(self.applications, timeout=30).json()["applications"]["draftree"]
        found: list[dict[str, Any]] = application["deployments"][deployment]["replicas"]
        return found

    def running(self, deployment: str) -> dict[str, int]:
        """Those that run: their names and their processes."""
        return {
            each["replica_id"]: int(each["pid"]) for each in self.replicas(deployment) if each["state"] == "RUNNING"
        }


def eventually(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=60).status_code == 200
    except httpx.TransportError:
        return False


def started(config: Path, log: Path) -> subprocess.Popen[bytes]:
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "ray.serve.scripts", "run", str(config)],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"RAY_ADDRESS": "local"},
        )


@contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[Server]:
    """A service of its own with a tiny model, gone with all its processes when it is left."""
    config = yaml.safe_load((ROOT / "deployments" / "serve.yaml").read_text())
    config["http_options"]["port"] = free_port()
    settings = {"model": str(make_tiny_model(folder / "tiny")), "page_size": 4, "max_draft": 3, **settings}
    config["applications"][0]["args"] = settings
    (folder / "serve.yaml").write_text(yaml.safe_dump(config))
    log, url = folder / "log", f"http://127.0.0.1:{config['http_options']['port']}"
    process = started(folder / "serve.yaml", log)
    try:
        eventually(lambda: healthy(url) or process.poll() is not None, 300)
        if process.poll() is not None and "timed out during startup" in log.read_text():
            # Ray waits for itself for half a minute, however busy the machine is.
            process = started(folder / "serve.yaml", log)
            eventually(lambda: healthy(url) or process.poll() is not None, 300)
        assert process.poll() is None, log.read_text()
        found = re.search(r"dashboard at \S*(http://[\d.:]+)", log.read_text())
        assert found, log.read_text()
        yield Server(url, found[1], config, folder)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            process.kill()  # Ray's processes end with the one that started them
            process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("serve"), threads=1) as server:
        yield server


def test_chat_whole_and_streamed(server: Server) -> None:
    with server.client() as client:
        whole = client.chat.completions.create(model="tiny", messages=HI, temperature=0, max_tokens=40)
        stream = client.chat.completions.create(model="tiny", messages=HI, temperature=0, max_tokens=40, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert whole.usage is not None
    assert whole.choices[0].finish_reason == ("length" if whole.usage.completion_tokens == 40 else "stop")
    assert text == whole.choices[0].message.content
    assert text


def test_seeds_decide(server: Server) -> None:
    with server.client() as client:

        def text(seed: int | None) -> str:
            answer = client.completions.create(model="tiny", prompt="xyz", seed=seed, max_tokens=30)
            return answer.choices[0].text

        assert text(1) == text(1)
        assert len({text(None) for _ in range(5)}) > 1


def test_the_second_turn_hits_the_prefix_cache(server: Server) -> None:
    with server.client() as client:
        turns: list[ChatCompletionMessageParam] = [{"role": "user", "content": "a second turn, please"}]
        first = client.chat.completions.create(model="tiny", messages=turns, max_tokens=8)
        turns += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "go"}]
        second = client.chat.completions.create(model="tiny", messages=turns, max_tokens=8)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens // 4 * 4


def test_refusals_keep_their_shape_through_serve(server: Server) -> None:
    with server.client() as client, pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HI, logprobs=True)
    assert caught.value.param == "logprobs"
    with server.client() as client, pytest.raises(BadRequestError, match="256 tokens"):
        client.completions.create(model="tiny", prompt="x" * 300)


@pytest.mark.parametrize("stream", [True, False])
def test_closed_connections_free_their_sequences(server: Server, stream: bool) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 240, "ignore_eos": True, "stream": stream}
    aborted = 'draftree_finished_total{reason="abort"}'

    def leave() -> None:
        if stream:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{server.url}/v1/completions", json=body, timeout=httpx.Timeout(5, read=0.05))

    def left() -> bool:
        """One of those that were left had come as far as the engine."""
        leave()
        return server.metric(aborted) >= before + 1

    before = server.metric(aborted)
    for _ in range(4):
        leave()
    eventually(left, 30)
    held = ("draftree_running", "draftree_waiting", 'draftree_kv_pages{state="used"}')
    eventually(lambda: sum(server.metrics(*held)) == 0, 30)


def test_a_wrong_setting_in_yaml_is_one_sentence_in_the_status(server: Server) -> None:
    wrong = {"name": "wrong", "route_prefix": "/wrong", "import_path": "deployments:app", "args": {"max_drafts": 3}}
    config = server.config | {"applications": [*server.config["applications"], wrong]}
    httpx.put(server.applications, content=json.dumps(config), timeout=30).raise_for_status()

    def status() -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(server.applications, timeout=30).json()["applications"].get("wrong", {})
        return found

    eventually(lambda: status().get("status") == "DEPLOY_FAILED", 60)
    assert "there is no setting max_drafts (did you mean max_draft?)." in status()["message"]
    assert "Traceback" not in status()["message"]
    assert healthy(server.url)


def verifier_pid(server: Server) -> int:
    return next(iter(server.running(VERIFIER).values()))


def test_a_stream_waits_for_a_lost_verifier_to_come_back(server: Server) -> None:
    """It was an error once. The text is the same as without the loss."""

    def stream(client: OpenAI) -> Iterator[str]:
        chunks = client.completions.create(
            model="tiny", prompt="x", stream=True, seed=1, max_tokens=240, extra_body={"ignore_eos": True}
        )
        return (chunk.choices[0].text for chunk in chunks)

    def replays() -> int:
        text = httpx.get(f"{server.url}/metrics", timeout=60).text
        return sum(line.startswith('draftree_replays_total{reason="lost"} ') for line in text.splitlines())

    with server.client() as client:
        truth = "".join(stream(client))
        for _ in range(5):  # on a busy machine the text may be there before the verifier is lost
            eventually(lambda: bool(server.running(VERIFIER)), 60)
            pid, texts = verifier_pid(server), stream(client)
            first = next(texts)
            os.kill(pid, signal.SIGKILL)
            assert first + "".join(texts) == truth
            if replays():
                break
    assert replays()
    eventually(lambda: server.metric('draftree_kv_pages{state="used"}') == 0, 60)


def rank_pids(server: Server) -> list[int]:
    """Of the actors that are the further ranks of a verifier."""
    actors = httpx.get(f"{server.dashboard}/api/v0/actors", params={"detail": 1}, timeout=30).json()
    found = actors["data"]["result"]["result"]
    return [int(actor["pid"]) for actor in found if actor["class_name"] == "VerifierRank" and actor["state"] == "ALIVE"]


def groups(server: Server) -> list[str]:
    """States of all placement groups there have been."""
    found = httpx.get(f"{server.dashboard}/api/v0/placement_groups", timeout=30).json()
    return [group["state"] for group in found["data"]["result"]["result"]]


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_verifier_on_three_ranks_is_replaced_as_a_whole(server: Server, tmp_path: Path) -> None:
    """The same text as from one rank; one rank's death is told at once and ends all; nothing stays behind."""

    def answer(client: OpenAI) -> str | None:
        chat = client.chat.completions.create(model="tiny", messages=HI, temperature=1, seed=3, max_tokens=40)
        return chat.choices[0].message.content

    with server.client() as client:
        expected = answer(client)
    with serving(tmp_path, tensor_parallel=3) as parallel, parallel.client() as client:
        first = rank_pids(parallel)
        assert len(first) == 2
        assert answer(client) == expected
        os.kill(first[1], signal.SIGKILL)
        eventually(lambda: not healthy(parallel.url), AT_ONCE_S)
        eventually(lambda: healthy(parallel.url), 90)
        assert answer(client) == expected
        second = rank_pids(parallel)
        assert len(second) == 2
        eventually(lambda: not any(is_alive(pid) for pid in first), 30)

        os.kill(verifier_pid(parallel), signal.SIGKILL)  # rank 0
        eventually(lambda: not healthy(parallel.url), AT_ONCE_S)
        eventually(lambda: healthy(parallel.url), 90)
        assert answer(client) == expected
        third = rank_pids(parallel)
        assert len(third) == 2
        eventually(lambda: not any(is_alive(pid) for pid in second), 30)
        eventually(lambda: sorted(groups(parallel)) == ["CREATED", "REMOVED", "REMOVED"], 30)
    eventually(lambda: not any(is_alive(pid) for pid in third), 20)
