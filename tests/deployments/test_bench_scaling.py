"""How the scaling run counts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from deployments.bench_scaling import MAX_TOKENS, Clients, Stage, loads, report, turns
from tests.deployments.test_serve import eventually


def test_turns_are_counted_not_steps() -> None:
    assert turns([1, 1, 2, 3, 3]) == 0
    assert turns([1, 2, 1]) == 1
    assert turns([1, 2, 2, 1, 1, 2]) == 2
    assert turns([]) == 0


def test_a_stage_has_settled_when_nothing_changes_any_more() -> None:
    stage = Stage(8, wanted=[1, 1, 3, 3, 3, 3], running=[1, 1, 1, 2, 3, 3])
    assert (stage.changes, stage.settled_s) == (1, 2.0)
    assert Stage(8, wanted=[1, 1], running=[1, 1]).settled_s == 0.0


def test_a_stage_is_steady_when_all_that_are_wanted_run() -> None:
    stage = Stage(8, wanted=[1, 3, 3, 3, 3], running=[1, 1, 2, 3, 3])
    assert stage.is_steady(1.0)
    assert not stage.is_steady(1.5)
    assert not Stage(8, wanted=[2, 2], running=[2, 2]).is_steady(1.5)


def test_the_report_is_a_table_and_figures(capsys: pytest.CaptureFixture[str]) -> None:
    stages = [
        Stage(2, [1, 1], [1, 1], answered=5),
        Stage(8, [1, 3, 2, 3], [1, 1, 2, 3], answered=9, failed=1),
    ]
    figures = report(stages)
    assert json.loads(json.dumps(figures)) == {
        "clients": [2, 8],
        "verifiers": [1, 3],
        "settled_s": [0.0, 1.5],
        "most_turns_at_steady_load": 2,
        "answered": 14,
        "failed": 1,
    }
    assert "| 8       |     1 → 3 |" in capsys.readouterr().out
    assert loads("2,8,2") == [2, 8, 2]


class Handler(BaseHTTPRequestHandler):
    """Answers every question, the third one with an error and the fourth one cut short."""

    asked = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        Handler.asked += 1
        tokens = 1 if Handler.asked == 4 else MAX_TOKENS
        body = json.dumps({"usage": {"completion_tokens": tokens}}).encode()
        self.send_response(500 if Handler.asked == 3 else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_no_answer_is_lost_and_none_that_is_wrong_counts_as_right(server: str) -> None:
    clients, stages = Clients(server, "tiny"), [Stage(1), Stage(3), Stage(0)]
    clients.hold(stages[0])
    eventually(lambda: stages[0].answered >= 10, 20)
    clients.hold(stages[1])
    eventually(lambda: stages[1].answered >= 10, 20)
    clients.stop()
    assert sum(stage.failed for stage in stages) == 2
    assert sum(stage.answered + stage.failed for stage in stages) == Handler.asked
