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
from drafter.shipped import shipped_head
from drafter.united import UnitedDraft
from drafter.vocabulary import check_tokenizer
from verifier.config import ModelConfig
from verifier.errors import BadSetting
from verifier.paths import written_path

if TYPE_CHECKING:
    from verifier.verifier import Verifier

NAMES = ("none", "ngram")
AUTO, SHIPPED = "auto", "eagle3"
ALL_NAMES = ", ".join((AUTO, *NAMES, SHIPPED))
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
        name: "none", "ngram", "eagle3" (the head that comes with this package), or the folder of a draft network,
            whose files say what it is. Several, joined by "+", guess together; the options are then for those that are
            networks. "auto": n-grams, together with the head that comes along if one does.
        model: the target's folder or GGUF file, to compare tokenizers.

    Raises:
        BadSetting: no drafter has that name, and there is no such folder; or an option has no use for it; or some that
            are joined cannot be.
        CheckpointError: what the folder holds does not fit the target, or is damaged.
    """
    check_name(name)
    name = spelled_out(name, target)
    if name in NAMES:
        options.refuse_all(because=f"{name} is no draft network")
        return DraftPlan(name, lambda verifier: create_drafter(name))
    path = folder_of(name, target)
    if is_medusa(path):
        plan = _plan_medusa(path, target, options)
    elif (path / "config.json").is_file():
        plan = _plan_network(path, target, options)
    else:
        return _plan_united(name, target, options, model)
    if model is not None:
        check_tokenizer(path, model, path.resolve().name, target.name)
    return plan


def check_name(name: str) -> None:
    """All that can be said about a name before there is a model, which may have to be fetched first.

    Raises:
        BadSetting: no drafter has that name, or that of a part of it, and there is no such folder.
    """
    for part in _split(name):
        if part not in (AUTO, *NAMES, SHIPPED) and not _is_network(part):
            raise BadSetting("draft_model", part, f"one of: {ALL_NAMES}, or {FOLDERS}, or several joined by +")


def spelled_out(name: str, target: ModelConfig) -> str:
    """``name``, or what "auto" stands for."""
    return "+".join(parts_of(name, target)) if name == AUTO else name


def parts_of(name: str, target: ModelConfig) -> list[str]:
    """The drafters that ``name`` joins, or the one that it names; a folder's name may have a "+" in it."""
    if name == AUTO:
        return [SHIPPED, "ngram"] if shipped_head(target) else ["ngram"]
    return _split(name)


def _split(name: str) -> list[str]:
    return [name] if _is_network(name) else sorted(part.strip() for part in name.split("+"))


def _is_network(name: str) -> bool:
    path = written_path("draft_model", name)
    return (path / "config.json").is_file() or is_medusa(path)


def folder_of(name: str, target: ModelConfig) -> Path:
    """Where the draft network of that name lies, if it is one.

    Raises:
        BadSetting: it is to be the head that comes along, and none does for this target; or nobody can look there.
    """
    if name != SHIPPED:
        return written_path("draft_model", name)
    head = shipped_head(target)
    if head is None:
        raise BadSetting("draft_model", name, f"something else, since no head for {target.name} comes along")
    return head


def _plan_united(name: str, target: ModelConfig, options: DraftOptions, model: Path | None) -> DraftPlan:
    parts = parts_of(name, target)
    if len(set(parts)) < len(parts) or {"none", AUTO} & set(parts):
        raise BadSetting("draft_model", name, "made of drafters that guess, each of them once")
    plans = [plan_drafter(part, target, DEFAULTS if part in NAMES else options, model) for part in parts]

    def create(verifier: Verifier) -> Drafter:
        return UnitedDraft({plan.name: plan.create(verifier) for plan in plans}, verifier.config.vocab_size)

    return DraftPlan("+".join(parts), create, lambda num_slots: sum(plan.num_bytes(num_slots) for plan in plans))


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
