"""Where a draft network runs when it does not run here: the verifier's part of it, and the drafter's.

n-grams always run in the engine. Of a network the verifier keeps the fusion alone; the drafter loads the rest, and of
the target no more than the network shares with it. Imports torch only to load.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from drafter.checkpoints import DraftFolder
from drafter.factory import NAMES, DraftPlan, folder_of, parts_of, plan_drafter
from drafter.medusa_config import is_medusa
from drafter.networks import NetworkPlan, plan_network
from drafter.options import DraftOptions
from verifier.config import ModelConfig
from verifier.device import DeviceName, choose_device, use_gpu
from verifier.errors import BadSetting
from verifier.weights import Checkpoint
from workers.stats import RemoteFigures

if TYPE_CHECKING:
    from drafter.base import Drafter
    from drafter.network_draft import NetworkDraft
    from verifier.features import Fusion
    from verifier.verifier import Verifier
    from workers.remote.channel import Finder
    from workers.remote.messages import Terms


@dataclass(frozen=True)
class Elsewhere:
    """How an engine reaches the drafters that run its draft network."""

    finder: Finder
    figures: RemoteFigures = field(default_factory=RemoteFigures)


def remote_part(name: str, target: ModelConfig) -> str | None:
    """Of a ``draft_model``, the part whose network can run elsewhere; None if there is none.

    Raises:
        BadSetting: several, or one that must stay with the target.
    """
    networks = [part for part in parts_of(name, target) if part not in NAMES]
    if len(networks) > 1:
        raise BadSetting(
            "draft_model", name, "a single draft network, with or without ngram, where drafters are remote"
        )
    if networks and is_medusa(folder_of(networks[0], target)):
        allowed = f"local, since {networks[0]} has Medusa heads, which run on the target's last state"
        raise BadSetting("drafter_placement", "remote", allowed)
    return networks[0] if networks else None


def check_needs_no_drafters(name: str, target: ModelConfig) -> None:
    """For a service that has none.

    Raises:
        BadSetting: a part of the ``draft_model`` would run there.
    """
    if remote_part(name, target) is not None:
        allowed = "without a draft network, since the service was started without drafters"
        raise BadSetting("draft_model", name, allowed)


def plan_remote(
    name: str, model: Path, options: DraftOptions, deadline_s: float, elsewhere: Elsewhere | None = None
) -> DraftPlan:
    """As `drafter.factory.plan_drafter`, for an engine whose draft network runs elsewhere.

    Args:
        elsewhere: None only for a plan that nothing is created from.
    """
    checkpoint = Checkpoint.open(model)
    target = checkpoint.config
    here = plan_drafter(name, target, options, model)  # all that can be wrong with it is wrong elsewhere too
    own_name = remote_part(name, target)
    if own_name is None:
        return here
    network = _plan_network(own_name, target, options)
    others = [plan_drafter(part, target) for part in parts_of(name, target) if part != own_name]

    def create(verifier: Verifier) -> Drafter:
        from drafter.united import UnitedDraft
        from workers.remote.drafter import RemoteDraft

        assert elsewhere is not None
        fusion = network.load_fusion(verifier.model)
        remote = RemoteDraft(
            elsewhere.finder,
            _terms(checkpoint, network, fusion),
            fusion,
            deadline_s=deadline_s,
            figures=elsewhere.figures,
        )
        sources: dict[str, Drafter] = {plan.name: plan.create(verifier) for plan in others}
        return UnitedDraft(sources | {own_name: remote}, target.vocab_size) if others else remote

    # Of a network's memory, what is not its own cache: nearly all of it is the features beside the KV.
    return DraftPlan(here.name, create, lambda num_slots: 4 * num_slots * target.hidden_size)


def load_network(
    name: str, model: Path, options: DraftOptions, *, num_pages: int, page_size: int, device: DeviceName = "cpu"
) -> tuple[NetworkDraft, Terms]:
    """What a drafter for remote verifiers of ``model`` drafts with, and what they must agree with.

    Args:
        name: a ``draft_model`` with a network in it.
        num_pages, page_size: of the draft cache.

    Raises:
        DraftreeError: as `plan_remote`, or there is no such device.
    """
    import torch

    from drafter.network import TargetParts
    from drafter.network_draft import NetworkDraft
    from verifier.attention import create_attention

    checkpoint = Checkpoint.open(model)
    part = remote_part(name, checkpoint.config)
    assert part is not None, f"{name} has no network"
    plan = _plan_network(part, checkpoint.config, options)
    there = use_gpu(choose_device(device))
    with torch.inference_mode():
        network = plan.load(TargetParts(checkpoint.on(there)), create_attention(device=there))
    drafter = NetworkDraft(network, num_pages=num_pages, page_size=page_size, options=options)
    return drafter, _terms(checkpoint, plan, network.fusion)


def _plan_network(name: str, target: ModelConfig, options: DraftOptions) -> NetworkPlan:
    return plan_network(DraftFolder(folder_of(name, target)), target, options)


def _terms(target: Checkpoint, network: NetworkPlan, fusion: Fusion | None) -> Terms:
    from workers.remote.messages import Terms

    width = fusion.width if fusion else 0
    return Terms(target.fingerprint, network.fingerprint(), width, target.config.vocab_size)
