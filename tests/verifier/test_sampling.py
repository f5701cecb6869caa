from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from verifier import sampling
from verifier.errors import BadRequest
from verifier.sampling import SamplingParams, draw, gumbel_noise, process

SEEDS = st.integers(-(2**63), 2**64 - 1)
POSITIONS = st.integers(0, 2**40)


def logs(probabilities: list[float]) -> torch.Tensor:
    return torch.log(torch.tensor(probabilities))


def survivors(probabilities: list[float], params: SamplingParams) -> list[int]:
    return np.flatnonzero(process(logs(probabilities).numpy(), params) > -np.inf).tolist()


# --- the noise


@given(SEEDS, st.integers(0, 2**64 - 1), POSITIONS, st.lists(st.integers(0, 3000), min_size=1))
def test_the_noise_of_some_tokens_is_what_it_is_among_all(
    seed: int, choice: int, position: int, some: list[int]
) -> None:
    whole = gumbel_noise(seed, choice, position, np.arange(3001))
    assert whole[some].tobytes() == gumbel_noise(seed, choice, position, np.array(some)).tobytes()


def test_the_noise_never_changes() -> None:
    """A replay on another machine or after an upgrade must say the same text, so the numbers themselves are pinned."""
    near, far = gumbel_noise(42, 0, 7, np.arange(4)), gumbel_noise(-1, 3, 2**33, np.array([49150, 49151]))
    assert near.tolist() == pytest.approx(
        [0.5136268557056354, 1.007146789414872, 0.2124461891947744, 3.3303211377429696], rel=1e-12
    )
    assert far.tolist() == pytest.approx([3.0104332783756282, 2.050232391158676], rel=1e-12)


@pytest.mark.parametrize("other", [(43, 0, 7), (-42, 0, 7), (42, 1, 7), (42, 0, 8)])
def test_the_noise_depends_on_seed_choice_and_position(other: tuple[int, int, int]) -> None:
    ours, theirs = gumbel_noise(42, 0, 7, np.arange(1000)), gumbel_noise(*other, np.arange(1000))
    assert not np.any(ours == theirs)
    assert abs(np.corrcoef(ours, theirs)[0, 1]) < 0.17  # 5.4 standard deviations: one in fifteen million


def test_the_noise_is_finite_for_every_word_of_random_bits() -> None:
    """A uniform number of exactly 0 or 1 would make a token impossible, or certain."""
    extremes = sampling._gumbel(np.array([0, 2**64 - 1, 2**63], dtype=np.uint64))
    assert extremes.tolist() == pytest.approx([36.7368, -3.60378, 0.366513], abs=1e-4)


def test_the_noise_follows_the_gumbel_law() -> None:
    noise = gumbel_noise(5, 0, 0, np.arange(200_000))
    cells = np.histogram(np.exp(-np.exp(-noise)), bins=20, range=(0, 1))[0]  # u again, uniform
    chi_square = float(((cells - 10_000) ** 2 / 10_000).sum())
    assert chi_square < 63.68  # 19 degrees of freedom: one seed in a million


# --- the draw


@st.composite
def sampled_params(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([1e-5, 1e-3, 0.1, 0.7, 1.0, 3.0, 100.0])),
        top_k=draw(st.sampled_from([-1, 0, 2, 7, 1000])),
        top_p=draw(st.sampled_from([1.0, 0.95, 0.4, 1e-9])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.9, 1.0])),
        seed=draw(SEEDS),
        choice=draw(st.integers(0, 3)),
    )


@given(
    sampled_params(),
    POSITIONS,
    st.integers(0, 2**32),
    st.sampled_from([1, 2, 3, 40, 3000]),
    st.sampled_from([0.0, 0.3, 3.0, 500.0]),
)
def test_a_draw_is_the_argmax_of_score_plus_noise(
    params: SamplingParams, position: int, logits_seed: int, vocab_size: int, spread: float
) -> None:
    """The draw computes noise for a few contenders only; here is the definition, over the whole vocabulary."""
    rng = np.random.default_rng(logits_seed)
    logits = (rng.standard_normal(vocab_size) * spread).astype(np.float32)
    logits[rng.random(vocab_size) < 0.2] = -np.inf
    logits[rng.integers(vocab_size)] = 1.0
    noise = gumbel_noise(params.seed, params.choice, position, np.arange(vocab_size))
    values = process(logits, params) + noise
    ranked = np.sort(values)[::-1]

    drawn = draw(torch.from_numpy(logits), params, position)

    assert drawn.token == int(np.argmax(values))
    assert drawn.margin == pytest.approx(float(ranked[0] - ranked[1]) if vocab_size > 1 else math.inf, rel=1e-9)


