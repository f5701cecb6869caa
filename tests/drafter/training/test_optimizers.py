from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch
from torch import nn

from drafter.training.optimizers import Muon, Together, orthogonalised
from drafter.training.settings import TrainSettings
from drafter.training.trainer import rate


@pytest.mark.parametrize("shape", [(20, 50), (50, 20), (16, 16)])
def test_singular_values_come_to_lie_around_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonalised(matrix)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.3
    assert values.max() < 1.3
    assert float((found * (u @ vt)).sum() / found.norm() / (u @ vt).norm()) > 0.97


def test_muon_finds_the_least_of_a_quadratic() -> None:
    goal = torch.randn(8, 12, generator=torch.Generator().manual_seed(2))
    weight = nn.Parameter(torch.zeros(8, 12))
    optimizer = Together([Muon([weight], lr=0.2, weight_decay=0.0)])
    for step in range(200):
        (weight - goal).pow(2).sum().backward()
        optimizer.step(1 - step / 200)
    assert float((weight.detach() - goal).norm() / goal.norm()) < 0.05


def test_its_state_can_be_saved() -> None:
    def steps(optimizer: Together, weight: nn.Parameter, count: int) -> None:
        for index in range(count):
            (weight * torch.arange(24.0).view(4, 6).roll(index)).pow(2).sum().backward()
            optimizer.step(1.0)

    def fresh() -> tuple[Together, nn.Parameter]:
        weight = nn.Parameter(torch.ones(4, 6))
        return Together([Muon([weight], 0.1, 0.01)]), weight

    whole, weight = fresh()
    steps(whole, weight, 3)
    resumed, copy = fresh()
    resumed.load_state_dict(deepcopy(whole.state_dict()))
    copy.data.copy_(weight.data)
    steps(whole, weight, 2)
    steps(resumed, copy, 2)
    assert torch.equal(weight, copy)


def test_the_rate_rises_and_falls() -> None:
    settings = TrainSettings(warm_up=10, steps=110)
    rates = [rate(step, settings) for step in range(120)]
    assert rates[0] == 0.1
    assert rates[9] == rates[10] == 1.0
    assert rates[60] == pytest.approx((1 + 0.05) / 2)
    assert rates[110] == rates[119] == pytest.approx(0.05)
    assert all(math.isfinite(each) for each in rates)
