"""The engine's loop on a fake verifier: ends, limits, failures, figures, threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from inspect import getsource
from random import Random
from threading import Event, Thread

import pytest

from drafter.base import Drafter, DraftLimits, DraftRequest, NoDraft
from drafter.scored import ScoredTree
from drafter.scripted import Anti, Bushy, Mixed, Oracle
from tests.fakes import (
    VOCAB_SIZE,
    AnsweringDrafter,
    FakeVerifier,
    RecordingDrafter,
    chain,
    plain_decoding,
)
from verifier.batch import StepPlan
from verifier.errors import BadRequest, BadSetting
from verifier.sampling import SamplingParams
from verifier.verifier import StepOutput
from workers.engine import Engine, EngineConfig, EngineDead, Result
from workers.measuring.clockwork import ManualClock
from workers.sequence import Progress, Request

LIMITS = DraftLimits(max_draft=4, draft_top_k=2, max_nodes=10)
PATIENCE_S = 20.0


def truth(request: Request) -> tuple[int, ...]:
    """What plain decoding says, up to max_tokens."""
    return plain_decoding(request.prompt_ids, request.sampling, request.max_tokens)


def continuation(requests: Sequence[Request], num_tokens: int = 40) -> Callable[[Sequence[int]], Sequence[int]]:
    """For oracles: what the requests' texts go on with, beyond their limits too."""
    texts = [(*r.prompt_ids, *plain_decoding(r.prompt_ids, r.sampling, num_tokens)) for r in requests]
    return lambda ids: next((text[len(ids) :] for text in texts if text[: len(ids)] == tuple(ids)), ())


def make_requests(count: int, *, seed: int = 0, max_tokens: int = 30, max_prompt: int = 30) -> list[Request]:
    random = Random(seed)
    return [
        Request(
            f"{seed}-{i}",
            tuple(random.randrange(VOCAB_SIZE) for _ in range(random.randint(2, max_prompt))),
            SamplingParams(temperature=i % 2, seed=i),
            random.randint(1, max_tokens),
        )
        for i in range(count)
    ]


def make_engine(
    drafter: Drafter | None = None, *, num_pages: int = 64, page_size: int = 4, **settings: object
) -> Engine:
    config = EngineConfig(num_pages, page_size, **{"max_rows": 48, "limits": LIMITS, **settings})  # type: ignore[arg-type]
    return Engine(FakeVerifier(num_pages, page_size), drafter or NoDraft(), config)


def fake_of(engine: Engine) -> FakeVerifier:
    assert isinstance(engine.verifier, FakeVerifier)
    return engine.verifier


def check_clean(engine: Engine) -> None:
    engine.check_integrity()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)


class Listener:
    """Keeps what it is told, and checks the order of events."""

    def __init__(self) -> None:
        self.events: list[Progress] = []
        self.ended = Event()

    def __call__(self, progress: Progress) -> None:
        assert not self.ended.is_set(), "something came after the finish"
        assert progress.tokens or progress.finish, "an event that says nothing"
        self.events.append(progress)
        if progress.finish:
            assert progress.usage is not None
            self.ended.set()

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for event in self.events for token in event.tokens)

    @property
    def finish(self) -> str | None:
        return self.events[-1].finish if self.events else None


# ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("max_tokens", range(1, 21))
@pytest.mark.parametrize("p", [1.0, 0.5])
def test_exactly_max_tokens_are_written_and_counted(max_tokens: int, p: float) -> None:
    """Elsewhere a whole accepted run was charged before it was cut, or a run of four came out of a budget of one."""
    request = Request("r", (1, 2, 3), SamplingParams(temperature=0), max_tokens)
    engine = make_engine(Mixed(continuation([request]), p, vocab_size=VOCAB_SIZE))
    result = engine.run([request])[0]
    assert result.output_ids == truth(request)
    assert result.finish == "length"
    assert (result.usage.prompt_tokens, result.usage.output_tokens) == (3, max_tokens)
    assert result.usage.accepted_tokens <= max_tokens
    check_clean(engine)


