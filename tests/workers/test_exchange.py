"""A drafter is exchanged while requests run: no text changes, and guesses are as if it had been there before."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from drafter.base import DraftLimits, NoDraft
from drafter.scripted import FixedIds
from tests.deployments.fakes import TEXT, VOCAB_SIZE
from tests.drafter.heads import Weights, random_weights, safeailab_config, save_head
from tests.fakes import FakeVerifier, RecordingDrafter, plain_decoding
from tests.workers.fitted import FITTED, NUM_TOKENS, SHAPE, WORDS, fitted_head, make_target
from tests.workers.worlds import World, by_level, staircase
from verifier.errors import DraftreeError
from verifier.sampling import SamplingParams
from verifier.verifier import Verifier
from workers.build import EngineSpec
from workers.config import EngineConfig
from workers.engine import Engine, Result
from workers.exchange import load_drafter
from workers.measuring.contest import ask, load_verifier
from workers.measuring.prompts import Prompt
from workers.sequence import Request

LIMITS = DraftLimits(max_draft=3, draft_top_k=2, max_nodes=4)
CONFIG = EngineConfig(num_pages=96, page_size=8, max_rows=48, limits=LIMITS)


@dataclass(frozen=True)
class Heads:
    """A target, and heads for it."""

    target: Path
    good: Path
    useless: Path  # reads other layers
    related: Path  # useless, but reads what the good one reads
    weights: Weights  # the good one's

    def engine(self, drafter: Path | None) -> Engine:
        verifier = Verifier.load(self.target, num_pages=96, page_size=8, exact=False, max_rows=48)
        engine = Engine(verifier, NoDraft(), CONFIG)
        if drafter:
            self.exchange(engine, drafter)
        return engine

    def exchange(self, engine: Engine, name: Path | str) -> None:
        engine.exchange_drafter(load_drafter(str(name), engine, EngineSpec(model=str(self.target))))


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    folder = tmp_path_factory.mktemp("heads")
    target = make_target(folder / "target")
    asked = ask(TEXT, [Prompt("fish", words) for words in WORDS])
    weights = fitted_head(load_verifier(target, asked, NUM_TOKENS, []), asked)
    reads = {"eagle_aux_hidden_state_layer_ids": list(FITTED)}
    useless = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
    spoilt = weights | {"lm_head.weight": weights["lm_head.weight"].roll(1, 0)}
    return Heads(
        target,
        save_head(folder / "good", weights, safeailab_config(SHAPE) | reads),
        save_head(folder / "useless", random_weights(SHAPE, seed=1), safeailab_config(SHAPE) | useless),
        save_head(folder / "related", spoilt, safeailab_config(SHAPE) | reads),
        weights,
    )


def requests(max_tokens: int = NUM_TOKENS) -> list[Request]:
    prompts = [prompt.ids for prompt in ask(TEXT, [Prompt("fish", words) for words in WORDS])]
    return [Request(f"{i}", ids, SamplingParams(temperature=0), max_tokens) for i, ids in enumerate(prompts)]


def run(engine: Engine, asked: Sequence[Request], meanwhile: Callable[[], None], after: int) -> list[Result]:
    """As `Engine.run`, with something that happens before one of its steps."""
    steps = 0
    step = engine.step

    def counted() -> bool:
        nonlocal steps
        steps += 1
        if steps == after:
            meanwhile()
        return step()

    engine.step = counted  # type: ignore[method-assign]
    results = engine.run(asked)
    engine.step = step  # type: ignore[method-assign]
    return results


def outputs(results: Sequence[Result]) -> list[tuple[int, ...]]:
    return [result.output_ids for result in results]


def guesses(results: Sequence[Result]) -> list[tuple[int, ...]]:
    return [result.usage.drafted_by_position + result.usage.accepted_by_position for result in results]


@pytest.fixture(scope="module")
def truth(heads: Heads) -> list[tuple[int, ...]]:
    return outputs(heads.engine(None).run(requests()))


def test_a_good_head_is_taken_up_while_requests_run(heads: Heads, truth: list[tuple[int, ...]]) -> None:
    """Its projection is another: what runs has no features that it could read, nor have pages that are cached."""
    fresh = heads.engine(heads.good)
    expected = fresh.run(requests())
    engine = heads.engine(heads.useless)
    drafted: list[int] = []

    def exchange() -> None:
        heads.exchange(engine, heads.good)
        drafted.append(engine.counters.speculation.drafted_tokens)

    assert outputs(run(engine, requests(), exchange, after=10)) == truth
    assert engine.counters.speculation.drafted_tokens == drafted[0] > 0, "guesses from features that were not there"
    results = engine.run(requests())  # the same prompts: they would be found in the prefix cache
    assert outputs(results) == truth
    assert guesses(results) == guesses(expected)
    assert engine.counters.cached_tokens == 0
    assert sum(result.usage.accepted_tokens for result in results) > 0.4 * sum(map(len, truth))
    again = engine.run(requests())
    assert outputs(again) == truth
    assert engine.counters.cached_tokens > 0
    assert engine.stats().drafter_failures == 0
    engine.check_integrity()


def test_preempted_requests_are_guessed_at_again(heads: Heads, truth: list[tuple[int, ...]]) -> None:
    """They are computed anew, features included."""
    engine = heads.engine(heads.useless)

    def exchange() -> None:
        heads.exchange(engine, heads.good)
        engine._take_mail()
        for sequence in engine.scheduler.running[1:]:
            engine.scheduler._give_back(sequence)
            engine.scheduler.waiting.append(sequence)

    results = run(engine, requests(), exchange, after=10)
    assert outputs(results) == truth
    accepted = [result.usage.accepted_tokens for result in results]
    assert accepted[0] < 5 < min(accepted[1:])
    engine.check_integrity()


def test_a_head_with_the_same_projection_reads_on(heads: Heads, truth: list[tuple[int, ...]]) -> None:
    engine = heads.engine(heads.related)
    results = run(engine, requests(), lambda: heads.exchange(engine, heads.good), after=4)
    assert outputs(results) == truth
    assert sum(result.usage.accepted_tokens for result in results) > 0.3 * sum(map(len, truth))


def test_back_and_forth_under_one_request(heads: Heads, truth: list[tuple[int, ...]]) -> None:
    """Pages whose features were made for a head, given up and made for it again in part, were found in the cache."""
    engine = heads.engine(heads.good)

    def twice() -> None:
        heads.exchange(engine, heads.useless)
        engine.step()
        heads.exchange(engine, heads.good)

    assert outputs(run(engine, requests(), twice, after=4)) == truth
    fresh = heads.engine(heads.good).run(requests())
    assert guesses(engine.run(requests())) == guesses(fresh)
    engine.check_integrity()


def test_from_no_network_to_a_head_and_back(heads: Heads, truth: list[tuple[int, ...]]) -> None:
    engine = heads.engine(None)
    assert outputs(run(engine, requests(), lambda: heads.exchange(engine, heads.good), after=5)) == truth
    assert engine.counters.speculation.drafted_tokens == 0
    assert outputs(run(engine, requests(), lambda: heads.exchange(engine, "ngram"), after=5)) == truth
    assert engine.counters.speculation.accepted_tokens > 0
    verifier = engine.verifier
    assert isinstance(verifier, Verifier)
    assert not verifier._features
    engine.check_integrity()


def broken(heads: Heads, folder: Path, fault: str) -> str:
    """A draft model's name that cannot be taken up."""
    shape, weights = SHAPE, dict(heads.weights)
    config = {"eagle_aux_hidden_state_layer_ids": list(FITTED)}
    if fault == "width":
        shape = replace(SHAPE, target_hidden=64)
        weights = random_weights(shape)
    elif fault == "vocabulary":
        shape = replace(SHAPE, target_vocab=VOCAB_SIZE + 2000)
        weights = random_weights(shape)
    elif fault == "layers":
        config = {"eagle_aux_hidden_state_layer_ids": [2, 3, 9]}
    elif fault == "numbers":
        weights["fc.weight"] = torch.full_like(weights["fc.weight"], float("nan"))
    save_head(folder, weights, safeailab_config(shape) | config)
    if fault == "tokenizer":
        text = (heads.target / "tokenizer.json").read_text()
        (folder / "tokenizer.json").write_text(text.replace('"a"', '"ä"'))
    elif fault == "file":
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1000])
    return "ngram+nowhere" if fault == "name" else str(folder)


