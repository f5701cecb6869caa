"""The EAGLE network (Li et al., 2024, https://arxiv.org/abs/2401.15077), of which EAGLE-1 and EAGLE-2 are two ways to
grow a tree: a decoder layer that continues the target's own features.

It reads the target's hidden state after the final norm beside the next token's embedding, and what comes out passes for
the next such state: the target's own output matrix makes logits of it, and the slots below read it. Knows rows and
slots. Knows no trees, sessions or texts.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from drafter.checkpoints import HeadCheckpoint
from drafter.eagle_config import EagleConfig
from drafter.network import Target, embedding_table, last_state
from verifier.attention import Attention
from verifier.attention.layout import RowLayout
from verifier.layers import Rotary
from verifier.linear import Linear
from verifier.model import load_layer
from verifier.pool import PagePool


class EagleHead:
    """A `drafter.network.DraftNetwork`."""

    def __init__(self, checkpoint: HeadCheckpoint[EagleConfig], target: Target, attention: Attention) -> None:
        config = checkpoint.config
        self.decoder = config.decoder
        self.fusion = last_state(target)
        self.device = target.device
        self.target_ids = checkpoint.target_ids
        checkpoint = checkpoint.on(target.device)
        self._attention = attention
        self._rotary = Rotary(config.decoder, self.device)
        self._embedding = embedding_table(checkpoint.optional("embed_tokens.weight"), target)
        self._fc = Linear(
            [checkpoint.tensor("fc.weight")], [checkpoint.tensor("fc.bias")] if config.has_fc_bias else []
        )
        self._layers = [
            load_layer(config.decoder, checkpoint, index, has_attention_norm=index > 0)
            for index in range(config.decoder.num_layers)
        ]
        self._output = target.head

    def forward(self, layout: RowLayout, hidden: Tensor | None, pool: PagePool) -> Tensor:
        """``[rows, hidden]``: the features of the positions after, as the head foresees them."""
        assert hidden is not None
        cos, sin = self._rotary.at(layout.positions)
        rotate = partial(self._rotary, cos=cos, sin=sin)
        x = self._fc(torch.cat((self._embedding[layout.token_ids].float(), hidden), dim=-1))
        for index, layer in enumerate(self._layers):
            x = layer(x, rotate, layout, pool.keys[index], pool.values[index], self._attention)
        return x

    def feedback(self, states: Tensor) -> Tensor:
        return states

    def logits(self, states: Tensor) -> Tensor:
        return self._output(states)[:, : len(self.target_ids)]
