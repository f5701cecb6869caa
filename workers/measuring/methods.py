"""The methods of guessing that are compared, each with its published size of trees and with small ones.

Knows names, limits and where weights lie. Knows no engine. Which method makes what of its limits is the drafters' own
affair.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drafter.base import DraftLimits
from drafter.factory import NAMES, SHIPPED, DraftPlan, plan_drafter
from drafter.options import DraftOptions
from drafter.shipped import shipped_head
from verifier.config import ModelConfig
from verifier.errors import DraftreeError
from workers.build import DEFAULT_LIMITS
from workers.config import Acceptance

DEFAULTS = DraftOptions()
SIXTEEN = DraftLimits(max_draft=6, draft_top_k=16, max_nodes=16)
AS_IT_PAYS = DraftLimits(max_draft=6, draft_top_k=4, max_nodes=16)
SHALLOW = DraftLimits(max_draft=3, draft_top_k=2, max_nodes=5)


@dataclass(frozen=True)
class Method:
    """
    Attributes:
        parts: names of drafters, or of folders with weights; guesses of several are united.
        limits: as published, then what suits a machine on which rows are dear.
        trained_as: what the training tool calls it.
    """

    name: str
    parts: tuple[str, ...]
    limits: tuple[DraftLimits, ...]
    options: DraftOptions = DEFAULTS
    acceptance: Acceptance = "exact"
    adaptive: bool = False  # guesses as far as it pays, within the limits
    trained_as: str = ""

    @property
    def is_lossy(self) -> bool:
        return self.acceptance != "exact"


# Sizes: chains of 5 are common for small models; prompt lookup's own default is 10; Medusa, EAGLE-1 and EAGLE-2/3 have
# trees of 64, 26 and 60 nodes with the root (for models of 7 and 8 billion parameters).
MEDUSA_TREE, EAGLE1_TREE = DraftLimits(4, 10, 63), DraftLimits(5, 4, 25)
EAGLE2_TREE, EAGLE3_TREE = DraftLimits(6, 10, 59), DraftLimits(8, 10, 59)
METHODS = (
    Method("n-gram", ("ngram",), (DraftLimits(10, 1, 10), DEFAULT_LIMITS)),
    Method("n-gram, adaptive", ("ngram",), (DEFAULT_LIMITS,), adaptive=True),
    Method("small model", ("small",), (DraftLimits(5, 1, 5), DraftLimits(3, 1, 3)), trained_as="model"),
    Method("Medusa", ("medusa",), (MEDUSA_TREE, DEFAULT_LIMITS), trained_as="medusa"),
    Method(
        "Medusa, typical acceptance",
        ("medusa",),
        (MEDUSA_TREE, DEFAULT_LIMITS),
        acceptance="typical-lossy",
        trained_as="medusa",
    ),
    Method(
        "EAGLE-1, static tree",
        ("eagle",),
        (EAGLE1_TREE, DEFAULT_LIMITS),
        DraftOptions(growth="static"),
        trained_as="eagle",
    ),
    Method("EAGLE-2, dynamic tree", ("eagle",), (EAGLE2_TREE, DEFAULT_LIMITS), trained_as="eagle"),
    Method(
        "EAGLE-2, threshold 0.3, decay 0.9",
        ("eagle",),
        (EAGLE2_TREE, DEFAULT_LIMITS),
        DraftOptions(threshold=0.3, decay=0.9),
        trained_as="eagle",
    ),
    Method("EAGLE-3", ("eagle3",), (EAGLE3_TREE, SIXTEEN, DEFAULT_LIMITS, SHALLOW), trained_as="eagle3"),
    Method("EAGLE-3, adaptive", ("eagle3",), (AS_IT_PAYS, DEFAULT_LIMITS), adaptive=True, trained_as="eagle3"),
    Method("EAGLE-3, blind to noise", ("eagle3",), (SIXTEEN,), DraftOptions(noise_ranking=False), trained_as="eagle3"),
    Method("EAGLE-3 + n-gram", ("eagle3", "ngram"), (EAGLE3_TREE, SIXTEEN, DEFAULT_LIMITS), trained_as="eagle3"),
    Method(
        "EAGLE-3 + n-gram, adaptive",
        ("eagle3", "ngram"),
        (AS_IT_PAYS, DEFAULT_LIMITS),
        adaptive=True,
        trained_as="eagle3",
    ),
)


@dataclass(frozen=True)
class Entry:
    """A method that takes part, or the reason why it does not."""

    method: Method
    plan: DraftPlan | None
    weights: str = ""  # digest of its files
    problem: str = ""

    def key(self, limits: DraftLimits) -> str:
        """Names what answers: the same method with other weights or other trees is somebody else."""
        return f"{self.method.name} {in_short(limits)} {self.weights[:8]}".rstrip()


def in_short(limits: DraftLimits) -> str:
    """Depth, branching and nodes."""
    return f"{limits.max_draft}/{limits.draft_top_k}/{limits.max_nodes}"


def enter(method: Method, heads: Path, target: ModelConfig, model: Path) -> Entry:
    """
    Args:
        heads: holds a folder for each that has weights.
        model: the target's folder or GGUF file.
    """
    places = {part: _folder(part, heads, target) for part in method.parts if part not in NAMES}
    folders = list(places.values())
    if missing := [folder for folder in folders if not folder.is_dir()]:
        return Entry(method, None, problem=f"not built: {build_command(method, missing[0])}")
    name = "+".join(part if part in NAMES else str(places[part]) for part in method.parts)
    try:
        plan = plan_drafter(name, target, method.options, model)
    except DraftreeError as error:
        return Entry(method, None, problem=str(error))
    return Entry(method, plan, _digest(folders) if folders else "")


def _folder(part: str, heads: Path, target: ModelConfig) -> Path:
    """Where a method's weights should be; the head that comes along stands in for one of its kind."""
    folder = heads / part
    return (shipped_head(target) or folder) if part == SHIPPED and not folder.is_dir() else folder


def build_command(method: Method, folder: Path) -> str:
    train = f"python -m drafter.training train --method {method.trained_as} --data DATA --run RUN"
    return f"{train} && python -m drafter.training export --run RUN --out {folder}"


def _digest(folders: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in sorted(file for folder in folders for file in folder.iterdir() if file.is_file()):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()
