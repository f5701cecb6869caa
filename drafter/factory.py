"""Drafters by name: the one place that knows them all. Imports torch only for a head's checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from drafter.base import Drafter, NoDraft
from drafter.checkpoints import DraftFolder
from drafter.medusa_config import MedusaCheckpoint, is_medusa
from drafter.networks import create_network_draft, plan_network
from drafter.ngram import NgramDraft
from drafter.options import DraftOptions
from drafter.vocabulary import check_tokenizer
from verifier.config import ModelConfig
from verifier.errors import BadSetting

if TYPE_CHECKING:
    from verifier.verifier import Verifier

NAMES = ("none", "ngram")
FOLDERS = "the folder of an EAGLE head, of Medusa heads or of a small model"
DEFAULTS = DraftOptions()


@dataclass(frozen=True)
class DraftPlan:
    """A drafter that is known to fit a model, before either is loaded."""

    name: str
    create: Callable[[Verifier], Drafter]  # for a verifier of that model
    num_bytes: Callable[[int], int] = lambda num_slots: 0  # memory at most, beside a KV cache of so many tokens


def plan_drafter(
    name: str, target: ModelConfig, options: DraftOptions = DEFAULTS, model: Path | None = None
) -> DraftPlan:
    """
    Args:
        name: "none", "ngram", or the folder of a draft network, whose files say what it is.
        model: the target's folder or GGUF file, to compare tokenizers.

    Raises:
        BadSetting: no drafter has that name, and there is no such folder; or an option has no use for it.
        CheckpointError: what the folder holds does not fit the target, or is damaged.
    """
    if name in NAMES:
        options.refuse_all(because=f"{name} is no draft network")
        return DraftPlan(name, lambda verifier: create_drafter(name))
    path = Path(name).expanduser()
    if is_medusa(path):
        plan = _plan_medusa(path, target, options)
    elif (path / "config.json").is_file():
        plan = _plan_network(path, target, options)
    else:
        raise BadSetting("draft_model", name, f"one of: {', '.join(NAMES)}, or {FOLDERS}")
    if model is not None:
        check_tokenizer(path, model, path.resolve().name, target.name)
    return plan


def _plan_medusa(path: Path, target: ModelConfig, options: DraftOptions) -> DraftPlan:
    checkpoint = MedusaCheckpoint.open(path, target)
    options.refuse("layer_ids", because=f"{checkpoint.name} has Medusa heads, which read no layers of choice")

    def create(verifier: Verifier) -> Drafter:
        from drafter.medusa import MedusaDraft

        return MedusaDraft.load(checkpoint, verifier, options)

    return DraftPlan(str(path), create, checkpoint.num_bytes)


def _plan_network(path: Path, target: ModelConfig, options: DraftOptions) -> DraftPlan:
    plan = plan_network(DraftFolder(path), target, options)
    return DraftPlan(str(path), lambda verifier: create_network_draft(plan, verifier, options), plan.num_bytes)


def create_drafter(name: str) -> Drafter:
    """A drafter that needs no model.

    Raises:
        BadSetting: none has that name.
    """
    if name not in NAMES:
        raise BadSetting("draft_model", name, "one of: " + ", ".join(NAMES))
    return NgramDraft() if name == "ngram" else NoDraft()
