"""The README's figures for plain decoding, guessing and the way through HTTP: a table, then one line of JSON.

    python -m deployments.bench [--prompts FILE] [--count 8] [--max-tokens 128] [--rounds 20] [--no-http]

Ratios are medians over prompts that all contestants answer in turn. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import httpx

from drafter.command_line import OneLineParser
from workers.flags import at_least
from workers.measuring.command import add_prompts, as_command
from workers.measuring.prompts import read_prompts

if TYPE_CHECKING:
    from workers.measuring.contest import Contestant, Scores

READY_S = 180.0
PORTS = range(20000, 30000)  # Ray's own workers have those below, the system gives away those above
CONTEXT = 256  # tokens before the rows that are timed


def free_port() -> int:
    """One that nobody has, and that neither the system nor Ray gives to anybody while a service starts."""
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port between {PORTS[0]} and {PORTS[-1]} is free")


@contextmanager
def service(*arguments: str) -> Iterator[str]:
    """A service of its own on a free port; yields its base URL when it is ready."""
    port = free_port()
    command = [sys.executable, "-m", "deployments.launch", "--port", str(port), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, process)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the service ended with status {process.returncode} before it was ready")
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"the service was not ready after {READY_S:.0f} s")


def http_contestant(client: httpx.Client, max_tokens: int, *, stream: bool) -> Contestant:
    """The same greedy tokens through ``/v1/completions``. Their ids do not travel: the answer is as many zeros."""
    settings = {"model": client.get("/v1/models").json()["data"][0]["id"], "temperature": 0, "ignore_eos": True}
    body: dict[str, Any] = {**settings, "max_tokens": max_tokens, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}

    def answer(ids: Sequence[int]) -> Sequence[int]:
        with client.stream("POST", "/v1/completions", json={**body, "prompt": list(ids)}) as response:
            response.raise_for_status()
            received = b"".join(response.iter_raw())  # parsed afterwards: the client shares the service's cores
        events = [line.removeprefix(b"data: ") for line in received.split(b"\n") if line and b"[DONE]" not in line]
        return [0] * int(json.loads(events[-1])["usage"]["completion_tokens"])

    return answer


def through_http(inside: Contestant, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Scores]:
    """Plain decoding by an engine in this process and by the service, in turn."""
    from workers.measuring.contest import in_turn

    with service("draft_model=none", "prefix_cache=false") as url, httpx.Client(base_url=url, timeout=120) as client:
        return in_turn(
            {
                "engine": inside,
                "HTTP, streamed": http_contestant(client, max_tokens, stream=True),
                "HTTP, whole": http_contestant(client, max_tokens, stream=False),
            },
            prompts,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    options = command_line().parse_args(arguments)
    return as_command("bench", lambda: run(options))


def command_line() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m deployments.bench",
        description="Measures plain decoding, guessing and the way through HTTP.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add_prompts(parser, count=8, max_tokens=128)
    add("--rounds", type=at_least(1), default=20, metavar="N", help="of the forward passes by rows (default: 20)")
    add("--no-http", dest="http", action="store_false", help="leave out the service, which takes Ray's start and end")
    return parser


def run(options: argparse.Namespace) -> dict[str, Any]:
    from drafter.base import DraftLimits, NoDraft
    from verifier.default_model import default_model_path
    from verifier.verifier import Verifier
    from workers.measuring.bench import ROWS, contestants, milliseconds_by_rows
    from workers.measuring.contest import engine_contestant, in_turn
    from workers.text import Text

    folder = default_model_path(lambda line: print(line, file=sys.stderr))
    text = Text.load(folder)
    prompts = [
        text.chat_ids([{"role": "user", "content": prompt.text}])
        for prompt in read_prompts(options.prompts, options.count)
    ]
    verifier = Verifier.load(folder, num_pages=256, page_size=16)

    by_rows = milliseconds_by_rows(verifier, CONTEXT, options.rounds)
    print(f"\nA forward pass of the default model after {CONTEXT} tokens, exact mode\n")
    for rows in ROWS:
        print(f"  {rows:3d} rows {by_rows[rows]:7.1f} ms {by_rows[rows] / by_rows[1]:6.2f} times one row")

    scores = in_turn(contestants(folder, verifier, options.max_tokens), prompts)
    table(f"{len(prompts)} prompts, {options.max_tokens} greedy tokens each", scores, "plain")
    result = {
        "rows_8_over_1": by_rows[8] / by_rows[1],
        "plain_over_transformers": scores["plain"].over(scores["transformers fp32"]),
        "inexact_over_transformers": scores["plain, not exact"].over(scores["transformers fp32"]),
        "oracle_over_plain": scores["oracle"].over(scores["plain"]),
        "ngram_over_plain": scores["n-gram"].over(scores["plain"]),
        "answers_changed_by_speculation": scores["oracle"].differing(scores["plain"])
        + scores["n-gram"].differing(scores["plain"]),
    }
    if options.http:
        inside = engine_contestant(verifier, NoDraft(), DraftLimits(), options.max_tokens)
        http = through_http(inside, prompts, options.max_tokens)
        table("The same through HTTP, plain decoding", http, "engine")
        result["http_streamed_over_engine"] = http["HTTP, streamed"].over(http["engine"])
        result["http_whole_over_engine"] = http["HTTP, whole"].over(http["engine"])
    return {name: round(value, 3) for name, value in result.items()}


def table(title: str, scores: dict[str, Scores], base: str) -> None:
    print(f"\n{title}\n")
    for name, each in scores.items():
        print(f"  {name:20s} {each.median:7.1f} tokens/s {each.over(scores[base]):6.2f} times {base}")
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
