"""From logits to the one token: parameters, the processed distribution, the counter-based noise, the draw."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is chosen. Temperature 0 is greedy and uses no noise."""

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # the caller resolves a missing seed at admission
    choice: int = 0  # index among a request's choices
