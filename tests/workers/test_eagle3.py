"""A head in the engine: the right features in every situation, sessions that equal rebuilt ones, the same text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from drafter.base import Drafter, DraftLimits, DraftRequest
from drafter.checkpoints import HeadCheckpoint
from drafter.eagle3 import Eagle3Draft, Session
from drafter.factory import plan_drafter
from drafter.scored import ScoredTree
from drafter.scripted import FixedIds
from tests.deployments.tiny import make_tiny_model
from tests.drafter.heads import HeadShape, random_weights, safeailab_config, save_head, save_tiny_head
from tests.fakes import VOCAB_SIZE, FakeVerifier, RecordingDrafter, _state
from tests.matrix import MAX_ROWS, NUM_TOKENS, Case, make_drafter, make_requests, pairwise
from tests.models import save_tiny_model
from tests.workers.test_exactness import decode_plainly
from verifier.config import ModelConfig
from verifier.errors import CheckpointError
from verifier.features import Fusion
from verifier.sampling import SamplingParams
from verifier.verifier import Verifier
from workers.build import EngineSpec, build_engine
from workers.config import EngineConfig
from workers.engine import Engine
from workers.sequence import Request

SHAPE = HeadShape(target_hidden=72, hidden=72, head_dim=16)


class ReadingDrafter(RecordingDrafter):
    """Reads all features of every request and compares them with those of the text."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self.fusion = Fusion("fake", (), 1)
        self.num_read = 0

    def start(self, batch: Sequence[DraftRequest]) -> int:
        for request in batch:
            states: list[int] = []
            for position, token in enumerate(request.ids[:-1]):
                states.append(_state(token, position, states))
            assert request.features is not None
            assert request.features(0, len(states))[:, 0].tolist() == states
            middle = len(states) // 2
            assert request.features(middle, len(states))[:, 0].tolist() == states[middle:]
            self.num_read += len(states)
        return super().start(batch)


