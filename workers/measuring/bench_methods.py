"""Every method of guessing on the same prompts: a table, a picture, and one line of JSON.

    python -m workers.measuring.bench_methods [--heads FOLDER] [--prompts FILE] [--count 48] [--max-tokens 128] …

What is finished stays in the folder: the same command goes on after an interruption, and with methods that were built
since. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drafter.command_line import OneLineParser
from verifier.errors import BadSetting
from verifier.weights import Checkpoint
from workers.build import locate_model
from workers.flags import valid_temperature
from workers.generate import report
from workers.machine import weight_bytes
from workers.measuring.command import add_prompts, as_command
from workers.measuring.methods import METHODS, enter
from workers.measuring.prompts import read_prompts
from workers.text import Text


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    options = command_line().parse_args(arguments)
    return as_command("bench_methods", lambda: run(options))


def run(options: argparse.Namespace) -> dict[str, Any]:
    from workers.measuring.comparison import Comparison, conditions
    from workers.measuring.contest import ask, load_verifier
    from workers.measuring.methods_report import as_data, make_rows, problems, show
    from workers.measuring.picture import draw
    from workers.measuring.rounds import RoundsFile

    path = locate_model(options.model, report)
    model = Checkpoint.open(path).config
    asked = ask(Text.load(path), read_prompts(options.prompts, options.count))
    methods = [method for method in METHODS if method.name.startswith(tuple(options.only))]
    if not methods:
        names = ", ".join(method.name for method in METHODS)
        raise BadSetting("only", " ".join(options.only), f"beginnings of names of methods, which are {names}")
    entries = [enter(method, options.heads, model, path) for method in methods]
    verifier = load_verifier(path, asked, options.max_tokens, [entry.plan for entry in entries if entry.plan])
    file = RoundsFile(options.out / "rounds.jsonl", conditions(verifier, options.max_tokens))
    comparison = Comparison.load(entries, verifier, options.max_tokens)
    try:
        comparison.run(asked, options.temperature, file, report)
    except KeyboardInterrupt:
        report("Interrupted; the same command goes on from here.")
    rows = make_rows(comparison.entries, file.rounds, options.temperature)
    target_bytes = weight_bytes(model)
    for text in (show(rows, target_bytes), problems(comparison.entries, rows)):
        print(f"\n{text}")
    print()
    draw(rows, options.out / "methods.png")
    return {"model": model.name, "max_tokens": options.max_tokens, "methods": as_data(rows, target_bytes)}


def command_line() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m workers.measuring.bench_methods",
        description="Compares all methods of guessing on the same prompts.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", default="", metavar="M", help="folder, GGUF file or hub id (default: the embedded model)")
    add("--heads", type=Path, default=Path("heads"), metavar="F", help="with small, medusa, eagle, eagle3 (heads)")
    add_prompts(parser, max_tokens=128)
    add(
        "--temperature",
        type=valid_temperature,
        nargs="+",
        default=[0.0, 1.0],
        metavar="T",
        help="one or more (default: 0 1)",
    )
    add("--only", nargs="+", default=[""], metavar="NAME", help="methods whose names begin like this (default: all)")
    add("--out", type=Path, default=Path("build/methods"), metavar="F", help="for rounds and picture (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
