"""``python -m drafter.training export``: writes a run's best head for whoever shall load it.

    python -m drafter.training export --run RUN --out HEAD
    python -m drafter.training export --run RUN --out HEAD-vllm --layout speculators

Beside the weights stands a model card that says what they were made of and how good they are.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from drafter.command_line import OneLineParser
from drafter.training import eagle3_layouts, eagle_layouts, medusa_layouts
from drafter.training.card import write_card
from drafter.training.runs import RunFolder
from drafter.training.shards import ShardFolder
from drafter.training.target import Target, locate
from drafter.training.trained import Trained
from verifier.errors import BadSetting

# By method; the first layout is Draftree's own, and the default.
LAYOUTS: Mapping[str, Mapping[str, Callable[[Path, Trained], None]]] = {
    "eagle3": {
        "draftree": eagle3_layouts.save_draftree,
        "safeailab": eagle3_layouts.save_safeailab,
        "speculators": eagle3_layouts.save_speculators,
    },
    "eagle": {"draftree": eagle_layouts.save_draftree, "safeailab": eagle_layouts.save_safeailab},
    "model": {"draftree": eagle_layouts.save_small_model},
    "medusa": {"draftree": medusa_layouts.save_vllm, "medusa-1": medusa_layouts.save_medusa_1},
}


def main(arguments: Sequence[str]) -> None:
    """
    Raises:
        DraftreeError: there is no such run or layout, or the two do not go together; in one sentence.
    """
    options = command_line().parse_args(arguments)
    run = RunFolder(options.run)
    head = Trained.load(run, Target.open(locate(options.model)))
    layouts = LAYOUTS[head.settings.method]
    if options.layout not in layouts:
        raise BadSetting("layout", options.layout, f"one of {', '.join(layouts)}")
    data = ShardFolder(options.data, run.load()["progress"]["shards"]) if options.data else None
    layouts[options.layout](options.out, head)
    write_card(options.out, head, data, options.layout)


def _by_method() -> str:
    return "; ".join(f"{method}: {', '.join(layouts)}" for method, layouts in LAYOUTS.items())


def command_line() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m drafter.training export",
        description="Writes a run's best head for whoever shall load it, with a model card.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--run", type=Path, required=True, metavar="F", help="the run's folder")
    add("--out", type=Path, required=True, metavar="F", help="the head's folder")
    add("--layout", default="draftree", metavar="S", help=f"{_by_method()} (%(default)s)")
    add("--data", type=Path, metavar="F", help="the folder of shards that it was trained on, for the model card")
    add("--model", default="", metavar="M", help="the target: a folder, a GGUF file or a hub id (the default model)")
    return parser
