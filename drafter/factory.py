"""Drafters by name: the one place that knows them all. Imports torch only for a head's checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from drafter.base import Drafter, NoDraft
from drafter.checkpoints import HeadCheckpoint, is_head
from drafter.ngram import NgramDraft
from verifier.config import ModelConfig
from verifier.errors import BadSetting

if TYPE_CHECKING:
    from verifier.verifier import Verifier

NAMES = ("none", "ngram")


@dataclass(frozen=True)
class DraftPlan:
    """A drafter that is known to fit a model, before either is loaded."""

    name: str
    head: HeadCheckpoint | None = None

    def create(self, verifier: Verifier) -> Drafter:
        """The drafter, for a verifier of that model."""
        if self.head is None:
            return create_drafter(self.name)
        from drafter.eagle3 import Eagle3Draft

        return Eagle3Draft.load(self.head, verifier)

    def num_bytes(self, num_slots: int) -> int:
        """Memory at most, beside a KV cache of ``num_slots`` tokens."""
        return self.head.num_bytes(num_slots) if self.head else 0


def plan_drafter(name: str, target: ModelConfig) -> DraftPlan:
    """
    Args:
        name: "none", "ngram", or the folder of an EAGLE-3 head.

    Raises:
        BadSetting: no drafter has that name, and there is no such folder.
        CheckpointError: the folder's head does not fit the target, or is damaged.
    """
    if name in NAMES:
        return DraftPlan(name)
    folder = Path(name).expanduser()
    if not is_head(folder):
        raise BadSetting("draft_model", name, f"one of: {', '.join(NAMES)}, or the folder of an EAGLE-3 head")
    return DraftPlan(name, HeadCheckpoint.open(folder, target))


def create_drafter(name: str) -> Drafter:
    """A drafter that needs no model.

    Raises:
        BadSetting: none has that name.
    """
    if name not in NAMES:
        raise BadSetting("draft_model", name, "one of: " + ", ".join(NAMES))
    return NgramDraft() if name == "ngram" else NoDraft()
