"""What a drafter's guesses are worth on a model: a step of the training tool.

    python -m drafter.training evaluate --draft-model FOLDER [--prompts FILE] [--count 60] [--temperature 0 1]

Answers come from the real engine, one at a time, so that every tree has the rows that it wants. For a head that fuses
layers it also finds out whether their ids are off by one.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence, Set
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafter.base import Drafter, DraftLimits
from drafter.command_line import OneLineParser
from drafter.factory import plan_drafter
from drafter.options import DraftOptions
from verifier.weights import Checkpoint
from workers.build import locate_model, openmp_environment
from workers.flags import add_draft_options, add_tree_limits, draft_options, max_nodes, valid_temperature
from workers.generate import report
from workers.measuring.command import add_prompts
from workers.measuring.prompts import read_prompts
from workers.text import Text

if TYPE_CHECKING:
    from verifier.verifier import Verifier
    from workers.measuring.contest import Asked


def main(argv: Sequence[str]) -> None:
    """
    Raises:
        DraftreeError: a setting, the model, the drafter or the prompts are not what they should be; in one sentence.
    """
    options = command_line().parse_args(argv)
    os.environ.update(openmp_environment())  # takes effect if torch is not imported yet
    print(f"\n{json.dumps(run(options))}")


def run(options: argparse.Namespace) -> dict[str, Any]:
    path = locate_model(options.model, report)
    drafting = draft_options(options)
    plan = plan_drafter(options.draft_model, Checkpoint.open(path).config, drafting, path)
    prompts = read_prompts(options.prompts, options.count)

    from workers.measuring.contest import ask, beside, engine_of, load_verifier
    from workers.measuring.tally import show, tally_answers, total

    asked = ask(Text.load(path), prompts)
    verifier = load_verifier(path, asked, options.max_tokens, [plan])
    apart = beside(verifier)
    drafter = plan.create(apart)
    limits = DraftLimits(options.max_draft, options.draft_top_k, max_nodes(options))
    engine, known = engine_of(apart, drafter, limits), draft_vocabulary(drafter)
    figures: dict[str, Any] = {
        "model": verifier.config.name,
        "draft_model": plan.name,
        "limits": astuple(limits),
        "max_tokens": options.max_tokens,
    }
    for temperature in options.temperature:
        name = f"temperature {temperature:g}"
        tallies = tally_answers(engine, asked, temperature, options.max_tokens, known)
        print(f"\n{show(tallies, limits.max_draft, name)}", flush=True)
        by_category = {category: tally.figures() for category, tally in tallies.items()}
        figures[name] = total(tallies).figures() | {"by_category": by_category}
    figures["drafter_failures"] = engine.stats().drafter_failures
    if options.check_layers:
        figures["first_guess_by_layer_ids"] = check_layers(plan.name, drafter, drafting, verifier, asked)
    return figures


def check_layers(
    name: str, drafter: Drafter, options: DraftOptions, verifier: Verifier, asked: Sequence[Asked]
) -> dict[str, dict[str, float]]:
    """Says whether a head's layer ids are off by one; nothing for a drafter that fuses no layers."""
    from workers.measuring.layer_check import diagnosis, fused_layers, measure_shifts

    def create(layer_ids: Sequence[int], apart: Verifier) -> Drafter:
        shifted = replace(options, layer_ids=tuple(layer_ids))
        return plan_drafter(name, verifier.config, shifted).create(apart)

    layer_ids = fused_layers(drafter)
    if not layer_ids:
        return {}
    found = measure_shifts(layer_ids, create, verifier, asked)
    print(f"\n{diagnosis(Path(name).name, found)}", flush=True)
    return {
        ",".join(map(str, ids)): {"right": round(guess.rate, 3), "probability": round(guess.chance, 3)}
        for ids, guess in found.items()
    }


def draft_vocabulary(drafter: Drafter) -> Set[int] | None:
    """The target ids that a drafter's network can guess; None for drafters without one."""
    from drafter.network_draft import NetworkDraft

    return frozenset(drafter.network.target_ids.tolist()) if isinstance(drafter, NetworkDraft) else None


def command_line() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m drafter.training evaluate",
        description="Measures what a drafter's guesses are worth on a model, through the real engine.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--draft-model", required=True, metavar="D", help="who guesses: the folder of a draft model, or ngram")
    add("--model", default="", metavar="M", help="folder, GGUF file or hub id (default: the embedded model)")
    add_prompts(parser, max_tokens=128)
    add("--temperature", type=valid_temperature, nargs="+", default=[0.0], metavar="T", help="one or more (default: 0)")
    add(
        "--check-layers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="find out whether layer ids are off by one",
    )
    add_tree_limits(parser, branching="--draft-top-k", least_depth=1)
    add_draft_options(parser)
    return parser
