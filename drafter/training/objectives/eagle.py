"""EAGLE-1 (Li et al., 2024, https://arxiv.org/abs/2401.15077, section 3.2): a layer that continues the target's states.

Slot i reads the target's state of position i, after the final norm, beside token i + 1, and learns the state of
position i + 1: by smooth L1 distance, and a tenth as much by soft cross-entropy of what the target's own output matrix
makes of the two. Noise on what it reads stands for its own errors, which it will read in a draft. No head of this kind
is unrolled in training, so it knows one step.

The head has the target's whole vocabulary; the draft vocabulary here is where the two distributions are compared, and
spares most of the matrix. What is trained carries the names of SafeAILab's checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.training.objectives.base import Objective, Outcome, randomise, soft_cross_entropy
from drafter.training.objectives.decoders import Batch, DecoderLayer, make_batch, runs_of_hits, trained_slots
from drafter.training.shards import Conversation
from drafter.training.target import Target
from verifier.config import ModelConfig

TOKEN_WEIGHT = 0.1  # of the cross-entropy, relative to the distance of features
# Uniform noise of this width for texts of so many tokens, and less for longer ones. The authors' code makes it greater
# for shorter ones, of which theirs had few.
NOISE_WIDTH, NOISE_TOKENS = 0.2, 512
OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


class EagleObjective(Objective):
    """
    Args:
        decoder: the head's one layer.
        target_ids: ``[draft vocabulary]`` int64, ascending.
        seed: of the noise.
    """

    num_steps = 1

    def __init__(self, target: Target, decoder: ModelConfig, target_ids: Tensor, seed: int) -> None:
        super().__init__()
        width = decoder.hidden_size
        self.target_ids = target_ids
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(decoder, has_input_norm=False)])
        self._target, self._seed = target, seed
        self.embedding = nn.Buffer(target.embedding, persistent=False)
        self.target_rows = nn.Buffer(target.output[target_ids], persistent=False)

    def collate(self, conversations: Sequence[Conversation], device: torch.device) -> Batch:
        return make_batch(conversations, 1, device)

    def num_rows(self, ids: Tensor, mask: Tensor) -> int:
        return len(trained_slots(mask, 1))

    def forward(self, batch: Batch) -> Outcome:
        states = self.continued(batch)
        goal_states = self._target.normed(batch.last)
        goal = F.linear(goal_states, self.target_rows).softmax(-1)
        logits = F.linear(states, self.target_rows)
        distances = F.smooth_l1_loss(states.float(), goal_states, reduction="none").mean(-1)
        loss = (distances + TOKEN_WEIGHT * soft_cross_entropy(logits, goal)).sum()
        hits = self.target_ids.to(logits.device)[logits.argmax(-1)] == batch.labels
        figures = torch.zeros(1, 4, device=loss.device)
        figures[:, 0], figures[:, 1] = loss.detach(), len(batch.rows)
        figures[:, 2:] = runs_of_hits(batch, hits, self.num_steps)
        return Outcome(loss, figures)

    def continued(self, batch: Batch) -> Tensor:
        """The head's states ``[rows, H]``, each to pass for the target's at the slot's token."""
        features = self._target.normed(batch.features)
        if torch.is_grad_enabled():  # what is only measured reads what it would read
            features = features + self._noise(batch)
        x = self.fc(torch.cat((F.embedding(batch.tokens, self.embedding), features), dim=-1)).float()
        for layer in self.layers:
            x = layer(x)
        states: Tensor = x.flatten(0, 1)[batch.rows]
        return states

    def _noise(self, batch: Batch) -> Tensor:
        """The same for the same conversations, so that a run that is resumed goes on as it would have."""
        generator = torch.Generator().manual_seed(self._seed + int(batch.tokens.sum()))
        uniform = torch.rand(batch.features.shape, generator=generator).to(batch.features.device) - 0.5
        width = NOISE_WIDTH * (NOISE_TOKENS / batch.lengths).clamp(max=1.0)
        return uniform * width[:, None, None]


def initialise(objective: EagleObjective, target: Target, start: str, seed: int) -> None:
    """Gives the weights their first values: ``random``, or with the target's last layer where shapes fit.

    Then features pass through as they are, and the embedding adds a little: the layer's output matrices, which are made
    for a residual stream many times as strong as normed features, begin at zero.
    """
    randomise(objective, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        if start == "target":
            width = target.config.hidden_size
            objective.fc.weight[:, width:] += torch.eye(width)
            prefix = f"model.layers.{target.config.num_layers - 1}."
            for name, own in objective.layers[0].state_dict().items():
                theirs = target.checkpoint.tensor(prefix + name)
                if name in OUTPUTS:
                    own.zero_()
                elif theirs.shape == own.shape:
                    own.copy_(theirs)
