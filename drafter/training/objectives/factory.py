"""Methods by name."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from drafter.training.objectives import eagle, medusa, small_model
from drafter.training.objectives.base import Objective
from drafter.training.objectives.eagle3 import Eagle3Objective, initialise
from drafter.training.settings import TrainSettings
from drafter.training.target import Target
from verifier.config import ModelConfig
from verifier.errors import BadSetting

METHODS = ("eagle3", "eagle", "medusa", "model")


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
    if settings.method == "model":
        config = small_model_config(settings, target.config)
        model = small_model.SmallModelObjective(target, config, target_ids, settings.ttt_steps)
        small_model.initialise(model, target, settings.init, settings.seed)
        return model
    decoder = head_decoder(settings, target.config)
    if settings.method == "eagle":
        head = eagle.EagleObjective(target, decoder, target_ids, settings.seed)
        eagle.initialise(head, target, settings.init, settings.seed)
        return head
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


def small_model_config(settings: TrainSettings, target: ModelConfig) -> ModelConfig:
    """A small model with the target's vocabulary, positions and size of heads.

    Raises:
        BadSetting: its width is no multiple of that size.
    """
    width, head_dim = settings.model_hidden, target.head_dim
    if width % head_dim:
        raise BadSetting("model_hidden", width, f"a multiple of {head_dim}, the size of the target's heads")
    return replace(
        head_decoder(settings, target),
        hidden_size=width,
        intermediate_size=settings.intermediate_size or 8 * (width // 3),
        num_layers=settings.model_layers,
        num_heads=width // head_dim,
        num_kv_heads=width // head_dim,
        tie_word_embeddings=True,
        layer_windows=(None,) * settings.model_layers,
    )