@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 5.0])
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_the_exact_noise_is_computed_for_hardly_any_token(temperature: float, spread: float) -> None:
    logits = (np.random.default_rng(0).standard_normal(50_000) * spread).astype(np.float32)
    scores = process(logits, SamplingParams(temperature))
    counts = [len(sampling._contenders(scores, sampling._random_bits(0, 0, p, 50_000))) for p in range(10)]
    assert max(counts) <= 50


def test_the_greatest_possible_noise_is_not_overlooked() -> None:
    """One word of random bits in four billion has an upper half of zero, and its noise is greater than the rest."""
    scores = np.array([0, 0, -30, 0], dtype=np.float32)
    bits = np.array([2**63, 2**63, 0, 2**62], dtype=np.uint64)
    assert set(sampling._contenders(scores, bits)) >= {2, 3}


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6])
def test_temperatures_near_zero_are_greedy(temperature: float) -> None:
    """Fault: parts that disagreed about which temperature means greedy divided by zero, and NaN logits came out."""
    logits = torch.tensor([1.0, 3.0, 2.5, -math.inf])
    params = [SamplingParams(temperature, seed=seed, top_k=2, top_p=0.1, min_p=0.5) for seed in range(20)]
    assert {draw(logits, each, 5) for each in params} == {(1, 0.5)}


def test_a_small_temperature_that_is_not_greedy_stays_finite() -> None:
    drawn = draw(torch.tensor([90.0, -90.0, 89.0]), SamplingParams(1e-5), 0)
    assert drawn.token == 0
    assert math.isfinite(drawn.margin)


def test_top_k_of_one_is_greedy() -> None:
    """Fault: cuts without a temperature, or the other way round, silently did something else."""
    logits = torch.tensor([1.0, 3.0, 3.0, 2.5])
    assert {draw(logits, SamplingParams(1.5, top_k=1, seed=seed), 0) for seed in range(20)} == {(1, 0.0)}


def test_min_p_near_one_is_all_but_greedy() -> None:
    logits = torch.tensor([1.0, 3.0, 2.9, 2.5])
    assert {draw(logits, SamplingParams(min_p=0.99, seed=seed), 0) for seed in range(20)} == {(1, math.inf)}


def test_different_seeds_and_positions_say_different_things() -> None:
    """Fault: verification fell back to the argmax whatever the temperature, or ignored the seed."""
    logits = torch.zeros(50)
    assert len({draw(logits, SamplingParams(1.2, seed=seed), 0).token for seed in range(30)}) >= 10
    assert len({draw(logits, SamplingParams(1.2, seed=1), position).token for position in range(30)}) >= 10


