"""Draft networks by the kind of folder they come in. Imports torch for a head's checkpoint, and to load a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from drafter.checkpoints import DraftFolder, open_eagle, open_eagle3
from drafter.head_config import check_vocab_size
from drafter.options import DraftOptions
from verifier.config import ModelConfig
from verifier.errors import CheckpointError
from verifier.weights import Checkpoint

if TYPE_CHECKING:
    from drafter.network import DraftNetwork, Target
    from drafter.network_draft import NetworkDraft
    from verifier.attention import Attention
    from verifier.features import Fusion
    from verifier.verifier import Verifier


class NetworkPlan(NamedTuple):
    """A network that is known to fit a target, before either is loaded."""

    load: Callable[[Target, Attention], DraftNetwork]  # for the target's weights
    load_fusion: Callable[[Target], Fusion | None]  # the part of it that always runs beside the target
    num_bytes: Callable[[int], int]  # memory at most, by the slots of its cache
    fingerprint: Callable[[], str]  # equal for equal networks; reads a little of each tensor


REFUSED = {
    "peagle": "is a P-EAGLE head, which drafts in parallel and is not supported",
    "mla": "is an EAGLE-3 head with latent attention (MLA), which is not supported",
    "medusa": "has Medusa heads among its weights, which are no draft network",
    "speculators": "is one of the speculators library's draft models, of which only EAGLE-3 heads are supported",
    "other": "is no draft network: neither an EAGLE-3 head, nor an EAGLE-1 one, nor a whole model",
}


def plan_network(folder: DraftFolder, target: ModelConfig, options: DraftOptions) -> NetworkPlan:
    """
    Raises:
        BadSetting: an option has no use for this kind of network.
        CheckpointError: it is of no such kind, does not fit the target, or is damaged.
    """
    if folder.kind in REFUSED:
        raise CheckpointError(f"{folder.name} {REFUSED[folder.kind]}.")
    if folder.kind == "eagle3":
        return _plan_eagle3(folder, target, options)
    options.refuse("layer_ids", because=f"{folder.name} is no EAGLE-3 head and reads no layers of choice")
    return _plan_eagle(folder, target) if folder.kind == "eagle" else _plan_model(folder, target)


def _plan_eagle3(folder: DraftFolder, model: ModelConfig, options: DraftOptions) -> NetworkPlan:
    checkpoint = open_eagle3(folder, model, options.layer_ids)

    def load(target: Target, attention: Attention) -> DraftNetwork:
        from drafter.eagle3 import Eagle3Head

        return Eagle3Head(checkpoint, target, attention)

    def fusion(target: Target) -> Fusion | None:
        from drafter.eagle3 import load_fusion

        return load_fusion(checkpoint, target)

    return NetworkPlan(load, fusion, checkpoint.num_bytes, lambda: checkpoint.fingerprint)


def _plan_eagle(folder: DraftFolder, model: ModelConfig) -> NetworkPlan:
    checkpoint = open_eagle(folder, model)

    def load(target: Target, attention: Attention) -> DraftNetwork:
        from drafter.eagle import EagleHead

        return EagleHead(checkpoint, target, attention)

    def fusion(target: Target) -> Fusion | None:
        from drafter.network import last_state

        return last_state(target)

    return NetworkPlan(load, fusion, checkpoint.num_bytes, lambda: checkpoint.fingerprint)


def _plan_model(folder: DraftFolder, model: ModelConfig) -> NetworkPlan:
    checkpoint = Checkpoint.open(folder.path)
    config = checkpoint.config
    check_vocab_size(config.vocab_size, model, config.name)

    def num_bytes(num_slots: int) -> int:
        return checkpoint.held_bytes + 4 * num_slots * 2 * config.num_layers * config.num_kv_heads * config.head_dim

    def load(target: Target, attention: Attention) -> DraftNetwork:
        from drafter.chain import SmallModel

        return SmallModel(checkpoint.on(target.device), target.config, attention)

    return NetworkPlan(load, lambda target: None, num_bytes, lambda: checkpoint.fingerprint)


def create_network_draft(plan: NetworkPlan, verifier: Verifier, options: DraftOptions) -> NetworkDraft:
    """A drafter with as many pages as ``verifier`` has."""
    import torch

    from drafter.network_draft import NetworkDraft
    from verifier.attention import create_attention

    with torch.inference_mode():
        network = plan.load(verifier.model, create_attention(device=verifier.model.device))
    pool = verifier.pool
    return NetworkDraft(network, num_pages=pool.num_pages, page_size=pool.page_size, options=options)
