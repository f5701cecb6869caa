"""The lossy option in the engine: it changes the text and says so by its name; nothing else ever runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from drafter.base import DraftLimits
from drafter.scripted import Bushy, FixedIds
from tests.fakes import VOCAB_SIZE, FakeVerifier, _logits, _state, plain_decoding
from verifier.acceptance import Typical
from verifier.errors import BadSetting
from verifier.sampling import SamplingParams, draw, process
from workers import step
from workers.config import Acceptance, EngineConfig
from workers.engine import Engine, Result
from workers.sequence import Request

NUM_TOKENS = 60


def serve(requests: Sequence[Request], acceptance: Acceptance) -> tuple[list[Result], Engine]:
    """With guesses that are wrong as a rule, four below each node."""
    drafter = Bushy(FixedIds((3, 1, 4, 1, 5)), vocab_size=VOCAB_SIZE)
    config = EngineConfig(64, 4, max_rows=40, limits=DraftLimits(3, 4, 16), acceptance=acceptance)
    engine = Engine(FakeVerifier(64, 4), drafter, config)
    results = engine.run(requests)
    engine.check_integrity()
    assert engine.stats().drafter_failures == 0
    return results, engine


def requests(temperature: float) -> list[Request]:
    sampling = [SamplingParams(temperature=temperature, top_p=0.9, seed=seed) for seed in range(4)]
    return [Request(str(i), tuple(range(5, 15 + i)), each, NUM_TOKENS) for i, each in enumerate(sampling)]


def plainly(request: Request) -> tuple[int, ...]:
    return plain_decoding(request.prompt_ids, request.sampling, request.max_tokens)


def refuse(*args: Any) -> Any:
    raise AssertionError("the lossy rule was used")


def test_exact_acceptance_is_the_default_and_never_comes_near_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EngineConfig(1).acceptance == "exact"
    monkeypatch.setattr(step, "walk_typically", refuse)
    results, _ = serve(requests(1.0), "exact")
    assert [result.output_ids for result in results] == [plainly(request) for request in requests(1.0)]


def test_temperature_0_leaves_nothing_to_relax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "walk_typically", refuse)
    results, _ = serve(requests(0.0), "typical-lossy")
    assert [result.output_ids for result in results] == [plainly(request) for request in requests(0.0)]


def test_typical_acceptance_says_something_else_in_fewer_steps() -> None:
    """Every token is what would have been drawn after those before it, or a guess that is likely enough there."""
    exact, exactly = serve(requests(1.0), "exact")
    lossy, lossily = serve(requests(1.0), "typical-lossy")
    num_guessed = 0
    for request, result, truth in zip(requests(1.0), lossy, exact, strict=True):
        assert result.output_ids != truth.output_ids
        assert len(result.output_ids) == NUM_TOKENS
        ids, states = list(request.prompt_ids), list[int]()
        for token in result.output_ids:
            for position in range(len(states), len(ids)):
                states.append(_state(ids[position], position, states))
            logits = _logits(states[-1])
            if token != draw(logits, request.sampling, len(ids)).token:
                typical = Typical.of(process(logits.numpy(), request.sampling))
                assert typical.log_probs[token] > typical.log_threshold
                num_guessed += 1
            ids.append(token)
        assert result.usage.accepted_tokens == sum(result.usage.accepted_by_position)
    assert num_guessed > 10
    assert lossily.stats().counters.steps < exactly.stats().counters.steps


def test_there_are_two_rules() -> None:
    with pytest.raises(BadSetting, match="acceptance is 'typical', but must be exact or typical-lossy"):
        EngineConfig(1, acceptance="typical")  # type: ignore[arg-type]
