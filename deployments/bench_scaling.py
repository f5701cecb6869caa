"""Whether verifiers follow the load: steps up and down over HTTP, and how their number answers.

    python -m deployments.bench_scaling [--clients 2,8,2] [--steady 25] [--most 3]

Serves a tiny random model, made for the occasion, on a Ray of its own with reports and delays in seconds instead of
minutes. Each client asks again as soon as it is answered; a load is held until the number has been steady for a while.
A table, then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from deployments.autoscaling import VERIFIER
from deployments.bench import free_port
from drafter.command_line import OneLineParser
from workers.flags import at_least
from workers.measuring.table import table

LOOK_S = 0.5
MAX_RUNNING = 4  # so that few clients are a load
MAX_TOKENS = 160
ANSWER_S = 120.0
LONGEST_S = 300.0  # that a load is held
PROMPT = "Nothing of what I say to this is going to make sense"
QUICK = {
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
}


@dataclass
class Stage:
    """One load, held for a while."""

    clients: int
    wanted: list[int] = field(default_factory=list)  # replicas that run or start, at every look
    running: list[int] = field(default_factory=list)
    answered: int = 0
    failed: int = 0

    @property
    def changes(self) -> int:
        return sum(a != b for a, b in pairwise(self.wanted))

    def is_steady(self, for_s: float) -> bool:
        """Whether all verifiers that were wanted ran, and no others, for so long."""
        looks = round(for_s / LOOK_S)
        return len(self.wanted) >= looks and len({*self.wanted[-looks:], *self.running[-looks:]}) == 1

    @property
    def settled_s(self) -> float:
        """From the stage's begin until as many run as do at its end."""
        others = [place for place, number in enumerate(self.running, start=1) if number != self.running[-1]]
        return LOOK_S * max(others, default=0)


def turns(numbers: Sequence[int]) -> int:
    """How often a number went the other way."""
    steps = [after - before for before, after in pairwise(numbers) if after != before]
    return sum((before > 0) != (after > 0) for before, after in pairwise(steps))


class Clients:
    """Threads that ask, each one question after the other; every answer counts for the stage that it was asked in."""

    def __init__(self, url: str, model: str) -> None:
        self.stage = Stage(0)
        self._body = {"model": model, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "ignore_eos": True}
        self._url = url
        self._threads: list[threading.Thread] = []
        self._counting = threading.Lock()

    def hold(self, stage: Stage) -> None:
        """From now on as many ask as the stage says; those that are too many end with their next answer."""
        self.stage = stage
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for number in range(len(self._threads), stage.clients):
            thread = threading.Thread(target=self._ask, args=(number,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        self.hold(Stage(0))
        for thread in self._threads:
            thread.join(ANSWER_S)

    def _ask(self, number: int) -> None:
        with httpx.Client(base_url=self._url, timeout=ANSWER_S) as client:
            while number < self.stage.clients:
                stage = self.stage
                try:
                    answer = client.post("/v1/completions", json=self._body)
                    well = answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == MAX_TOKENS
                except (httpx.HTTPError, KeyError, ValueError):
                    well = False
                with self._counting:
                    stage.answered += well
                    stage.failed += not well


@contextmanager
def service(model: Path, most: int) -> Iterator[str]:
    """The base URL of a service with 1 to ``most`` verifiers."""
    os.environ.update(QUICK)  # for the processes that Ray starts from here
    import ray
    from ray import serve

    from deployments.build import app
    from deployments.launch import QUIET
    from deployments.settings import Settings

    settings = Settings(
        model=str(model),
        threads=1,
        max_running=MAX_RUNNING,
        verifier_max_replicas=most,
        upscale_delay_s=2,
        downscale_delay_s=6,
    )
    port = free_port()
    try:
        ray.init("local", namespace="serve", include_dashboard=False, logging_level=logging.WARNING)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config=QUIET)
        serve.run(app(settings), name="draftree", route_prefix="/", logging_config=QUIET)
        yield f"http://127.0.0.1:{port}"
    finally:
        ray.shutdown()


def replicas() -> tuple[int, int]:
    """Verifiers that run or start, and those of them that run."""
    from ray import serve

    states = serve.status().applications["draftree"].deployments[VERIFIER].replica_states
    running, starting = (
        sum(number for state, number in states.items() if state == name) for name in ("RUNNING", "STARTING")
    )
    return running + starting, running


def run(loads: Sequence[int], steady_s: float, most: int) -> list[Stage]:
    """The stages; each ends when it has been steady for ``steady_s``."""
    stages = [Stage(clients) for clients in loads]
    with tempfile.TemporaryDirectory() as folder:
        from workers.measuring.tiny import make_tiny_model

        model = make_tiny_model(Path(folder) / "tiny")
        with service(model, most) as url:
            clients = Clients(url, model.name)
            for stage in stages:
                clients.hold(stage)
                ends = time.monotonic() + LONGEST_S
                while time.monotonic() < ends and not stage.is_steady(steady_s):
                    time.sleep(LOOK_S)
                    wanted, running = replicas()
                    stage.wanted.append(wanted)
                    stage.running.append(running)
            clients.stop()
    return stages


def report(stages: Sequence[Stage]) -> dict[str, Any]:
    """Prints the table; returns the same figures."""
    header = ["clients", "verifiers", "settled after s", "changes", "turns", "answers", "failed"]
    rows = [
        [
            str(stage.clients),
            f"{stage.running[0]} → {stage.running[-1]}",
            f"{stage.settled_s:.1f}",
            *(str(figure) for figure in (stage.changes, turns(stage.wanted), stage.answered, stage.failed)),
        ]
        for stage in stages
    ]
    print(f"\nA verifier decodes {MAX_RUNNING} requests at a time\n\n{table(header, rows)}\n")
    return {
        "clients": [stage.clients for stage in stages],
        "verifiers": [stage.running[-1] for stage in stages],
        "settled_s": [stage.settled_s for stage in stages],
        "most_turns_at_steady_load": max(turns(stage.wanted) for stage in stages),
        "answered": sum(stage.answered for stage in stages),
        "failed": sum(stage.failed for stage in stages),
    }


def loads(text: str) -> list[int]:
    return [at_least(0)(number) for number in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    options = command_line().parse_args(arguments)
    print(json.dumps(report(run(options.clients, options.steady, options.most))))
    return 0


def command_line() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m deployments.bench_scaling",
        description="Steps the load up and down, and looks whether the number of verifiers follows.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--clients", type=loads, default="2,8,2", metavar="N,N,…", help="at each stage (default: %(default)s)")
    add("--steady", type=at_least(1), default=25, metavar="S", help="seconds that end a stage (default: %(default)s)")
    add("--most", type=at_least(1), default=3, metavar="N", help="verifiers at most (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
