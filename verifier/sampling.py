"""From logits to the one token: parameters, the processed distribution, the counter-based noise, the draw.

Knows nothing of trees, requests or models. Needs no torch of its own, so that parameters can be checked without it.

A token is ``argmax(score + g)``: the score is the processed logit (log p up to a constant that cannot change the
argmax), and ``g = -log(-log u)`` is Gumbel noise with ``u`` a function of (seed, choice, position, token id) alone. The
winner is then distributed exactly as p, and it is fixed before anybody knows in which batch, tree or step it is asked
for. Equal scores go to the lowest token id, in every cut and in the argmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verifier.errors import BadRequest

if TYPE_CHECKING:
    import torch

Scores = NDArray[np.float32]

GREEDY_BELOW = 1e-5  # temperatures below this are greedy, as in vLLM; dividing by less would overflow fp32 logits
MAX_TEMPERATURE = 100.0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is chosen. Temperature 0 is greedy and uses no noise.

    The cuts follow vLLM's order: temperature, min-p, top-k, top-p.

    Raises:
        BadRequest: a value outside its range; NaN is outside of every range.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0  # relative to the greatest probability after temperature
    seed: int = 0  # any 64-bit integer, signed or not; the caller resolves a missing seed at admission
    choice: int = 0  # index among a request's choices

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise BadRequest("temperature", self.temperature, f"a number from 0 to {MAX_TEMPERATURE:g}")
        if not self.top_k >= -1:
            raise BadRequest("top_k", self.top_k, "a positive integer, or 0 or -1 for no limit")
        if not 0 < self.top_p <= 1:
            raise BadRequest("top_p", self.top_p, "a number above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise BadRequest("min_p", self.min_p, "a number from 0 to 1")
        if not -(2**63) <= self.seed < 2**64:
            raise BadRequest("seed", self.seed, "an integer of at most 64 bits")
        if not 0 <= self.choice < 2**64:
            raise BadRequest("choice", self.choice, "an integer, 0 or more")

    @property
    def is_greedy(self) -> bool:
        """Whether the token is the best one whatever the noise."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1


class Draw(NamedTuple):
    """``margin``: how far score + noise of the token lies above the next best; inf when no other token was possible.

    A change of the logits by less than half of it cannot change the token, unless it moves a token across a cut.
    """

    token: int
    margin: float


def draw(logits: torch.Tensor, params: SamplingParams, position: int) -> Draw:
    """The token at absolute ``position``, given its logits [vocab]. Nothing else in the system draws tokens.

    Logits on a GPU are copied here first, so that there is one noise and one draw whatever they were computed on.
    """
    scores = process(logits.float().cpu().numpy(), params)
    assert np.isfinite(scores.max()), "the model's logits are broken: NaN, infinite, or nothing allowed"
    if params.is_greedy:
        return _best(scores)
    bits = _random_bits(params.seed, params.choice, position, len(scores))
    ids = _contenders(scores, bits)
    token, margin = _best(scores[ids] + _gumbel(bits[ids]))
    return Draw(int(ids[token]), margin)


def process(logits: Scores, params: SamplingParams) -> Scores:
    """Scores [vocab] after temperature and cuts: log p up to a constant, -inf where p is 0. Greedy: the logits."""
    if params.is_greedy:
        return logits
    scores = logits / np.float32(params.temperature)
    if params.min_p > 0:
        scores[scores < scores.max() + np.log(params.min_p)] = -np.inf
    if params.top_k > 0 or params.top_p < 1:
        _keep_best(scores, params.top_k, params.top_p)
    return scores


def gumbel_noise(seed: int, choice: int, position: int, ids: NDArray[np.integer]) -> NDArray[np.float64]:
    """The noise of the tokens ``ids``, one or more, in any order."""
    return _gumbel(_random_bits(seed, choice, position, int(ids.max()) + 1)[ids])


def _keep_best(scores: Scores, top_k: int, top_p: float) -> None:
    """Excludes in place all but the ``top_k`` best, and of these all but the fewest that hold ``top_p`` of the mass."""
    ranked = np.sort(scores)[::-1][:top_k] if top_k > 0 else scores  # numpy sorts fp32 faster than it selects
    if top_p < 1:
        weights = np.exp(ranked - scores.max())
        total = float(weights.sum(dtype=np.float64))
        # Tokens lighter than this hold less than 1 - top_p together, so that the rest reaches top_p without them.
        light = (1 - top_p) / 2 * total / len(weights)
        ranked = np.sort(ranked[weights > light])[::-1]
        mass = np.cumsum(np.exp(ranked - ranked[0]), dtype=np.float64)
        ranked = ranked[: np.searchsorted(mass, top_p * total) + 1]
    worst = ranked[-1]
    keep = scores > worst
    keep[np.flatnonzero(scores == worst)[: len(ranked) - np.count_nonzero(keep)]] = True
    scores[~keep] = -np.inf


def _random_bits(seed: int, choice: int, position: int, num_ids: int) -> NDArray[np.uint64]:
    """One 64-bit word for each token id, four to a block: Philox with key (seed, choice), counter (block, position)."""
    key = np.array([seed % 2**64, choice], dtype=np.uint64)
    counter = np.array([0, position, 0, 0], dtype=np.uint64)
    return np.random.Philox(counter=counter, key=key).random_raw(num_ids)


def _gumbel(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """-log(-log u) with u = 1 - v, where v is the upper 52 bits and a half: never 0 or 1, and 1 - v is exact."""
    v = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    noise: NDArray[np.float64] = -np.log(-np.log(1.0 - v))
    return noise


def _contenders(scores: Scores, bits: NDArray[np.uint64]) -> NDArray[np.intp]:
    """Ascending ids that contain the best and the second best of score + noise, and hardly more.

    As -log(1 - v) >= v, the noise is at most -log v, and less of v only makes that larger. So score - log(the upper
    32 bits of v) is an upper bound that one pass in fp32 gives for the whole vocabulary. Whoever's bound lies below the
    exact values of two tokens is not among the two best. The two tokens are those with the greatest bounds.
    """
    upper = (bits >> np.uint64(32)).view(np.int64).astype(np.float32)
    log_v = np.log(np.maximum(upper, np.float32(2.0**-21)))  # v is at least 2**-53
    bounds = scores - scores.max() - log_v + np.float32(32 * np.log(2.0))
    first = int(np.argmax(bounds))
    first_bound, bounds[first] = bounds[first], -np.inf
    two = np.array([first, int(np.argmax(bounds))])
    bounds[first] = first_bound
    floor = float(np.min(scores[two] + _gumbel(bits[two]))) - float(scores.max())
    rounding = 1e-3 + 1e-6 * abs(floor) if np.isfinite(floor) else 0.0
    return np.flatnonzero(bounds >= max(floor - rounding, float(np.finfo(np.float32).min)))


def _best(values: NDArray[np.floating]) -> Draw:
    token = int(np.argmax(values))  # the first of equals
    best = float(values[token])
    rest = max(values[:token].max(initial=-np.inf), values[token + 1 :].max(initial=-np.inf))
    return Draw(token, best - float(rest))
