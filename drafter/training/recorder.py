"""Keeps the target's hidden states of texts while the engine writes them.

To the engine it is a drafter that never guesses. Since it reads features, the engine keeps them beside the KV, and
hands over those of all committed tokens whenever a sequence decodes. Knows positions and states. Knows no ids, and not
what becomes of the recordings.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafter.base import DraftLimits, DraftRequest, NoDraft, Ticket
from verifier.config import ModelConfig
from verifier.errors import BadSetting
from verifier.features import Fusion

RECORDED = DraftLimits(max_draft=1, draft_top_k=1, max_nodes=1)  # of requests that are recorded; others are off
_LARGEST = torch.finfo(torch.float16).max  # the first tokens of some models go beyond it


def default_layer_ids(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's: a low, a middle and a high layer, as boundary ids."""
    return (2, num_layers // 2, num_layers - 3)


class Recorder(NoDraft):
    """Records the hidden states after some layers and after the last one.

    A request's seed names its recording, so each request needs one of its own. What preemption makes the engine compute
    again is not recorded again.
    """

    def __init__(self, target: ModelConfig, layer_ids: Sequence[int]) -> None:
        """
        Args:
            layer_ids: boundary ids: n is the residual stream after n layers.

        Raises:
            BadSetting: they are not ascending, or the target has no such boundary.
        """
        super().__init__()
        last = target.num_layers
        if not layer_ids or list(layer_ids) != sorted({*layer_ids} & {*range(last + 1)}):
            allowed = f"different and ascending, from 0 to {last}, the layers of {target.name}"
            raise BadSetting("layer_ids", list(layer_ids), allowed)
        self.layer_ids = tuple(layer_ids)
        self._widths = (len(layer_ids) * target.hidden_size, target.hidden_size)
        # Nothing is normed or projected: what is kept beside the KV are the states themselves, side by side.
        self.fusion = Fusion("recorder", (*layer_ids, last), sum(self._widths))
        self._states: dict[int, list[Tensor]] = {}
        self._lengths: dict[int, int] = {}

    def start(self, batch: Sequence[DraftRequest]) -> Ticket:
        for request in batch:
            assert request.features is not None, "the engine keeps features for drafters with a fusion"
            seed, end = request.sampling.seed, len(request.ids) - 1
            states = request.features(self.num_recorded(seed), end)
            self._states.setdefault(seed, []).append(states.clamp(-_LARGEST, _LARGEST).half())
            self._lengths[seed] = end
        return super().start(batch)

    def num_recorded(self, seed: int) -> int:
        """Positions recorded so far, from the first."""
        return self._lengths.get(seed, 0)

    def take(self, seed: int) -> tuple[Tensor, Tensor]:
        """Ends a recording: fp16 states of the taps ``[n, taps * hidden]`` and of the last layer ``[n, hidden]``."""
        self._lengths.pop(seed, None)
        states = torch.cat(self._states.pop(seed, [torch.empty(0, sum(self._widths), dtype=torch.float16)]))
        tapped, last = states.split(self._widths, dim=1)
        return tapped.contiguous(), last.contiguous()
