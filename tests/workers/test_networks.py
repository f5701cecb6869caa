"""Draft networks in the engine: the right features in every situation, rebuilt sessions, the text of plain decoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from drafter.base import Drafter, DraftLimits, DraftRequest
from drafter.checkpoints import DraftFolder
from drafter.factory import plan_drafter
from drafter.network_draft import NetworkDraft
from drafter.networks import plan_network
from drafter.options import DraftOptions
from drafter.scored import ScoredTree
from drafter.scripted import FixedIds
from tests.deployments.tiny import make_tiny_model
from tests.drafter.eagle_heads import EagleShape, save_tiny_eagle
from tests.drafter.heads import HeadShape, random_weights, safeailab_config, save_head, save_tiny_head
from tests.fakes import VOCAB_SIZE, FakeVerifier, RecordingDrafter, _state
from tests.matrix import MAX_ROWS, NUM_TOKENS, Case, make_drafter, make_requests, pairwise
from tests.models import save_tiny_model
from tests.workers.test_exactness import decode_plainly
from verifier.attention import create_attention
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
DEFAULTS, BLIND = DraftOptions(), DraftOptions(noise_ranking=False)


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


class CheckedDraft(NetworkDraft):
    """Compares each session with one rebuilt from the text, every few tokens."""

    num_checked = 0

    @classmethod
    @torch.inference_mode()
    def of(cls, folder: DraftFolder, verifier: Verifier, options: DraftOptions) -> CheckedDraft:
        network = plan_network(folder, verifier.config, options).load(verifier.model, create_attention())
        return cls(network, num_pages=verifier.pool.num_pages, page_size=verifier.pool.page_size, options=options)

    def propose_all(self, batch: Sequence[DraftRequest]) -> Mapping[int, ScoredTree]:
        trees = super().propose_all(batch)
        for request in batch:
            if request.sequence not in trees or len(request.ids) % 3:
                continue  # the draft cache is as tight as the verifier's; and to save time
            page_size = self.sessions.pool.page_size
            rebuilt = NetworkDraft(self.network, num_pages=64, page_size=page_size, options=self.options)
            rebuilt.propose(request)
            pairs = zip(_cached(self, request.sequence), _cached(rebuilt, request.sequence), strict=True)
            for cached, expected_cached in pairs:
                torch.testing.assert_close(cached, expected_cached, atol=1e-4, rtol=1e-4)
            self.num_checked += 1
        return trees


def _cached(drafter: NetworkDraft, sequence: int) -> Iterator[torch.Tensor]:
    sessions, session = drafter.sessions, drafter.sessions.by_sequence[sequence]
    slots = [sessions.pages.slot(session.lease, logical) for logical in range(session.lease.num_committed)]
    yield sessions.pool.keys[:, slots]
    yield sessions.pool.values[:, slots]
    assert session.state is not None
    yield session.state


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, and a draft network of every kind for it."""
    folder = tmp_path_factory.mktemp("models")
    eagle = EagleShape(target_hidden=72, hidden=72)
    return {
        "target": save_tiny_model(folder / "target"),
        "eagle3": save_tiny_head(folder / "head", SHAPE, eagle_aux_hidden_state_layer_ids=[0, 1, 3]),
        "eagle": save_tiny_eagle(folder / "eagle", eagle),
        "model": save_tiny_model(folder / "model", seed=1, num_hidden_layers=1),
    }


@pytest.mark.parametrize(
    ("kind", "options", "temperature", "tight", "prefix_cache"),
    [
        *(
            ("eagle3", DEFAULTS, temperature, *cache)
            for temperature in (0.0, 1.0)
            for cache in ((True, True), (False, True), (True, False))
        ),
        ("eagle3", DraftOptions(threshold=0.1, decay=0.9, noise_ranking=False), 1.0, False, True),
        ("eagle", DraftOptions(growth="static"), 1.0, True, True),
        ("eagle", DEFAULTS, 0.0, False, True),
        ("model", DEFAULTS, 1.0, True, True),
        ("model", BLIND, 1.0, False, True),
    ],
)
def test_the_text_is_that_of_plain_decoding(
    folders: dict[str, Path], kind: str, options: DraftOptions, temperature: float, tight: bool, prefix_cache: bool
) -> None:
    """Chunked prompts, prefix hits, preemption, trees; and the sessions that the texts alone give."""
    page_size = 8
    case = Case("none", True, 6, page_size, temperature, prefix_cache, tight)
    requests = make_requests(case, 160)
    num_pages = 13 * (1 if tight else 6)
    verifier = Verifier.load(folders["target"], num_pages=num_pages, page_size=page_size, max_rows=MAX_ROWS)

    def engine(drafter: Drafter) -> Engine:
        config = EngineConfig(
            num_pages, page_size, max_rows=MAX_ROWS, prefix_cache=prefix_cache, limits=DraftLimits(4, 2, 6)
        )
        return Engine(verifier, drafter, config)

    plain = engine(plan_drafter("none", verifier.config).create(verifier)).run(requests)
    drafter = CheckedDraft.of(DraftFolder(folders[kind]), verifier, options)
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
    assert not drafter.sessions.by_sequence
    assert drafter.sessions.pages.num_used == 0


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
    engine, text = build_engine(EngineSpec(str(model), str(head), max_model_len=64, adaptive=False))
    result = engine.run([Request("r", tuple(text.encode("hello")), SamplingParams(temperature=0), 12)])[0]
    assert result.usage.drafted_tokens > 0
    assert engine.stats().drafter_failures == 0
    save_head(tmp_path / "wrong", random_weights(HeadShape()), safeailab_config(HeadShape()))
    with pytest.raises(CheckpointError, match="wrong"):
        build_engine(EngineSpec(str(model), str(tmp_path / "wrong")))
