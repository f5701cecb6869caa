"""Muon for matrices between hidden states, AdamW for everything else, as one optimizer.

Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/) follows the momentum's nearest orthogonal matrix.
torch has one too, but it iterates in bfloat16, for which most CPUs have no fast kernels; here the precision is the
device's best.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from drafter.training.objectives.base import Objective
from drafter.training.settings import TrainSettings

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration
ITERATIONS = 5
MOMENTUM = 0.95
BETAS = (0.9, 0.95)


def orthogonalised(matrix: Tensor) -> Tensor:
    """Roughly U V^T of ``matrix`` = U S V^T: singular values come to lie around 1 (Newton-Schulz)."""
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).to(matrix.dtype)


class Muon(Optimizer):
    """With Nesterov momentum, and steps as large as AdamW's of the same learning rate (Liu et al., 2025)."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 1 - MOMENTUM)
                update = orthogonalised(parameter.grad.lerp(momentum, MOMENTUM))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * 0.2 * max(parameter.shape) ** 0.5)


class Together:
    """Several optimizers that step as one."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._rates = [[group["lr"] for group in each.param_groups] for each in optimizers]

    def step(self, scale: float) -> None:
        """With ``scale`` times the learning rates."""
        for optimizer, rates in zip(self._optimizers, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [each.state_dict() for each in self._optimizers]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        for each, state in zip(self._optimizers, states, strict=True):
            each.load_state_dict(state)


def create_optimizer(objective: Objective, settings: TrainSettings) -> Together:
    """For all parameters that are trained; those that are not need no gradient from now on."""
    output = objective.output_rows()
    for each in output:
        each.requires_grad_(settings.output_scale > 0)
    matrices = objective.matrices() if settings.optimizer == "muon" else []
    taken = {id(each) for each in (*output, *matrices)}
    others = [each for each in objective.parameters() if id(each) not in taken]
    groups: list[dict[str, Any]] = [
        {"params": [each for each in others if each.dim() < 2], "weight_decay": 0.0},  # norms and biases
        {"params": [each for each in others if each.dim() >= 2]},
        {"params": output if settings.output_scale else [], "lr": settings.lr * settings.output_scale},
    ]
    optimizers: list[Optimizer] = [
        AdamW([each for each in groups if each["params"]], settings.lr, BETAS, weight_decay=settings.weight_decay)
    ]
    if matrices:
        optimizers.append(Muon(matrices, settings.muon_lr, settings.weight_decay))
    return Together(optimizers)