@pytest.mark.parametrize("place", range(12))
def test_a_stop_id_ends_the_text_wherever_in_a_run_it_falls(place: int) -> None:
    request = Request("r", (1, 2, 3), SamplingParams(temperature=0), 30)
    text = truth(request)
    stop = text[place]
    request = Request("r", request.prompt_ids, request.sampling, 30, frozenset({stop}))
    engine = make_engine(Oracle(continuation([request])))
    listener = Listener()
    engine.submit(request, listener)
    while engine.step():
        pass
    assert listener.tokens == text[: text.index(stop) + 1]
    assert listener.finish == "stop"
    usage = listener.events[-1].usage
    assert usage is not None
    assert usage.output_tokens == text.index(stop) + 1
    assert usage.accepted_tokens == sum(usage.accepted_by_position) <= usage.output_tokens
    assert usage.accepted_tokens <= usage.drafted_tokens
    assert usage.verified_tokens == usage.output_tokens - 1, "the first token comes of the prompt"
    check_clean(engine)


def test_what_lies_beyond_a_stop_id_is_not_in_the_prefix_cache() -> None:
    """A next turn begins with the text up to the stop id, and may differ from what was drafted behind it."""
    request = Request("r", (1, 2, 3), SamplingParams(temperature=0), 30)
    text = truth(request)
    stopped = Request("r", request.prompt_ids, request.sampling, 30, frozenset({text[2]}))
    engine = make_engine(Oracle(continuation([request])), page_size=1)
    assert engine.run([stopped])[0].output_ids == text[: text.index(text[2]) + 1]
    next_turn = (*stopped.prompt_ids, *text[: text.index(text[2]) + 1], 7, 8)
    following = Request("next", next_turn, request.sampling, 10)
    result = engine.run([following])[0]
    assert result.output_ids == truth(following)
    assert result.usage.cached_tokens >= len(next_turn) - 3


@pytest.mark.parametrize("num_prompt", range(120, 128))
def test_the_context_ends_at_exactly_its_limit(num_prompt: int) -> None:
    """Elsewhere five tokens were drafted with four slots left, and a resumed request was padded beyond the limit."""
    request = Request("r", tuple(i % VOCAB_SIZE for i in range(num_prompt)), SamplingParams(temperature=0), 50)
    for widen in (False, True):
        oracle = Oracle(continuation([request]))
        drafter = RecordingDrafter(Bushy(oracle, vocab_size=VOCAB_SIZE) if widen else oracle)
        engine = make_engine(drafter, max_model_len=128, limits=DraftLimits(8, 2, 20))
        result = engine.run([request])[0]
        assert result.output_ids == truth(request)[: 128 - num_prompt]
        assert result.finish == "length"
        for batch in drafter.batches:
            for asked in batch:
                assert asked.limits.max_draft <= 128 - num_prompt - 1
        for plan in fake_of(engine).plans:
            for segment in plan.segments:
                assert segment.start + max(segment.tree.depths) + 1 < 128, "its bonus token would lie beyond the limit"
        check_clean(engine)


def test_preempted_near_the_limit_of_the_context() -> None:
    prompts = [tuple((i + j) % VOCAB_SIZE for j in range(109 + i)) for i in range(4)]
    requests = [Request(f"{i}", prompt, SamplingParams(seed=i), 50) for i, prompt in enumerate(prompts)]
    drafter = Mixed(continuation(requests), 0.2, vocab_size=VOCAB_SIZE)
    engine = make_engine(drafter, num_pages=124, page_size=2, max_model_len=128, limits=DraftLimits(8, 1, 8))
    for request, result in zip(requests, engine.run(requests), strict=True):
        assert len(request.prompt_ids) + len(result.output_ids) == 128
        assert result.output_ids == truth(request)[: len(result.output_ids)]
    assert engine.stats().counters.preemptions > 0
    check_clean(engine)


def test_a_replay_goes_on_where_it_was() -> None:
    """The tokens so far stay output: they count for max_tokens and usage, and are not reported again."""
    request = Request("r", (1, 2, 3), SamplingParams(seed=5), 20)
    text = truth(request)
    for done in range(21):
        replay = Request("r", (1, 2, 3), request.sampling, 20, output_ids=text[:done])
        engine = make_engine(Oracle(continuation([request])))
        result = engine.run([replay])[0]
        assert result.output_ids == text[done:]
        assert (result.usage.prompt_tokens, result.usage.output_tokens, result.finish) == (3, 20, "length")
        assert engine.stats().counters.steps > 0 or done == 20
        check_clean(engine)


