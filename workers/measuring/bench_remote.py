"""What it costs to let the draft network run in a process of its own: a table, and one line of JSON.

    python -m workers.measuring.bench_remote [--draft-model D …] [--at-a-time 1 2 4 8] [--rounds 5] …

Both ends are those of the service, and so is the wire, encryption included. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafter.base import DraftLimits
from drafter.command_line import OneLineParser
from drafter.factory import plan_drafter
from drafter.options import DraftOptions
from verifier.weights import Checkpoint
from workers.build import EngineSpec, locate_model
from workers.flags import add_tree_limits, at_least, max_nodes
from workers.generate import report
from workers.machine import physical_cores
from workers.measuring.command import add_prompts, as_command
from workers.measuring.prompts import read_prompts
from workers.remote.placement import Elsewhere, plan_remote
from workers.text import Text

if TYPE_CHECKING:
    from verifier.verifier import Verifier
    from workers.measuring.contest import Asked
    from workers.measuring.placements import Match

DRAFT_MODELS = ["eagle3", "ngram+eagle3"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    options = command_line().parse_args(arguments)
    return as_command("bench_remote", lambda: run(options))


def run(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from workers.measuring.contest import ask, load_verifier
    from workers.measuring.placements import show

    torch.set_num_threads(options.threads)
    path = locate_model(options.model, report)
    model = Checkpoint.open(path).config
    asked = ask(Text.load(path), read_prompts(options.prompts, options.count))
    plans = [plan_drafter(name, model, model=path) for name in options.draft_model]
    verifier = load_verifier(path, asked, options.max_tokens, plans, max(options.at_a_time))
    matches = [match for name in options.draft_model for match in measure(name, path, verifier, asked, options)]
    print(f"\n{show(matches)}\n", flush=True)
    return {
        "model": model.name,
        "max_tokens": options.max_tokens,
        "adaptive": options.adaptive,
        "threads": options.threads,
        "drafter_threads": options.drafter_threads,
        "matches": [match.data for match in matches],
    }


def measure(
    name: str, path: Path, verifier: Verifier, asked: Sequence[Asked], options: argparse.Namespace
) -> list[Match]:
    """One draft model with each number of requests at a time."""
    from workers.measuring.apart import DrafterJob, DraftProcess
    from workers.measuring.contest import beside, engine_of
    from workers.measuring.placements import LOCAL, REMOTE, Place, play
    from workers.remote.channel import Keys

    limits = DraftLimits(options.max_draft, options.draft_top_k, max_nodes(options))
    pool, keys, nothing = verifier.pool, Keys.generate(), DraftOptions()
    here, there = beside(verifier), beside(verifier)
    job = DrafterJob(name, path, pool.num_pages, pool.page_size, options.drafter_threads, keys.public)
    with DraftProcess(job, keys) as process:
        elsewhere = Elsewhere(process)
        local = plan_drafter(name, verifier.config, model=path).create(here)
        remote = plan_remote(name, path, nothing, EngineSpec.draft_deadline_s, elsewhere).create(there)
        places = {
            LOCAL: Place(engine_of(here, local, limits, adaptive=options.adaptive)),
            REMOTE: Place(
                engine_of(there, remote, limits, adaptive=options.adaptive, max_lanes=1 + options.adaptive),
                elsewhere.figures,
            ),
        }
        places[REMOTE].await_drafter(asked[0])
        matches = []
        for at_a_time in options.at_a_time:
            matches.append(play(name, places, asked, at_a_time, options.rounds, options.max_tokens))
            report(f"{name}, {at_a_time} at a time: remote makes {matches[-1].ratio:.2f} of local's tokens/s")
        return matches


def command_line() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m workers.measuring.bench_remote",
        description="Compares a draft network in the verifier's process with the same in a process of its own.",
        allow_abbrev=False,
    )
    add, cores = parser.add_argument, physical_cores()
    add("--model", default="", metavar="M", help="folder, GGUF file or hub id (default: the embedded model)")
    add("--draft-model", nargs="+", default=DRAFT_MODELS, metavar="D", help=f"(default: {' '.join(DRAFT_MODELS)})")
    add("--at-a-time", type=at_least(1, 64), nargs="+", default=[1, 2, 4, 8], metavar="N", help="requests (1 2 4 8)")
    add("--rounds", type=at_least(1), default=5, metavar="N", help="of each (default: %(default)s)")
    add_prompts(parser, max_tokens=64)
    add("--threads", type=at_least(1), default=cores, metavar="N", help="of the verifier (default: %(default)s)")
    add("--drafter-threads", type=at_least(1), default=1, metavar="N", help="of a remote drafter (default: 1)")
    add(
        "--adaptive",
        action=argparse.BooleanOptionalAction,
        default=EngineSpec.adaptive,
        help="guess only as far as it pays",
    )
    add_tree_limits(parser, branching="--draft-top-k", least_depth=1)
    return parser


if __name__ == "__main__":
    sys.exit(main())