@pytest.mark.parametrize("fault", ["width", "vocabulary", "layers", "numbers", "tokenizer", "file", "name"])
def test_what_does_not_fit_is_refused_and_the_last_one_serves_on(
    heads: Heads, truth: list[tuple[int, ...]], tmp_path: Path, fault: str
) -> None:
    engine = heads.engine(heads.good)
    name = broken(heads, tmp_path / "head", fault)
    sentences: list[str] = []

    def exchange() -> None:
        with pytest.raises(DraftreeError) as refusal:
            heads.exchange(engine, name)
        sentences.append(str(refusal.value))

    results = run(engine, requests(), exchange, after=3)
    assert outputs(results) == truth
    assert guesses(results) == guesses(heads.engine(heads.good).run(requests()))
    assert "\n" not in sentences[0]


def test_what_the_last_drafter_taught_is_forgotten() -> None:
    """Its guesses never came true; the next one's would not have been asked for, but for a probe now and then."""
    config = EngineConfig(num_pages=512, page_size=16, max_rows=64, limits=DraftLimits(5, 1, 5), adaptive=True)
    world = World(staircase, p=0.0, drafting=by_level(0.004), config=config)
    world.tokens_per_s(1)
    good = World(staircase, p=0.9, drafting=by_level(0.004), config=config)
    expected = good.tokens_per_s(1)
    world.drafter.p = 0.9
    world.engine.exchange_drafter(world.drafter)
    assert world.tokens_per_s(1) == pytest.approx(expected, rel=0.05)


def test_counters_go_on_and_sessions_are_closed() -> None:
    def failing() -> RecordingDrafter:
        return RecordingDrafter(FixedIds((VOCAB_SIZE + 1,)))

    first, second = failing(), failing()
    engine = Engine(FakeVerifier(64, 4), first, EngineConfig(num_pages=64, page_size=4, limits=LIMITS))
    request = Request("r", (1, 2, 3), SamplingParams(seed=1), 20)
    failures: list[int] = []

    def exchange() -> None:
        failures.append(engine.stats().drafter_failures)
        engine.exchange_drafter(second)

    results = run(engine, [request], exchange, after=8)
    assert outputs(results) == [plain_decoding(request.prompt_ids, request.sampling, 20)]
    assert 0 < failures[0] < engine.stats().drafter_failures
    assert first.batches
    assert second.batches
    assert not first.open_sessions
    assert not second.open_sessions


def test_an_idle_engine_takes_it_up_at_once() -> None:
    """It sleeps until there is something to do; the last drafter's memory would stay until somebody asks."""
    engine = Engine(FakeVerifier(64, 4), NoDraft(), EngineConfig(num_pages=64, page_size=4))
    engine.start()
    try:
        last = engine.drafter
        engine.exchange_drafter(FixedIds((1,)))
        deadline = time.monotonic() + 10
        while engine.drafter is last:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        engine.stop()
