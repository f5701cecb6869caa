"""A training run's settings: defaults are written once, here, and read by the command line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from verifier.errors import BadSetting


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class TrainSettings:
    """What makes a run what it is; a resumed run must have the same. Rows are places where a guess is learnt."""

    method: str = _setting("eagle3", "what is trained")
    draft_vocab: int = _setting(
        8192, "how many tokens are guessed, the most frequent ones; EAGLE and small models guess all"
    )
    intermediate_size: int = _setting(0, "width of the head's MLP; 0 is the target's")
    model_layers: int = _setting(2, "layers of a small model")
    model_hidden: int = _setting(192, "width of a small model")
    ttt_steps: int = _setting(3, "how far an EAGLE-3 head is unrolled (training-time test); or how many Medusa heads")
    step_weight: float = _setting(0.8, "weight of a step in the loss, relative to the one before it")
    least_path: float = _setting(
        0.02, "rows go on to the next step while what was written is guessed with this probability; 0: all do"
    )
    init: str = _setting("target", "first weights: target (its last layer and its output rows) or random")
    start_from: str = _setting("", "the folder of an earlier run, whose best head these weights replace")
    optimizer: str = _setting("muon", "muon (and AdamW for what it cannot do) or adamw")
    lr: float = _setting(1e-3, "highest learning rate of AdamW")
    output_scale: float = _setting(
        1.0, "rates of rows over the vocabulary, relative to those; 0 keeps them as they began, which suits little data"
    )
    muon_lr: float = _setting(1e-2, "highest learning rate of Muon")
    weight_decay: float = _setting(0.0, "of both")
    clip: float = _setting(0.5, "longest gradient; 0 is any")
    warm_up: int = _setting(30, "optimizer steps until the highest rate")
    steps: int = _setting(3_000, "optimizer steps after which the rate has fallen, as a cosine, to a twentieth")
    batch_rows: int = _setting(1024, "rows to an optimizer step")
    micro_rows: int = _setting(512, "rows computed at once: what memory and caches hold")
    learn_from: str = _setting("answers", "answers, or all: questions too, for what the target would have said there")
    held_out: float = _setting(0.03, "share of the conversations that are held out")
    evaluate_every: int = _setting(50, "optimizer steps between evaluations on them")
    patience: int = _setting(0, "evaluations without progress after which the run ends; 0 is never")
    seed: int = _setting(0, "of first weights and data order")

    def __post_init__(self) -> None:
        sizes = ("draft_vocab", "model_layers", "model_hidden", "ttt_steps")
        for name in (*sizes, "steps", "batch_rows", "micro_rows", "evaluate_every"):
            if getattr(self, name) < 1:
                raise BadSetting(name, getattr(self, name), "1 or more")
        for name in ("intermediate_size", "weight_decay", "clip", "warm_up", "patience"):
            if not 0 <= getattr(self, name) < math.inf:
                raise BadSetting(name, getattr(self, name), "0 or more")
        for name in ("lr", "muon_lr", "step_weight"):
            if not 0 < getattr(self, name) <= 1:
                raise BadSetting(name, getattr(self, name), "above 0 and at most 1")
        if not 0 <= self.output_scale <= 1:
            raise BadSetting("output_scale", self.output_scale, "from 0 to 1")
        if self.init == "random" and not self.output_scale and not self.start_from:
            raise BadSetting("output_scale", self.output_scale, "above 0 where rows begin as random ones")
        for name in ("held_out", "least_path"):
            if not 0 <= getattr(self, name) < 1:
                raise BadSetting(name, getattr(self, name), "at least 0 and below 1")
        choices = {"init": ("target", "random"), "optimizer": ("muon", "adamw"), "learn_from": ("answers", "all")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise BadSetting(name, getattr(self, name), f"one of {', '.join(allowed)}")

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Self:
        """Those of a run that was saved, also by a version which had others besides."""
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in saved.items() if name in known})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def check_same(self, others: dict[str, Any]) -> None:
        """
        Raises:
            BadSetting: ``others``, of the run to be resumed, differ; names the first that does.
        """
        for each in fields(self):
            theirs = others.get(each.name, each.default)
            if (mine := getattr(self, each.name)) != theirs:
                raise BadSetting(each.name, mine, f"{theirs!r} to go on with this run")
