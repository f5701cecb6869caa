"""Methods by name."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from drafter.training.objectives import medusa
from drafter.training.objectives.base import Objective
from drafter.training.objectives.eagle3 import Eagle3Objective, initialise
from drafter.training.settings import TrainSettings
from drafter.training.target import Target
from verifier.config import ModelConfig
from verifier.errors import BadSetting

METHODS = ("eagle3", "medusa")


def create_objective(settings: TrainSettings, target: Target, num_taps: int, target_ids: Tensor) -> Objective:
    """With its first weights.

    Raises:
        BadSetting: there is no such method.
    """
    if settings.method not in METHODS:
        raise BadSetting("method", settings.method, f"one of {', '.join(METHODS)}")
    if settings.method == "medusa":
        heads = medusa.MedusaObjective(target, target_ids, settings.ttt_steps, settings.step_weight)
        medusa.initialise(heads, settings.init, settings.seed)
        return heads
    decoder = head_decoder(settings, target.config)
    objective = Eagle3Objective(
        target,
        decoder,
        num_taps,
        target_ids,
        num_steps=settings.ttt_steps,
        step_weight=settings.step_weight,
        least_path=settings.least_path,
    )
    initialise(objective, target, settings.init, settings.seed)
    return objective


def head_decoder(settings: TrainSettings, target: ModelConfig) -> ModelConfig:
    """One layer of the target's own shape, as a decoder of its own; its positions are turned without any scaling."""
    return replace(
        target,
        architecture="llama",
        rope_scaling=None,
        num_layers=1,
        intermediate_size=settings.intermediate_size or target.intermediate_size,
        tie_word_embeddings=False,
        attention_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        layer_windows=(None,),
    )
