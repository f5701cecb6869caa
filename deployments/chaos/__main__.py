"""Breaks a small cluster again and again while requests run, and says which promises it kept.

    python -m deployments.chaos [--seconds 300] [--kinds "kill verifier" …] [--seed 0]

Three nodes on this machine serve a tiny random model, made for the occasion, with two verifiers of two ranks each and a
drafter of their own. Whenever all of it is there, a fault comes. A table, then one line of JSON; the exit status is 1
when a promise was broken.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import partial
from itertools import count
from pathlib import Path
from random import Random

from deployments.chaos.faults import FAULTS, schedule
from deployments.chaos.gap import gap
from deployments.chaos.health import HealthWatch
from deployments.chaos.load import Load, questions
from deployments.chaos.site import Site, three_nodes, waited
from deployments.chaos.verdict import Event, Verdict
from deployments.settings import Settings
from drafter.command_line import OneLineParser
from workers.flags import at_least
from workers.measuring.tiny import make_tiny_head, make_tiny_model

UP_S, WHOLE_S = 600.0, 300.0  # for the service to come up, and to come back
REPLAYS = "draftree_replays_total"
STREAMS_S = 60.0  # for streams to be under way before a fault
QUESTIONS = 8


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line().parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        verdict = run(options, Path(folder))
        print(f"\n{verdict.report()}\n", flush=True)
        print(json.dumps(verdict.data()))
    return 1 if verdict.broken else 0


def command_line() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m deployments.chaos", description=__doc__.split("\n", 1)[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("--seconds", type=float, default=300.0, help="at least; until each fault has come often enough (%(default)s)")
    add("--least", type=at_least(1), default=2, help="times that each kind of fault comes (default: %(default)s)")
    add("--kinds", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="K", help=f"of {', '.join(FAULTS)} (all)")
    add("--clients", type=at_least(1), default=4, help="that ask at the same time (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the order of faults and questions (default: %(default)s)")
    return parser


def run(options: argparse.Namespace, folder: Path) -> Verdict:
    model = make_tiny_model(folder / "tiny", num_heads=4, num_kv_heads=2)
    head = make_tiny_head(folder / "head", model)
    settings = Settings(
        model=str(model),
        draft_model=f"ngram+{head}",
        drafter_placement="remote",
        adaptive=False,
        max_draft=3,
        max_nodes=5,
        page_size=8,
        threads=2,
        tensor_parallel=2,
        verifier_replicas=2,
        max_running=4,
    )
    asked = questions(QUESTIONS)
    with redirect_stdout(sys.stderr), three_nodes(settings) as site:  # Ray prints what it misses
        load = Load(site.url, model.name, asked)
        say("Starting three nodes and the service …")
        if not waited(lambda: not load.ask(asked[0]).problem and site.is_full(), UP_S):
            raise SystemExit("chaos: the service did not come up")
        truth = {question.number: load.ask(question) for question in asked}
        if problems := [answer.problem for answer in truth.values() if answer.problem]:
            raise SystemExit(f"chaos: without any fault, a request failed: {problems[0]}")
        say("Breaking it …")
        watch = HealthWatch(site.url, site.able, site.look)
        load.start(options.clients, options.seed)
        events = strike(site, load, options)
        load.stop()
        watch.stop()
        leftovers = site.leftovers()
    texts = {number: answer.text for number, answer in truth.items()}
    return Verdict(
        texts, load.answers, events, options.kinds, options.least, watch.statements, leftovers, partial(gap, model)
    )


def strike(site: Site, load: Load, options: argparse.Namespace) -> list[Event]:
    """Fault after fault, each when the service has its full capacity and streams are under way."""
    random, began = Random(options.seed), time.monotonic()
    events: list[Event] = []
    kinds = schedule(options.kinds, random)
    for number in count():
        if number >= options.least * len(options.kinds) and time.monotonic() - began > options.seconds:
            break
        load.await_streams(options.clients // 2, STREAMS_S)
        kind, struck_at, replays = next(kinds), time.monotonic(), site.metric(REPLAYS)
        blow = FAULTS[kind](site, random)
        whole = site.await_full(blow.gone, WHOLE_S)
        at_s, whole_s = struck_at - began, time.monotonic() - struck_at if whole else None
        blow.afterwards()
        after = site.metric(REPLAYS)  # of another ingress, perhaps, which begins at 0
        events.append(Event(kind, blow.target, at_s, whole_s, int(after - replays if after >= replays else after)))
        say(
            f"{at_s:5.0f} s  {kind} ({blow.target}): " + ("lost" if whole_s is None else f"whole after {whole_s:.1f} s")
        )
        if not whole or not site.await_full(frozenset(), WHOLE_S):
            break
    return events


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
