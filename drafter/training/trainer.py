"""The training loop: batches in a fixed order, steps of the optimizer, evaluations, checkpoints.

Knows no method: an `Objective` says how wrong it is. Each epoch begins by looking what data there is, so that a run can
learn while more is being collected. A run that was killed goes on from its last checkpoint as if nothing had happened.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from drafter.training.corpus import Batch, Corpus, Item, by_length
from drafter.training.objectives.base import Objective, Outcome, acceptance, mean_length
from drafter.training.optimizers import create_optimizer
from drafter.training.ranks import Ranks
from drafter.training.report import Report
from drafter.training.runs import RunFolder
from drafter.training.settings import TrainSettings
from drafter.training.shards import ShardFolder
from verifier.errors import BadSetting, DraftreeError

LOWEST_RATE = 0.05  # of the highest, at the end


@dataclass
class Progress:
    """How far a run is."""

    step: int = 0
    epoch: int = 0
    batch: int = 0  # of the epoch
    rows: int = 0
    seconds: float = 0.0  # of training, evaluations included
    shards: list[str] = field(default_factory=list)  # the epoch's
    first_shards: list[str] = field(default_factory=list)  # what is held out comes from these alone, and never changes
    best_loss: float = math.inf
    stale: int = 0  # evaluations since the best one


class Trainer:
    """
    Args:
        header: what every checkpoint says besides weights, for whoever exports them.
    """

    def __init__(
        self,
        objective: Objective,
        settings: TrainSettings,
        data: Path,
        run: RunFolder,
        report: Report,
        *,
        device: torch.device,
        ranks: Ranks,
        checkpoint_s: float,
        header: Mapping[str, Any],
    ) -> None:
        self.objective, self.settings, self.progress = objective, settings, Progress()
        self._data, self._run, self._report, self._device, self._ranks = data, run, report, device, ranks
        self._checkpoint_s, self._header = checkpoint_s, header
        self._optimizer = create_optimizer(objective, settings)
        self._parameters = [each for each in objective.parameters() if each.requires_grad]
        self._held_out: Sequence[Item] = ()
        self._saved_at = time.monotonic()

    def resume(self, checkpoint: Mapping[str, Any]) -> None:
        self.objective.load_state_dict(checkpoint["weights"])
        self._optimizer.load_state_dict(checkpoint["optimizer"])
        self.progress = Progress(**checkpoint["progress"])

    def train(self) -> None:
        """Until all steps are made or patience is at its end.

        Raises:
            BadSetting: so much is held out that nothing is left to train on, or so little that nothing is.
            CheckpointError: shards that the run was trained on are gone.
            DraftreeError: it has diverged, or cannot be saved.
        """
        progress = self.progress
        if not progress.first_shards:
            progress.first_shards = [shard.path.name for shard in ShardFolder(self._data).shards]
        first = ShardFolder(self._data, progress.first_shards)
        corpus = self._corpus(first)
        if not corpus.held_out or not corpus.trained:  # the best head is the one that does best on what is held out
            sizes = f"{len(corpus.trained)} conversations to train on and {len(corpus.held_out)} to hold out"
            raise BadSetting("held_out", self.settings.held_out, f"a share that leaves some of both: there are {sizes}")
        self._held_out = corpus.held_out
        while not self.is_finished:
            self._train_epoch()
        self.save()

    @property
    def is_finished(self) -> bool:
        patience = self.settings.patience
        return self.progress.step >= self.settings.steps or 0 < patience <= self.progress.stale

    def _train_epoch(self) -> None:
        settings, progress = self.settings, self.progress
        if progress.batch == 0:
            progress.shards = [shard.path.name for shard in ShardFolder(self._data).shards]
        folder = ShardFolder(self._data, progress.shards)
        corpus = self._corpus(folder)
        batches = corpus.batches(settings.seed, progress.epoch, settings.batch_rows, settings.micro_rows)
        self._report.epoch(progress.epoch, folder, corpus, len(batches))
        for batch in batches[progress.batch :]:
            began = time.monotonic()
            figures = self._step(batch)
            progress.batch += 1
            self._report.step(progress.step, progress.rows, figures)
            if progress.step % settings.evaluate_every == 0:
                self._evaluate()
            progress.seconds += time.monotonic() - began
            if time.monotonic() - self._saved_at > self._checkpoint_s:
                self.save()
            if self.is_finished:
                return
        progress.epoch, progress.batch = progress.epoch + 1, 0

    def _corpus(self, folder: ShardFolder) -> Corpus:
        settings = self.settings
        return Corpus.of(folder, self.objective, settings.held_out, whole=settings.learn_from == "all")

    def _step(self, batch: Batch) -> Tensor:
        """One step of the optimizer; returns the batch's figures."""
        num_rows = sum(item.num_rows for micro in batch for item in micro)
        figures = torch.zeros(self.objective.num_steps, 4, device=self._device)
        for micro in batch[self._ranks.index :: self._ranks.size]:
            outcome = self._compute(micro)
            (outcome.loss / num_rows).backward()
            figures += outcome.figures
        for each in self._parameters:  # a rank without a micro-batch takes part in the sum
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad
        self._ranks.sum([figures, *(each.grad for each in self._parameters)])
        if self.settings.clip:
            clip_grad_norm_(self._parameters, self.settings.clip)
        self._optimizer.step(rate(self.progress.step, self.settings))
        self.progress.step += 1
        self.progress.rows += num_rows
        return figures.cpu()

    def _compute(self, items: Sequence[Item]) -> Outcome:
        batch = self.objective.collate([item.load() for item in items], self._device)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            outcome: Outcome = self.objective(batch)
        return outcome

    @torch.no_grad()
    def measure(self, items: Sequence[Item]) -> dict[str, Tensor]:
        """Figures by kind of conversation."""
        kinds = sorted({item.kind for item in items})
        figures = torch.zeros(len(kinds), self.objective.num_steps, 4, device=self._device)
        for index, kind in enumerate(kinds):
            batches = by_length([item for item in items if item.kind == kind], self.settings.micro_rows)
            for micro in batches[self._ranks.index :: self._ranks.size]:
                figures[index] += self._compute(micro).figures
        self._ranks.sum([figures])
        return dict(zip(kinds, figures.cpu(), strict=True))

    def _evaluate(self) -> None:
        """On what is held out; the head is kept if it is the best so far."""
        by_kind = self.measure(self._held_out)
        total = torch.stack(list(by_kind.values())).sum(0)
        loss = mean_loss(total, self.settings.step_weight)
        progress = self.progress
        if not math.isfinite(loss):
            raise DraftreeError(f"The loss is {loss} after {progress.step} steps: lower lr and muon_lr, or clip more.")
        is_best = loss < progress.best_loss
        progress.best_loss, progress.stale = (loss, 0) if is_best else (progress.best_loss, progress.stale + 1)
        line = {
            **{name: value for name, value in asdict(progress).items() if not isinstance(value, list)},
            "loss": loss,
            "acceptance": acceptance(total),
            "mean_length": mean_length(total),
            "first_by_kind": {kind: acceptance(figures)[0] for kind, figures in by_kind.items()},
        }
        self._report.evaluation(line)
        if self._ranks.is_first:
            self._run.log(line)
            if is_best:
                self._run.save(self._content() | {"figures": line}, best=True)

    def save(self) -> None:
        self._saved_at = time.monotonic()
        if self._ranks.is_first:
            optimizer = self._optimizer.state_dict()
            self._run.save(self._content() | {"optimizer": optimizer, "progress": asdict(self.progress)})

    def _content(self) -> dict[str, Any]:
        weights = {name: tensor.cpu() for name, tensor in self.objective.state_dict().items()}
        return {**self._header, "weights": weights}


def rate(step: int, settings: TrainSettings) -> float:
    """Learning rate at a step, in units of the highest."""
    if step < settings.warm_up:
        return (step + 1) / settings.warm_up
    done = (step - settings.warm_up) / max(settings.steps - settings.warm_up, 1)
    return LOWEST_RATE + (1 - LOWEST_RATE) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def mean_loss(figures: Tensor, step_weight: float) -> float:
    """What the trainer minimises: losses of all steps, weighted, for each row of the first."""
    weights = step_weight ** torch.arange(len(figures))
    return float((figures[:, 0] * weights).sum() / figures[0, 1].clamp(min=1))