# ── many at once ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("max_lanes", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_a_request_among_others_says_what_it_says_alone(seed: int, max_lanes: int) -> None:
    random = Random(seed)
    requests = make_requests(16, seed=seed)
    mixed = Mixed(continuation(requests), 0.7, vocab_size=VOCAB_SIZE)
    engine = make_engine(
        RecordingDrafter(Bushy(mixed, vocab_size=VOCAB_SIZE)),
        num_pages=random.choice((16, 40)),
        max_running=8,
        max_lanes=max_lanes,
    )
    listeners = {request.id: Listener() for request in requests}
    for request in requests:
        engine.submit(request, listeners[request.id])
        for _ in range(random.randrange(4)):
            engine.step()
        engine.check_integrity()
    while engine.step():
        engine.check_integrity()
    for request in requests:
        assert listeners[request.id].tokens == truth(request)
    check_clean(engine)


@pytest.mark.parametrize("max_lanes", [1, 2])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_no_page_is_lost_however_requests_end(page_size: int, max_lanes: int) -> None:
    """Elsewhere every speculative request lost two pages."""
    random = Random(page_size)
    requests = make_requests(200, max_tokens=9, max_prompt=16)
    drafter = RecordingDrafter(Bushy(Oracle(continuation(requests, 9)), vocab_size=VOCAB_SIZE))
    engine = make_engine(drafter, num_pages=256 // page_size, page_size=page_size, max_running=12, max_lanes=max_lanes)
    ends = dict.fromkeys(("stop", "length", "abort"), 0)
    listeners = []
    for request in requests:
        stop_ids = frozenset({random.randrange(VOCAB_SIZE)})
        listeners.append(Listener())
        engine.submit(
            Request(request.id, request.prompt_ids, request.sampling, request.max_tokens, stop_ids), listeners[-1]
        )
        engine.step()
        engine.check_integrity()
        if engine.inbox.live and random.random() < 0.3:
            engine.abort(random.choice(engine.inbox.live).request.id)
    while engine.step():
        pass
    for listener in listeners:
        ends[listener.finish or ""] += 1
    assert min(ends.values()) > 5
    assert not drafter.open_sessions
    check_clean(engine)


def test_steps_keep_to_their_rows() -> None:
    requests = make_requests(10)
    engine = make_engine(Bushy(Oracle(continuation(requests)), vocab_size=VOCAB_SIZE), max_rows=9, max_running=9)
    engine.run(requests)
    rows = [plan.num_rows for plan in fake_of(engine).plans]
    assert max(rows) == 9
    assert engine.stats().counters.rows == sum(rows)


def test_of_a_prompt_only_the_last_row_is_scored() -> None:
    """The output head over a large vocabulary costs as much as several layers."""
    engine = make_engine(max_rows=16)
    engine.run([Request("r", tuple(range(20)) * 2, SamplingParams(), 1)])
    assert [(len(s.tree), s.num_scored) for plan in fake_of(engine).plans for s in plan.segments] == [
        (16, 0),
        (16, 0),
        (8, 1),
    ]


def test_the_loop_fits_on_a_screen() -> None:
    loop = (Engine.step, Engine._begin, Engine._complete, Engine._verify, Engine._commit)
    assert sum(len(getsource(part).splitlines()) + 1 for part in loop) <= 60


def test_guesses_displace_nobody() -> None:
    """With a drafter that is always wrong, every prompt chunk, root and preemption is that of plain decoding."""
    requests = make_requests(12, max_prompt=60)

    def scheduled(drafter: Drafter) -> tuple[list[list[tuple[int, int]]], int]:
        engine = make_engine(drafter, num_pages=25, max_rows=20, max_running=6, prefix_cache=False)
        engine.run(requests)
        chunks = [
            [(s.start, 1 if s.scored_from == 0 else len(s.tree)) for s in plan.segments]
            for plan in fake_of(engine).plans
        ]
        return chunks, engine.stats().counters.preemptions

    plain = scheduled(NoDraft())
    assert plain[1] > 0
    assert scheduled(Bushy(Anti(continuation(requests), vocab_size=VOCAB_SIZE), vocab_size=VOCAB_SIZE)) == plain


@pytest.mark.parametrize("page_size", [4, 8, 16])
def test_a_prompt_that_another_request_holds_is_copied_before_it_is_written(page_size: int) -> None:
    """All of the prompt is cached, in pages of a running request; its last token is computed again, elsewhere."""
    longer = Request("longer", tuple(range(20)), SamplingParams(seed=1), 30)
    whole = Request("whole", tuple(range(16)), SamplingParams(seed=2), 30)
    engine = make_engine(Bushy(Oracle(continuation([longer, whole])), vocab_size=VOCAB_SIZE), page_size=page_size)
    listeners = [Listener(), Listener()]
    engine.submit(longer, listeners[0])
    engine.step()
    engine.submit(whole, listeners[1])
    while engine.step():
        engine.check_integrity()
    assert [listener.tokens for listener in listeners] == [truth(longer), truth(whole)]
    assert len(fake_of(engine).page_copies) == 1
    usage = listeners[1].events[-1].usage
    assert usage is not None
    assert usage.cached_tokens == 15
    check_clean(engine)


def test_prefixes_are_shared_with_equal_salts_only() -> None:
    prompt = tuple(range(20))
    engine = make_engine()
    cached = [
        engine.run([Request("r", prompt, SamplingParams(), 2, salt=salt)])[0].usage.cached_tokens
        for salt in (b"a", b"b", b"a")
    ]
    assert cached == [0, 0, 19]


def test_guesses_do_not_drive_prefixes_out_of_the_cache() -> None:
    """Elsewhere drafting halved the reuse between turns without a word. Here it costs its look-ahead pages, once.

    Four chats of five turns in a pool that holds all of them.
    """
    page_size = 4

    def cached_tokens(drafter: Drafter) -> int:
        engine = make_engine(drafter, num_pages=4 * 24, page_size=page_size)
        chats: list[tuple[int, ...]] = [(i, i, i) for i in range(4)]
        for turn in range(5):
            requests = [Request(f"{i}", (*chat, i, turn), SamplingParams(seed=i), 16) for i, chat in enumerate(chats)]
            results = engine.run(requests)
            chats = [(*r.prompt_ids, *result.output_ids) for r, result in zip(requests, results, strict=True)]
        return engine.stats().counters.cached_tokens

    guessing = AnsweringDrafter(lambda batch: {r.sequence: chain(r.ids[-1], 1, 2, 3, 4) for r in batch})
    plain = cached_tokens(NoDraft())
    assert plain > 4 * 4 * 16
    assert cached_tokens(guessing) >= plain - 4 * 5 * page_size


def test_cached_tokens_are_part_of_the_prompt() -> None:
    """A preempted request finds its own output in the cache; that is no cached prompt."""
    requests = make_requests(8, max_tokens=60, max_prompt=8)
    engine = make_engine(num_pages=20)
    assert [result.usage.cached_tokens for result in engine.run(requests)] == [0] * 8
    assert engine.stats().counters.preemptions > 0
    assert engine.stats().counters.cached_tokens > 0
    again = engine.run([Request("again", requests[0].prompt_ids + truth(requests[0])[:20], SamplingParams(), 5)])[0]
    assert again.usage.cached_tokens <= again.usage.prompt_tokens


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_figures_of_a_known_pattern() -> None:
    """Right, wrong, right, right in each of ten rounds. Elsewhere tokens after the first rejection were counted."""
    request = Request("r", (1, 2, 3), SamplingParams(temperature=0), 100)
    true = continuation([request])

    def pattern(batch: Sequence[DraftRequest]) -> Mapping[int, ScoredTree]:
        right = true(batch[0].ids)[:4]
        guesses = (right[0], (right[1] + 1) % VOCAB_SIZE, right[2], right[3])
        return {batch[0].sequence: chain(batch[0].ids[-1], *guesses)}

    engine = make_engine(AnsweringDrafter(pattern))
    engine.submit(request, Listener())
    for _ in range(1 + 10):  # the prompt, and ten rounds
        engine.step()
    speculation = engine.stats().counters.speculation
    assert (speculation.accepted_tokens, speculation.drafted_tokens, speculation.steps) == (10, 40, 10)
    assert speculation.acceptance_rate == 0.25
    assert speculation.mean_acceptance_length == 2.0
    assert speculation.acceptance_where_tried == (1.0, 0.0)


def test_each_phase_takes_its_time_from_the_clock() -> None:
    clock = ManualClock()

    class SlowVerifier(FakeVerifier):
        def forward(self, plan: StepPlan) -> StepOutput:
            clock.now += 2.0
            return super().forward(plan)

    def dawdle(batch: Sequence[DraftRequest]) -> Mapping[int, ScoredTree]:
        clock.now += 0.5
        return {}

    config = EngineConfig(16, 4, limits=LIMITS, max_rows=64, draft_deadline_s=0.25)
    engine = Engine(SlowVerifier(16, 4), AnsweringDrafter(dawdle), config, clock)
    engine.run([Request("r", (1, 2), SamplingParams(), 3)])  # guesses once: with one token left it may not
    stats = engine.stats()
    assert (stats.counters.verify_s, stats.counters.propose_s) == (6.0, 0.5)
    assert (stats.counters.schedule_s, stats.counters.commit_s) == (0.0, 0.0)
    assert (stats.late_drafts, stats.drafter_failures) == (1, 0)


@pytest.mark.parametrize("pass_number", [1, 3])
def test_near_ties_are_counted(pass_number: int) -> None:
    """One draw more than without it, whose runner-up is 1e-4 away: be it after a prompt or after a token."""

    class Tied(FakeVerifier):
        def forward(self, plan: StepPlan) -> StepOutput:
            output = super().forward(plan)
            if len(self.plans) == pass_number:
                best = output.logits[0][0].argmax()
                output.logits[0][0][(best + 1) % VOCAB_SIZE] = output.logits[0][0][best] - 1e-4
            return output

    def near_ties(verifier: FakeVerifier) -> int:
        engine = Engine(verifier, NoDraft(), EngineConfig(16, 4, max_rows=64))
        engine.run([Request("r", (1, 2), SamplingParams(temperature=0), 12)])
        return engine.stats().counters.near_ties

    assert near_ties(Tied(16, 4)) == near_ties(FakeVerifier(16, 4)) + 1


def test_a_fresh_engine_has_figures() -> None:
    stats = make_engine().stats()
    assert (stats.running, stats.waiting, stats.pages_total, stats.pages_free) == (0, 0, 64, 64)
    assert stats.counters.speculation.acceptance_rate is None


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(BadSetting, match="max_running is 100"):
        EngineConfig(4, max_running=100, max_rows=64)
    with pytest.raises(BadSetting, match="page_size is 0"):
        EngineConfig(4, page_size=0)
    with pytest.raises(BadSetting, match="draft_deadline_s"):
        EngineConfig(4, draft_deadline_s=0.0)


def test_no_more_run_than_the_verifier_takes_rows() -> None:
    """How many rows exact mode leaves is only known once the model is loaded, where a refusal came as a traceback."""
    engine = Engine(FakeVerifier(64, 4, max_rows=3), NoDraft(), EngineConfig(64, 4, max_running=16))
    for request in make_requests(5):
        engine.submit(request, lambda progress: None)
    most_running = 0
    while engine.step():
        most_running = max(most_running, engine.stats().running)
    assert most_running == 3
    check_clean(engine)


def test_an_id_serves_one_request_at_a_time() -> None:
    engine = make_engine()
    request = Request("r", (1, 2), SamplingParams(), 2)
    engine.submit(request, Listener())
    with pytest.raises(BadRequest, match="'r'"):
        engine.submit(request, Listener())
    while engine.step():
        pass
    engine.submit(request, Listener())
    while engine.step():
        pass
    check_clean(engine)


def test_a_refused_request_leaves_no_trace() -> None:
    engine = make_engine(num_pages=2, page_size=4)
    with pytest.raises(BadRequest):
        engine.submit(Request("r", (1, 2), SamplingParams(), 50), Listener())
    assert not engine.step()
    check_clean(engine)


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_drafter_that_fails_costs_its_guesses_only() -> None:
    requests = make_requests(4)
    random = Random(0)

    def fail_now_and_then(batch: Sequence[DraftRequest]) -> Mapping[int, ScoredTree]:
        kind = random.randrange(4)
        if kind == 0:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
        if kind == 1:
            return {request.sequence: chain(*request.ids[-1:], VOCAB_SIZE) for request in batch}
        if kind == 2:
            return {request.sequence: chain(request.ids[-1] + 1, 3) for request in batch}
        return {request.sequence: chain(request.ids[-1], 3, 3) for request in batch}

    engine = make_engine(AnsweringDrafter(fail_now_and_then))
    for request, result in zip(requests, engine.run(requests), strict=True):
        assert result.output_ids == truth(request)
    assert engine.stats().drafter_failures > 0
    assert engine.stats().counters.speculation.drafted_tokens > 0
    check_clean(engine)


def test_trees_of_an_earlier_step_do_no_harm() -> None:
    """A late answer of another moment: where its root happens to fit it is as good as any guess, else it is dropped."""
    requests = make_requests(8, max_tokens=60)
    answers: list[Mapping[int, ScoredTree]] = [{}, {}]
    true = continuation(requests)

    def two_steps_late(batch: Sequence[DraftRequest]) -> Mapping[int, ScoredTree]:
        answers.append({r.sequence: chain(r.ids[-1], *true(r.ids)[: r.limits.max_draft]) for r in batch})
        return answers.pop(0)

    engine = make_engine(AnsweringDrafter(two_steps_late), num_pages=22)
    for request, result in zip(requests, engine.run(requests), strict=True):
        assert result.output_ids == truth(request)
    assert engine.stats().drafter_failures > 0
    assert engine.stats().counters.preemptions > 0
    check_clean(engine)


def is_poisoned(plan: StepPlan) -> bool:
    return any(22 in segment.tree.tokens[:1] and segment.start == 0 for segment in plan.segments)


def test_a_request_that_breaks_its_step_fails_alone() -> None:
    """Its neighbours have the same turn again, and their text is the same. Page copies are not done again: a page
    that was copied, freed and lent to a neighbour in one step may have been written to when the step failed.
    """
    healthy = [Request(f"{i}", tuple(range(16 + 4 * (i == 0))), SamplingParams(seed=i), 20) for i in range(4)]
    poisoned = Request("poisoned", (22, 1, 2), SamplingParams(), 20)
    engine = make_engine(Bushy(Oracle(continuation(healthy)), vocab_size=VOCAB_SIZE))
    num_copies: list[int] = []  # by each pass from the failed one to the last of its parts

    def forward(plan: StepPlan) -> None:
        if is_poisoned(plan) or 0 < len(num_copies) < 6:
            num_copies.append(len(fake_of(engine).page_copies))
        if is_poisoned(plan):
            raise RuntimeError("device-side assert")

    fake_of(engine).on_forward = forward
    engine.run(healthy[:1])  # fills the prefix cache
    results = {result.request_id: result for result in engine.run([*healthy, poisoned])}
    failed = results.pop("poisoned")
    assert (failed.finish, failed.error, failed.output_ids) == ("error", "RuntimeError: device-side assert", ())
    for request in healthy:
        assert results[request.id].output_ids == truth(request)
    assert len(num_copies) == 6, "the step of five, and each of them alone"
    assert num_copies[0] > 0
    assert len(set(num_copies)) == 1
    assert engine.dead is None
    assert engine.stats().counters.step_failures == 2
    check_clean(engine)


def test_broken_logits_fail_their_request_alone() -> None:
    class Broken(FakeVerifier):
        def forward(self, plan: StepPlan) -> StepOutput:
            output = super().forward(plan)
            for segment, logits in zip(plan.segments, output.logits, strict=True):
                if segment.tree.tokens[0] == 22 and segment.start == 0:
                    logits.fill_(float("nan"))
            return output

    engine = Engine(Broken(64, 4), NoDraft(), EngineConfig(64, 4, max_rows=64))
    good = Request("good", (1, 2), SamplingParams(), 5)
    results = engine.run([good, Request("bad", (22, 1), SamplingParams(), 5)])
    assert [result.finish for result in results] == ["length", "error"]
    assert results[0].output_ids == truth(good)
    check_clean(engine)


def test_a_failure_that_passes_fails_nobody() -> None:
    requests = make_requests(5)
    engine = make_engine(Bushy(Oracle(continuation(requests)), vocab_size=VOCAB_SIZE), num_pages=40)
    calls = 0

    def forward(plan: StepPlan) -> None:
        nonlocal calls
        calls += 1
        if len(plan.segments) > 1 and calls % 3 == 0:
            raise MemoryError

    fake_of(engine).on_forward = forward
    for request, result in zip(requests, engine.run(requests), strict=True):
        assert result.output_ids == truth(request)
    assert engine.stats().counters.step_failures > 0
    check_clean(engine)


def test_a_broken_verifier_ends_everything_and_says_why() -> None:
    engine = make_engine(max_running=2)
    listeners = [Listener() for _ in range(5)]
    for request, listener in zip(make_requests(5), listeners, strict=True):
        engine.submit(request, listener)
    engine.step()

    calls = []

    def forward(plan: StepPlan) -> None:
        calls.append(plan)
        raise RuntimeError("the GPU fell off the bus")

    fake_of(engine).on_forward = forward
    assert not engine.step()
    assert not engine.step()
    assert len(calls) == 3, "the step, its first sequence alone, one more token to make sure"
    assert [listener.finish for listener in listeners] == ["error"] * 5
    assert engine.dead == "the verifier is broken: RuntimeError: the GPU fell off the bus"
    with pytest.raises(EngineDead, match="fell off the bus"):
        engine.submit(Request("late", (1,), SamplingParams(), 5), Listener())
    check_clean(engine)


def test_listeners_that_raise_do_not_hurt() -> None:
    engine = make_engine()
    requests = make_requests(2)

    def fail(progress: Progress) -> None:
        raise ConnectionResetError

    listener = Listener()
    engine.submit(requests[0], fail)
    engine.submit(requests[1], listener)
    while engine.step():
        pass
    assert listener.tokens == truth(requests[1])
    check_clean(engine)


# ── threads ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_abort_at_any_moment_ends_a_request_once() -> None:
    request = Request("r", tuple(range(20)), SamplingParams(), 10)
    for num_steps in range(16):  # before the first step, in the prompt's chunks, while decoding, after the end
        engine = make_engine(max_rows=16)
        listener = Listener()
        engine.submit(request, listener)
        for _ in range(num_steps):
            engine.step()
        engine.abort("r")
        engine.abort("r")
        engine.step()
        assert listener.finish == ("abort" if num_steps < 11 else "length")
        assert listener.tokens == truth(request)[: len(listener.tokens)]
        check_clean(engine)


def test_abort_while_waiting() -> None:
    engine = make_engine(max_running=1)
    first, second = Listener(), Listener()
    engine.submit(Request("1", (1, 2), SamplingParams(), 10), first)
    engine.submit(Request("2", (1, 2), SamplingParams(), 10), second)
    engine.step()
    engine.abort("2")
    engine.step()
    assert (first.finish, second.finish, second.tokens) == (None, "abort", ())
    engine.abort("nobody")
    while engine.step():
        pass
    assert first.finish == "length"
    check_clean(engine)


def test_aborts_from_other_threads() -> None:
    """At random moments, a hundred of them, with somebody reading the figures all the while: counters only rise."""
    random = Random(3)
    requests = make_requests(100, max_tokens=40)
    drafter = RecordingDrafter(Bushy(Oracle(continuation(requests)), vocab_size=VOCAB_SIZE))
    engine = make_engine(drafter, num_pages=60, max_running=10)
    listeners = {request.id: Listener() for request in requests}
    falls: list[str] = []
    done = Event()

    def scrape() -> None:
        before = engine.stats()
        while not done.is_set():
            now = engine.stats()
            for name, value in vars(now.counters).items():
                if isinstance(value, int | float) and value < getattr(before.counters, name):
                    falls.append(name)
            for name, value in vars(now.counters.speculation).items():
                if isinstance(value, int) and value < getattr(before.counters.speculation, name):
                    falls.append(name)
            before = now
            time.sleep(0.001)

    def abort() -> None:
        for _ in range(100):
            engine.abort(random.choice(requests).id)
            time.sleep(random.random() * 0.003)

    threads = [Thread(target=scrape), Thread(target=abort)]
    engine.start()
    for thread in threads:
        thread.start()
    for request in requests:
        engine.submit(request, listeners[request.id])
    for request in requests:
        listener = listeners[request.id]
        assert listener.ended.wait(PATIENCE_S)
        assert listener.tokens == truth(request)[: len(listener.tokens)]
        assert listener.finish in ("abort", "length")
    done.set()
    for thread in threads:
        thread.join()
    engine.stop()
    assert not falls
    assert {listener.finish for listener in listeners.values()} == {"abort", "length"}
    assert not drafter.open_sessions
    check_clean(engine)


def test_an_idle_engine_sleeps_and_wakes() -> None:
    ticks = 0

    def clock() -> float:
        nonlocal ticks
        ticks += 1
        return time.monotonic()

    engine = Engine(FakeVerifier(16, 4), NoDraft(), EngineConfig(16, 4, max_rows=64), clock)
    engine.start()
    request = Request("r", (1, 2), SamplingParams(), 5)
    for _ in range(3):
        listener = Listener()
        engine.submit(request, listener)
        assert listener.ended.wait(PATIENCE_S)
        assert listener.tokens == truth(request)
        deadline, before = time.monotonic() + PATIENCE_S, -1
        while ticks != before:
            assert time.monotonic() < deadline, "an idle engine goes on stepping"
            before = ticks
            time.sleep(0.1)
    engine.stop()


def test_stop_ends_what_is_left() -> None:
    engine = make_engine()
    listeners = [Listener() for _ in range(3)]
    entered, release = Event(), Event()

    def forward(plan: StepPlan) -> None:
        entered.set()
        assert release.wait(PATIENCE_S)

    fake_of(engine).on_forward = forward
    engine.start()
    for i, listener in enumerate(listeners):
        engine.submit(Request(f"{i}", (1, 2), SamplingParams(), 50), listener)
    assert entered.wait(PATIENCE_S)
    stopper = Thread(target=engine.stop)
    stopper.start()
    release.set()
    stopper.join(PATIENCE_S)
    for listener in listeners:
        assert listener.finish == "error"
        assert listener.events[-1].error == "the engine was stopped"
    with pytest.raises(EngineDead):
        engine.submit(Request("late", (1,), SamplingParams(), 5), Listener())
    check_clean(engine)


def test_a_fault_of_our_own_on_the_thread_ends_all_requests() -> None:
    """Whatever happens there, nobody waits for ever."""
    engine = make_engine()
    engine.scheduler.schedule = lambda *_: 1 / 0  # type: ignore[method-assign,assignment]
    listener = Listener()
    engine.submit(Request("r", (1, 2), SamplingParams(), 5), listener)
    engine.start()
    assert listener.ended.wait(PATIENCE_S)
    assert listener.finish == "error"
    assert engine.dead is not None
    assert "ZeroDivisionError" in engine.dead
    engine.stop()


def test_whoever_hears_of_the_end_finds_it_in_the_figures() -> None:
    engine = make_engine()
    seen: list[tuple[int, int, int]] = []

    def look(progress: Progress) -> None:
        if progress.finish:
            stats = engine.stats()
            seen.append((stats.running, stats.pages_used, stats.counters.finished["length"]))

    engine.submit(Request("r", (1, 2), SamplingParams(), 3), look)
    while engine.step():
        pass
    assert seen == [(0, 0, 1)]


def test_a_listener_may_submit_and_abort() -> None:
    engine = make_engine()
    last = Listener()
    results: list[Result] = []

    def submit_next(progress: Progress) -> None:
        if progress.finish:
            engine.submit(Request("next", (3, 4), SamplingParams(), 3), last)
            engine.abort("r")

    engine.submit(Request("r", (1, 2), SamplingParams(), 3), submit_next)
    while engine.step():
        pass
    engine.step()
    while engine.step():
        pass
    assert last.finish == "length"
    assert not results
    check_clean(engine)