def test_equal_logits_go_to_the_lowest_id_and_have_no_margin() -> None:
    for vocab_size in (2, 7, 64, 49_152):
        logits = torch.zeros(vocab_size)
        logits[vocab_size // 2 :] = 1.0
        assert draw(logits, SamplingParams(0), 0) == (vocab_size // 2, 0.0 if vocab_size > 2 else 1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_logits_of_any_precision_are_drawn_from(dtype: torch.dtype) -> None:
    logits = torch.tensor([1.0, 3.0, 2.0], dtype=dtype)
    assert draw(logits, SamplingParams(0), 0).token == 1
    assert draw(logits, SamplingParams(seed=4), 9) == draw(logits.float(), SamplingParams(seed=4), 9)


def test_drawing_leaves_the_logits_as_they_are() -> None:
    logits = torch.randn(100)
    before = logits.clone()
    draw(logits, SamplingParams(0.5, top_k=5, top_p=0.5, min_p=0.1), 0)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("broken", [[math.nan, 1.0], [-math.inf, -math.inf], [math.inf, 1.0]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_not_drawn_from(broken: list[float], temperature: float) -> None:
    with pytest.raises(AssertionError, match="broken"):
        draw(torch.tensor(broken), SamplingParams(temperature), 0)


# --- the cuts


def kept_by_vllm(probabilities: list[float], params: SamplingParams) -> list[int]:
    """vLLM's steps in the plainest words: ascending order, cut from below; for probabilities without ties."""
    tempered = [p ** (1 / params.temperature) for p in probabilities]
    kept = {i for i, p in enumerate(tempered) if p >= params.min_p * max(tempered)}
    if params.top_k > 0:
        kept &= set(sorted(range(len(tempered)), key=lambda i: -tempered[i])[: params.top_k])
    ascending = sorted(kept, key=lambda i: tempered[i])
    total = sum(tempered[i] for i in kept)
    mass = 0.0
    for i in ascending[:-1]:
        mass += tempered[i] / total
        assume(abs(mass - (1 - params.top_p)) > 1e-4)  # rounding decides there
        if mass <= 1 - params.top_p:
            kept.remove(i)
    return sorted(kept)


@given(
    st.lists(st.integers(1, 10_000), min_size=1, max_size=12, unique=True),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.integers(-1, 13),
    st.floats(0.01, 1.0),
    st.sampled_from([0.0, 0.0101, 0.1003, 0.7001]),
)
def test_cuts_are_those_of_vllm(weights: list[int], temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    params = SamplingParams(temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assume(not params.is_greedy)
    probabilities = [weight / sum(weights) for weight in weights]
    assert survivors(probabilities, params) == kept_by_vllm(probabilities, params)


def test_top_p_counts_the_mass_that_min_p_and_top_k_left() -> None:
    assert survivors([0.4, 0.3, 0.2, 0.1], SamplingParams(top_p=0.5)) == [0, 1]
    assert survivors([0.4, 0.3, 0.2, 0.1], SamplingParams(top_p=0.5, min_p=0.6)) == [0]
    assert survivors([0.4, 0.3, 0.2, 0.1], SamplingParams(top_p=0.5, top_k=2)) == [0]


def test_the_token_that_reaches_top_p_is_kept() -> None:
    assert survivors([0.1, 0.5, 0.25, 0.15], SamplingParams(top_p=0.51)) == [1, 2]
    assert survivors([0.1, 0.5, 0.25, 0.15], SamplingParams(top_p=1e-6)) == [1]


def test_min_p_is_relative_to_the_best_after_temperature() -> None:
    probabilities = [0.4, 0.22, 0.17, 0.21]
    assert survivors(probabilities, SamplingParams(min_p=0.5)) == [0, 1, 3]
    assert survivors(probabilities, SamplingParams(0.5, min_p=0.29)) == [0, 1]  # (0.21 / 0.4) ** 2 = 0.276


@pytest.mark.parametrize("params", [SamplingParams(top_k=3), SamplingParams(top_p=0.59)])
def test_ties_at_a_cut_go_to_the_lowest_ids(params: SamplingParams) -> None:
    assert survivors([0.2, 0.2, 0.2, 0.2, 0.2], params) == [0, 1, 2]
    assert survivors([0.1, 0.2, 0.2, 0.1, 0.2, 0.2], SamplingParams(top_k=3)) == [1, 2, 4]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=-1), SamplingParams(top_k=99)])
def test_cuts_that_are_off_keep_everything(params: SamplingParams) -> None:
    logits = torch.randn(99).numpy()
    assert process(logits, params).tobytes() == logits.tobytes()


# --- what is refused


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 100.5),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.0001),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("choice", -1),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        SamplingParams(**{field: value})
    assert (caught.value.field, caught.value.value) == (field, value) or value != value
    assert caught.value.allowed


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, -(2**63)])
def test_every_64_bit_seed_works(seed: int) -> None:
    assert draw(torch.zeros(10), SamplingParams(seed=seed), 3).token in range(10)


def test_parameters_are_checked_without_torch() -> None:
    """The driver and the ingress check parameters; neither should load torch for that."""
    code = "import sys, verifier.acceptance, drafter.base; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
