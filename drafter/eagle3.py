"""The EAGLE-3 network (Li et al., 2025, https://arxiv.org/abs/2503.01840): a decoder of a layer or few that reads the
target's features and predicts draft tokens.

Its first layer takes two vectors for each slot, the embedding of a token and a hidden state: the target's fused feature
in the context, the head's own output below it. Knows rows and slots. Knows no trees, sessions or texts.
"""

from __future__ import annotations

from functools import partial
from hashlib import sha256

import torch
from torch import Tensor

from drafter.checkpoints import HeadCheckpoint
from drafter.head_config import Eagle3Config
from drafter.network import Target, embedding_table, last_state
from verifier.attention import Attention
from verifier.attention.layout import RowLayout
from verifier.features import Fusion
from verifier.layers import RMSNorm, Rotary
from verifier.linear import Linear
from verifier.model import load_layer
from verifier.pool import PagePool


class Eagle3Head:
    """A `drafter.network.DraftNetwork`. What a head does not bring is the target's own."""

    def __init__(self, checkpoint: HeadCheckpoint[Eagle3Config], target: Target, attention: Attention) -> None:
        self.config = checkpoint.config
        self.decoder = self.config.decoder
        self.device = target.device
        self.fusion = load_fusion(checkpoint, target)
        self.target_ids = checkpoint.target_ids
        checkpoint = checkpoint.on(target.device)
        self._attention = attention
        self._rotary = Rotary(self.decoder, self.device)
        self._embedding = embedding_table(checkpoint.optional("embed_tokens.weight"), target)
        self._layers = [load_layer(self.decoder, checkpoint, index) for index in range(self.decoder.num_layers)]
        self._hidden_norm = _load_norm(checkpoint, "layers.0.hidden_norm.weight")
        self._norm = _load_norm(checkpoint, "norm.weight")
        self._output = Linear([checkpoint.tensor("lm_head.weight")]) if self.config.has_output else target.head

    def forward(self, layout: RowLayout, hidden: Tensor | None, pool: PagePool) -> Tensor:
        """``[rows, width]`` before the final norm; otherwise as `drafter.network.DraftNetwork.forward`."""
        assert hidden is not None
        cos, sin = self._rotary.at(layout.positions)
        rotate = partial(self._rotary, cos=cos, sin=sin)
        first, *later = self._layers
        normed = self._hidden_norm(hidden)
        x = torch.cat((first.attention_norm(self._embedding[layout.token_ids].float()), normed), dim=-1)
        attended = first.attend(x, rotate, layout, pool.keys[0], pool.values[0], self._attention)
        x = first.finish(normed if self.config.norm_before_residual else hidden, attended)
        for index, layer in enumerate(later, start=1):
            x = layer(x, rotate, layout, pool.keys[index], pool.values[index], self._attention)
        return x

    def feedback(self, states: Tensor) -> Tensor:
        return self._norm(states) if self.config.norm_output else states

    def logits(self, states: Tensor) -> Tensor:
        return self._output(self._norm(states))[:, : len(self.target_ids)]


def load_fusion(checkpoint: HeadCheckpoint[Eagle3Config], target: Target) -> Fusion:
    """The head's part that runs on the verifier."""
    config = checkpoint.config
    if not config.fuses_layers:
        return last_state(target)
    key, checkpoint = _fusion_key(checkpoint), checkpoint.on(target.device)
    each_norm: tuple[RMSNorm, ...] = ()
    if config.fc_norm:
        each_norm = tuple(_load_norm(checkpoint, name) for name in _fc_norms(config))
    return Fusion(
        key=key,
        taps=config.layer_ids,
        width=config.decoder.hidden_size,
        each_norm=each_norm,
        joint_norm=_load_norm(checkpoint, "input_norm.weight") if config.norm_before_fc else None,
        projection=Linear([checkpoint.tensor("fc.weight")]),
    )


def _fc_norms(config: Eagle3Config) -> list[str]:
    return [f"fc_norm.{index}.weight" for index in range(len(config.layer_ids))]


def _fusion_key(checkpoint: HeadCheckpoint[Eagle3Config]) -> str:
    """Equal where features are: heads that differ in the rest alone, as when only that was trained, read the same."""
    config = checkpoint.config
    norms = [*(_fc_norms(config) if config.fc_norm else ()), *(["input_norm.weight"] if config.norm_before_fc else ())]
    digest = sha256(repr((config.layer_ids, norms, config.decoder.rms_norm_eps)).encode())
    for name in (*norms, "fc.weight"):
        tensor = checkpoint.tensor(name)
        digest.update(str(tensor.dtype).encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _load_norm(checkpoint: HeadCheckpoint[Eagle3Config], name: str) -> RMSNorm:
    return RMSNorm(checkpoint.tensor(name).float(), checkpoint.config.decoder.rms_norm_eps)
