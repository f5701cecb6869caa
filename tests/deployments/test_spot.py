"""The watcher for spot notices, against a metadata service that a test answers for."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from ray.scripts.scripts import drain_node

from deployments import spot
from deployments.spot import aws_notice, drain_command, gcp_notice, watch

NOW = 1_700_000_000.0


class Metadata(ThreadingHTTPServer):
    """Answers of ``answers``, by method and path; 404 to all else. AWS's want the token that is given out."""

    answers: dict[str, str]

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = {"PUT /api/token": "secret"}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Metadata

    def do_GET(self) -> None:
        refused = "meta-data" in self.path and self.headers["X-aws-ec2-metadata-token"] != "secret"
        refused |= "instance/preempted" in self.path and self.headers["Metadata-Flavor"] != "Google"
        answer = self.server.answers.get(f"{self.command} {self.path}")
        self.send_response(401 if refused else 404 if answer is None else 200)
        self.end_headers()
        self.wfile.write((answer or "").encode())

    do_PUT = do_GET

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    with Metadata() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_aws_gives_two_minutes(metadata: Metadata) -> None:
    assert aws_notice(NOW, base=metadata.url) is None
    notice = json.dumps({"action": "terminate", "time": "2023-11-14T22:15:20Z"})
    metadata.answers["GET /meta-data/spot/instance-action"] = notice
    assert aws_notice(NOW, base=metadata.url) == 120.0


def test_gcp_gives_half_a_minute(metadata: Metadata) -> None:
    metadata.answers["GET /instance/preempted"] = "FALSE"
    assert gcp_notice(NOW, base=metadata.url) is None
    metadata.answers["GET /instance/preempted"] = "TRUE"
    assert gcp_notice(NOW, base=metadata.url) == 30.0


def test_ray_understands_the_command() -> None:
    """It is hidden and may change with any version; the options are checked as Ray's own command line does."""
    command = drain_command("10.0.0.1:6379", "ab" * 28, 120.0)
    assert command[:2] == ["ray", drain_node.name]
    context = drain_node.make_context("drain-node", command[2:])
    assert context.params == {
        "address": "10.0.0.1:6379",
        "node_id": "ab" * 28,
        "reason": "DRAIN_NODE_REASON_PREEMPTION",
        "reason_message": "the cloud takes this spot machine away",
        "deadline_remaining_seconds": 115,
    }
    assert drain_command("head", "id", 2.0)[-1] == "0"  # Ray refuses less


def test_whatever_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A metadata service that was slow once, or a head that did not answer, must not end the watch."""
    monkeypatch.setattr(spot, "EVERY_S", 0.0)
    notices = iter([OSError("slow"), OSError("slow"), None, 120.0, 118.0])
    drained: list[float] = []

    def notice(now: float) -> float | None:
        found = next(notices)
        if isinstance(found, Exception):
            raise found
        return found

    def drain(left_s: float) -> None:
        drained.append(left_s)
        if len(drained) == 1:
            raise RuntimeError("the head does not answer")

    watch(notice, drain)
    assert drained == [120.0, 118.0]
    said = capsys.readouterr().out
    assert said.count("no word from the metadata service") == 1
    assert "could not be drained: the head does not answer" in said