@pytest.mark.parametrize("case", [case for case in pairwise() if case.drafter != "none"], ids=str)
def test_every_committed_positions_feature_can_be_read(case: Case) -> None:
    """After prefix hits, in pages about to be copied, after preemption, and of kept nodes that were moved."""
    requests = make_requests(case, VOCAB_SIZE)
    longest = max(len(request.prompt_ids) for request in requests) + NUM_TOKENS - 1
    num_pages = -(-longest // case.page_size) * (1 if case.tight else case.batch)
    truth = {request.id: decode_plainly(request) for request in requests}
    drafter = ReadingDrafter(make_drafter(case, requests, truth, VOCAB_SIZE))
    config = EngineConfig(
        num_pages, case.page_size, max_rows=MAX_ROWS, prefix_cache=case.prefix_cache, limits=case.limits
    )
    engine = Engine(FakeVerifier(num_pages, case.page_size), drafter, config)
    for _ in range(2):
        assert {result.request_id: result.output_ids for result in engine.run(requests)} == truth
    assert engine.stats().drafter_failures == 0
    assert drafter.num_read > 0


def test_features_in_a_page_about_to_be_copied_are_read_from_its_source() -> None:
    """The second request's whole prompt lies in pages that the first still holds, and it drafts before the copy."""
    drafter = ReadingDrafter(FixedIds((3, 1, 4)))
    engine = Engine(FakeVerifier(16, 4), drafter, EngineConfig(16, 4, limits=DraftLimits(3, 1, 3)))
    requests = [Request(str(i), tuple(range(8)), SamplingParams(temperature=1, seed=i), 8) for i in range(2)]
    for request in requests:
        engine.submit(request, lambda progress: None)
        engine.step()
    assert engine.verifier.page_copies  # type: ignore[attr-defined]
    assert engine.stats().drafter_failures == 0
    assert len(drafter.batches[-1]) == 2


class CheckedDraft(Eagle3Draft):
    """Compares each session with one rebuilt from the text, every few tokens."""

    num_checked = 0

    def propose_all(self, batch: Sequence[DraftRequest]) -> Mapping[int, ScoredTree]:
        trees = super().propose_all(batch)
        for request in batch:
            if request.sequence not in trees or len(request.ids) % 3:
                continue  # the draft cache is as tight as the verifier's; and to save time
            rebuilt = Eagle3Draft(self.head, num_pages=64, page_size=self.pages.page_size, noise_ranking=True)
            rebuilt.propose(request)
            ours, theirs = self.sessions[request.sequence], rebuilt.sessions[request.sequence]
            for cached, expected_cached in zip(_cached(self, ours), _cached(rebuilt, theirs), strict=True):
                torch.testing.assert_close(cached, expected_cached, atol=1e-4, rtol=1e-4)
            self.num_checked += 1
        return trees


def _cached(drafter: Eagle3Draft, session: Session) -> Iterator[torch.Tensor]:
    slots = [drafter.pages.slot(session.lease, logical) for logical in range(session.lease.num_committed)]
    yield drafter.pool.keys[:, slots]
    yield drafter.pool.values[:, slots]
    assert session.state is not None
    yield session.state


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a head for it."""
    folder = tmp_path_factory.mktemp("models")
    head = save_tiny_head(folder / "head", SHAPE, eagle_aux_hidden_state_layer_ids=[0, 1, 3])
    return save_tiny_model(folder / "target"), head


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("tight", "prefix_cache"), [(True, True), (False, True), (True, False)])
def test_the_text_is_that_of_plain_decoding(
    folders: tuple[Path, Path], temperature: float, tight: bool, prefix_cache: bool
) -> None:
    """Chunked prompts, prefix hits, preemption, trees; and the sessions that the texts alone give."""
    target, head = folders
    page_size = 8
    case = Case("none", True, 6, page_size, temperature, prefix_cache, tight)
    requests = make_requests(case, 160)
    num_pages = 13 * (1 if tight else 6)
    verifier = Verifier.load(target, num_pages=num_pages, page_size=page_size, max_rows=MAX_ROWS)

    def engine(drafter: Drafter) -> Engine:
        config = EngineConfig(
            num_pages, page_size, max_rows=MAX_ROWS, prefix_cache=prefix_cache, limits=DraftLimits(4, 2, 6)
        )
        return Engine(verifier, drafter, config)

    plain = engine(plan_drafter("none", verifier.config).create(verifier)).run(requests)
    drafter = CheckedDraft.load(HeadCheckpoint.open(head, verifier.config), verifier, noise_ranking=True)
    assert isinstance(drafter, CheckedDraft)
    drafting = engine(drafter)
    for _ in range(2):
        results = drafting.run(requests)
        assert [result.output_ids for result in results] == [result.output_ids for result in plain]
        drafting.check_integrity()
    stats = drafting.stats()
    assert stats.drafter_failures == 0
    assert stats.counters.speculation.drafted_tokens > 0
    assert (stats.counters.preemptions > 0) == tight
    assert (stats.counters.cached_tokens > 0) == prefix_cache
    assert drafter.num_checked > 50
    assert not drafter.sessions
    assert drafter.pages.num_used == 0


def test_a_text_longer_than_the_heads_positions_goes_on_plainly(tmp_path: Path) -> None:
    """A head of 64 positions beside a target of 512; another request in the same batch still drafts."""
    target = save_tiny_model(tmp_path / "target")
    head = save_tiny_head(
        tmp_path / "head",
        HeadShape(target_hidden=72, hidden=72, head_dim=16, max_positions=64),
        eagle_aux_hidden_state_layer_ids=[0, 1, 3],
    )
    verifier = Verifier.load(target, num_pages=64, page_size=8, max_rows=MAX_ROWS)
    plan = plan_drafter(str(head), verifier.config)
    requests = [
        Request(str(size), tuple(range(size)), SamplingParams(temperature=0), num_tokens)
        for size, num_tokens in ((60, 100), (120, 20), (10, 20))
    ]
    config = EngineConfig(64, 8, max_rows=MAX_ROWS, limits=DraftLimits(4, 1, 4))
    plain = Engine(verifier, plan_drafter("none", verifier.config).create(verifier), config).run(requests)
    engine = Engine(verifier, plan.create(verifier), config)
    results = engine.run(requests)
    assert [result.output_ids for result in results] == [result.output_ids for result in plain]
    assert engine.stats().drafter_failures == 0
    assert results[1].usage.drafted_tokens == 0
    assert 0 < results[0].usage.drafted_tokens <= 4 * 6
    assert results[2].usage.drafted_tokens > 20


def test_a_heads_folder_is_all_that_it_takes(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    vocab_size = ModelConfig.from_hf(model).vocab_size
    shape = HeadShape(target_hidden=72, target_vocab=vocab_size, hidden=72, head_dim=16)
    config = safeailab_config(shape) | {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    head = save_head(tmp_path / "head", random_weights(shape), config)
    engine, text = build_engine(EngineSpec(str(model), str(head), max_model_len=64))
    result = engine.run([Request("r", tuple(text.encode("hello")), SamplingParams(temperature=0), 12)])[0]
    assert result.usage.drafted_tokens > 0
    assert engine.stats().drafter_failures == 0
    save_head(tmp_path / "wrong", random_weights(HeadShape()), safeailab_config(HeadShape()))
    with pytest.raises(CheckpointError, match="wrong"):
        build_engine(EngineSpec(str(model), str(tmp_path / "wrong")))
