"""Whether settings and a model fit together and into this machine, asked before Ray starts and without torch.

Reads a model's configuration, its tokenizer and the headers of its weights, never a weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from deployments.settings import Settings
from drafter.base import DraftLimits
from drafter.factory import DraftPlan, check_name, plan_drafter
from drafter.options import DraftOptions, parse_layer_ids
from verifier.config import ModelConfig
from verifier.device import DeviceName
from verifier.errors import BadSetting
from verifier.weights import Checkpoint
from workers.build import EngineSpec, Reporter, locate_model
from workers.config import EngineConfig
from workers.machine import physical_cores
from workers.remote.placement import plan_remote
from workers.text import Text


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model, and the engine's sizes that settings and model give together."""

    name: str  # what clients call it
    config: ModelConfig
    text: Text
    engine: EngineConfig
    drafter: DraftPlan


def served_model(settings: Settings, report: Reporter = lambda line: None) -> ServedModel:
    """Finds the model (fetching the default one if need be) and works out what is left to work out.

    Raises:
        DraftreeError: there is no such model, or a setting does not fit it; one sentence.
    """
    check_device(settings)
    check_drafters(settings)
    check_name(settings.draft_model)
    path = locate_model(settings.model, report)
    config = Checkpoint.open(path).config
    spec = engine_spec(settings)
    plan = (
        plan_remote(spec.draft_model, path, spec.draft_options, spec.draft_deadline_s)
        if settings.drafter_placement == "remote"
        else plan_drafter(spec.draft_model, config, spec.draft_options, path)
    )
    longest = spec.engine_config(config).max_model_len
    if 0 < settings.kv_cache_tokens < longest:
        why = f"at least {longest}, or one request of max_model_len could not run"
        raise BadSetting("kv_cache_tokens", settings.kv_cache_tokens, why)
    # A folder is called by its own name, a hub id is a name already.
    own_name = config.name if not settings.model or Path(settings.model).exists() else settings.model
    return ServedModel(
        settings.served_model_name or own_name, config, Text.load(path), spec.engine_config(config), plan
    )


def engine_spec(settings: Settings) -> EngineSpec:
    """The settings as the engine's builder takes them.

    Raises:
        BadSetting: options for drafting that make no sense, alone or together.
    """
    return EngineSpec(
        model=settings.model,
        draft_model=settings.draft_model,
        draft_options=DraftOptions(
            growth=settings.draft_growth,
            threshold=settings.draft_threshold,
            decay=settings.draft_decay,
            noise_ranking=settings.draft_noise_ranking,
            layer_ids=parse_layer_ids(settings.draft_layer_ids),
        ),
        draft_deadline_s=settings.draft_deadline_ms / 1000,
        limits=DraftLimits(settings.max_draft, settings.draft_top_k, settings.max_nodes),
        page_size=settings.page_size,
        num_pages=math.ceil(settings.kv_cache_tokens / settings.page_size),
        max_model_len=settings.max_model_len,
        max_running=settings.max_running,
        max_rows=settings.max_rows,
        prefix_cache=settings.prefix_cache,
        exact=settings.exact,
        tensor_parallel=settings.tensor_parallel,
        device=device_of(settings, settings.verifier_num_gpus),
        acceptance=settings.acceptance,
        adaptive=settings.adaptive,
        max_stretch=settings.max_stretch,
        threads=settings.threads or physical_cores(),
    )


def device_of(settings: Settings, num_gpus: float) -> DeviceName:
    """What replicas compute on that reserve so many GPUs each; others they do not see."""
    if settings.device != "auto":
        return settings.device
    return "cuda" if num_gpus else "cpu"


def check_device(settings: Settings) -> None:
    """
    Raises:
        BadSetting: replicas are to compute on GPUs that they do not reserve, or ranks on a GPU that they share.
    """
    reserved = {"verifier_num_gpus": settings.verifier_num_gpus}
    if settings.drafter_placement == "remote":
        reserved["drafter_num_gpus"] = settings.drafter_num_gpus
    for name, num_gpus in reserved.items():
        if settings.device == "cuda" and not num_gpus:
            raise BadSetting("device", "cuda", f"cpu or auto while {name} is 0: only GPUs that are reserved are seen")
    of_a_rank = settings.verifier_num_gpus
    if settings.tensor_parallel > 1 and of_a_rank < 1 and device_of(settings, of_a_rank) == "cuda":
        raise BadSetting("verifier_num_gpus", of_a_rank, "at least 1, since ranks cannot share a GPU, or device=cpu")


def check_drafters(settings: Settings) -> None:
    """
    Raises:
        BadSetting: something is set for drafters of their own, and there are none.
    """
    for name in ("drafter_replicas", "drafter_max_replicas", "drafter_num_gpus"):
        value = getattr(settings, name)
        if settings.drafter_placement == "local" and value != Settings.model_fields[name].default:
            raise BadSetting(name, value, "left out, since drafter_placement is local: verifiers draft themselves")


def fingerprint(settings: Settings) -> str:
    """How the fingerprints of verifiers with these settings begin: all settings that decide what a text will be.

    What they load adds the rest: `verifier.verifier.Verifier.fingerprint`.
    """
    names = ("model", "max_model_len", "exact", "acceptance", "tensor_parallel")
    device = device_of(settings, settings.verifier_num_gpus)
    return "|".join(f"{name}={getattr(settings, name)}" for name in names) + f"|device={device}|"
