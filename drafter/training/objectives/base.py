"""What the training loop asks of a method: a module that makes batches of conversations and says how wrong it is.

A method guesses some tokens ahead: by unrolling itself, or with a head for each. Each of them is a *step* here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drafter.training.shards import Conversation
from verifier.errors import BadSetting

OUTPUT = "lm_head"  # how the names of output matrices begin
INIT_STD = 0.02  # of matrices that begin at random
FIGURES = ("loss", "rows", "hits", "places")  # columns of `Outcome.figures`, all of them sums


@dataclass(frozen=True)
class Outcome:
    """Of one batch.

    Attributes:
        loss: a scalar, the sum over the batch's rows; divided by their number it is what is minimised.
        figures: ``[steps, 4]``. By step: the summed loss before weighting, the rows trained on, the places where this
            guess and all before it were the written tokens, and the places where they could have been.
    """

    loss: Tensor
    figures: Tensor


class _SoftCrossEntropy(torch.autograd.Function):
    """Keeps one matrix of the size of the logits instead of four, and its gradient is ready before it is asked for."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, goal: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = logits.log_softmax(-1)
        losses = -torch.linalg.vecdot(goal, log_probs)
        of_labels = log_probs.gather(-1, labels.unsqueeze(-1))[:, 0]
        ctx.save_for_backward(log_probs.exp_().sub_(goal))
        ctx.mark_non_differentiable(of_labels)
        return losses, of_labels

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (difference,) = ctx.saved_tensors
        return difference * gradients[0].unsqueeze(-1), None, None


@torch.no_grad()
def randomise(module: nn.Module, generator: torch.Generator) -> None:
    """Gives all matrices small random values; norms stay as they are."""
    for parameter in module.parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=INIT_STD, generator=generator)


def soft_cross_entropy(logits: Tensor, goal: Tensor) -> Tensor:
    """``[rows]``: of probabilities ``goal [rows, ids]``, which sum to 1, to ``softmax(logits)``."""
    return soft_cross_entropy_with(goal.new_zeros(len(goal), dtype=torch.int64), logits, goal)[0]


def soft_cross_entropy_with(labels: Tensor, logits: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    """As `soft_cross_entropy`; and log-probabilities of ``labels [rows]``, which no gradient flows through."""
    losses, of_labels = _SoftCrossEntropy.apply(logits.float(), goal, labels)  # type: ignore[no-untyped-call]
    return losses, of_labels


class Objective(nn.Module, ABC):
    """A trainable method. Its state dict holds what is trained and nothing else."""

    num_steps: int
    target_ids: Tensor  # [draft vocabulary] int64, ascending

    @abstractmethod
    def collate(self, conversations: Sequence[Conversation], device: torch.device) -> Any:
        """A batch for `forward`."""

    @abstractmethod
    def num_rows(self, ids: Tensor, mask: Tensor) -> int:
        """How many rows a conversation brings: what batches are measured in, and the loss divided by.

        Args:
            ids, mask: ``[tokens]`` each, as in a shard.
        """

    @abstractmethod
    def forward(self, batch: Any) -> Outcome: ...

    def matrices(self) -> list[nn.Parameter]:
        """Those whose gradient may be orthogonalised: matrices between hidden states, not over a vocabulary."""
        return [each for name, each in self.named_parameters() if each.dim() == 2 and not name.startswith(OUTPUT)]

    def output_rows(self) -> list[nn.Parameter]:
        """Those over a vocabulary, which with little data are better kept as the target has them."""
        return [each for name, each in self.named_parameters() if name.startswith(OUTPUT)]

    def adopt(self, weights: Mapping[str, Tensor], target_ids: Tensor) -> None:
        """Begins with another head's weights, of the same method.

        Rows over its vocabulary, ``target_ids``, go to the same tokens here; those that it lacks keep their values.

        Raises:
            BadSetting: it has other sizes.
        """
        rows = torch.searchsorted(target_ids, self.target_ids).clamp(max=len(target_ids) - 1)
        known = target_ids[rows] == self.target_ids
        own = self.state_dict()
        for name, tensor in own.items():
            given = weights.get(name)
            if given is not None and name.startswith(OUTPUT) and given.shape[1:] == tensor.shape[1:]:
                tensor[known] = given[rows[known]]
            elif given is not None and given.shape == tensor.shape:
                tensor.copy_(given)
            else:
                shape = None if given is None else list(given.shape)
                raise BadSetting("start_from", shape, f"a run whose {name} has shape {list(tensor.shape)}")


def acceptance(figures: Tensor) -> list[float]:
    """By step, how often a guess is right where all before it were: what a chain of guesses is accepted with.

    Tokens outside the draft vocabulary count as wrong guesses.
    """
    hits, places = figures[:, 2].tolist(), figures[:, 3].tolist()
    reached = [places[0], *hits[:-1]]
    # Later steps have fewer places where answers end: what was reached is scaled to those there are.
    scale = [1.0] + [places[step] / max(places[step - 1], 1) for step in range(1, len(places))]
    return [hit / max(base * factor, 1) for hit, base, factor in zip(hits, reached, scale, strict=True)]


def mean_length(figures: Tensor) -> float:
    """Tokens for each pass of the target when chains of all steps are guessed: the bonus token and what is accepted."""
    return 1.0 + float((figures[:, 2] / figures[:, 3].clamp(min=1)).sum())
