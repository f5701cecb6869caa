"""``python -m drafter.training train``: trains a draft head on collected conversations.

    python -m drafter.training train --data DATA --run RUN
    torchrun --nproc-per-node 4 -m -- drafter.training train --data DATA --run RUN --device cuda

The same command goes on with a run that was interrupted. Shards that are collected meanwhile join at the next epoch.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from drafter.command_line import OneLineParser
from drafter.training.objectives.factory import create_objective
from drafter.training.ranks import Ranks
from drafter.training.report import Report
from drafter.training.runs import RunFolder
from drafter.training.settings import TrainSettings
from drafter.training.shards import ShardFolder
from drafter.training.target import Target, locate
from drafter.training.trained import Trained
from drafter.training.trainer import Trainer
from drafter.training.vocabulary import most_frequent
from verifier.errors import BadSetting

DEVICES = ("cpu", "cuda")


def main(arguments: Sequence[str]) -> None:
    """
    Raises:
        DraftreeError: a setting, the model or the data cannot work; in one sentence.
    """
    options = command_line().parse_args(arguments)
    settings = TrainSettings(**{each.name: getattr(options, each.name) for each in fields(TrainSettings)})
    if not 0 <= options.checkpoint_minutes < math.inf:
        raise BadSetting("checkpoint_minutes", options.checkpoint_minutes, "0 or more")
    device = _device(options.device)
    ranks = Ranks.join(device)
    try:
        with Report(settings.steps, silent=not ranks.is_first) as report:
            prepare(options, settings, report, device, ranks).train()
    finally:
        ranks.leave()


def prepare(
    options: argparse.Namespace, settings: TrainSettings, report: Report, device: torch.device, ranks: Ranks
) -> Trainer:
    """A trainer for a new run, or for the one that the folder holds."""
    folder = ShardFolder(options.data)
    target = Target.open(locate(options.model, report.say))
    folder.check_model(target.checkpoint.fingerprint, target.config.name)
    run = RunFolder(options.run)
    saved = None if run.is_new else run.load()
    if saved is None:
        target_ids = most_frequent(folder.shards, settings.draft_vocab, target.config.vocab_size)
    else:
        settings.check_same(saved["settings"])
        target_ids = saved["target_ids"]
    layer_ids = folder.header.layer_ids
    objective = create_objective(settings, target, len(layer_ids), target_ids)
    if settings.start_from and saved is None:
        earlier = Trained.load(RunFolder(Path(settings.start_from)), target)
        objective.adopt(earlier.weights, earlier.target_ids)
    objective.to(device)
    header = {
        "settings": settings.to_dict(),
        "target_ids": target_ids,
        "model": target.config.name,
        "fingerprint": target.checkpoint.fingerprint,
        "layer_ids": list(layer_ids),
    }
    trainer = Trainer(
        objective,
        settings,
        options.data,
        run,
        report,
        device=device,
        ranks=ranks,
        checkpoint_s=60 * options.checkpoint_minutes,
        header=header,
    )
    if saved is not None:
        trainer.resume(saved)
        report.say(f"Going on with {run.path} at step {trainer.progress.step}.")
    else:
        size = sum(each.numel() for each in objective.parameters())
        report.say(f"A new run in {run.path}: {size / 1e6:.1f} million parameters.")
        if ranks.is_first:
            run.begin(settings.to_dict())
    return trainer


def _device(name: str) -> torch.device:
    if name == "cuda":
        if not torch.cuda.is_available():
            raise BadSetting("device", name, "cpu: this torch sees no GPU")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device(name)


def command_line() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m drafter.training train",
        description="Trains a draft head on collected conversations. The same command goes on where a run was stopped.",
        epilog="On several GPUs: torchrun --nproc-per-node N -m -- drafter.training train … --device cuda",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="F", help="the folder of shards")
    add("--run", type=Path, required=True, metavar="F", help="the run's folder, new or to go on with")
    add("--model", default="", metavar="M", help="the target: a folder, a GGUF file or a hub id (the default model)")
    add("--device", default="cpu", choices=DEVICES, help="what it is trained on (%(default)s)")
    add("--checkpoint-minutes", type=float, default=5.0, metavar="X", help="between checkpoints (%(default)s)")
    for each in fields(TrainSettings):
        default: Any = each.default
        text = f"{each.metadata['help']} ({default if default != '' else 'none'})"
        metavar = {int: "N", float: "X", str: "S"}[type(default)]
        add(f"--{each.name.replace('_', '-')}", type=type(default), default=default, metavar=metavar, help=text)
    return parser
