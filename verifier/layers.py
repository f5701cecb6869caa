"""The small layers of a Llama-family decoder: norm, rotary embedding, gated MLP. All fp32, all row by row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from verifier.config import ModelConfig, RopeScaling
from verifier.linear import Linear


@dataclass(frozen=True)
class RMSNorm:
    """Over the last dimension (Zhang and Sennrich, 2019)."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class NoNorm:
    """Where others have a norm."""

    def __call__(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class GatedMLP:
    """``down(silu(gate(x)) * up(x))`` with gate and up merged."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))


class Rotary:
    """Rotary position embedding over the two halves of a head (Su et al., 2021; the Hugging Face pairing)."""

    def __init__(self, config: ModelConfig, device: torch.device | str = "cpu") -> None:
        frequencies, scale = inverse_frequencies(config)
        angles = torch.outer(torch.arange(config.max_positions, dtype=torch.float32), frequencies)
        self._cos = (torch.cat((angles, angles), dim=-1).cos() * scale).to(device)
        # The first half of a rotated head takes minus the second half: the sign lives in the table.
        self._sin = (torch.cat((-angles.sin(), angles.sin()), dim=-1) * scale).to(device)
        self._half = config.head_dim // 2

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines for ``positions [rows]``, each ``[rows, 1, head_dim]``: shared by all layers."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    def __call__(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates ``heads [rows, heads, head_dim]``."""
        return torch.addcmul(heads * cos, heads.roll(self._half, -1), sin)


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """``[head_dim / 2]`` fp32 radians per position, and the factor on cosines and sines (1 except for YaRN)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None or scaling.kind == "dynamic":  # dynamic scaling sets in beyond max_positions, where we never go
        return frequencies, 1.0
    if scaling.kind == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    return _yarn(frequencies, scaling, config), scaling.attention_factor


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: long waves are stretched by ``factor``, short ones kept, those between are blended."""
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)  # full turns within the original context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def _yarn(frequencies: Tensor, scaling: RopeScaling, config: ModelConfig) -> Tensor:
    """YaRN (Peng et al., 2023): interpolate dimensions that turn less than ``beta_slow`` times, keep the fast ones."""

    def dimension(turns: float) -> float:
        waves = scaling.original_max_positions / (turns * 2 * math.pi)
        return config.head_dim * math.log(waves) / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    ramp = (torch.arange(config.head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0.0, 1.0)
    return frequencies / scaling.factor * (1 - keep) + frequencies * keep
