"""The drafter's replica and an engine that finds it, in one process: all of remote drafting but Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from deployments.checks import engine_spec, served_model
from deployments.drafter import DrafterReplica
from deployments.rendezvous import ServeFinder
from deployments.settings import Settings
from tests.deployments.tiny import make_tiny_model
from tests.drafter.heads import HeadShape, random_weights, safeailab_config, save_head
from verifier.config import ModelConfig
from verifier.errors import BadSetting, DraftreeError
from verifier.sampling import SamplingParams
from workers.build import build_engine
from workers.engine import Engine
from workers.remote.channel import Contact
from workers.remote.placement import Elsewhere
from workers.sequence import Request

REQUESTS = [Request(str(i), (97, 98, 99, 97, 98), SamplingParams(seed=i), 60) for i in range(3)]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("models")
    model = make_tiny_model(folder / "tiny")
    shape = HeadShape(target_hidden=72, target_vocab=ModelConfig.from_hf(model).vocab_size, hidden=72, head_dim=16)
    config = safeailab_config(shape) | {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    head = save_head(folder / "head", random_weights(shape), config)
    return Settings(
        model=str(model), draft_model=f"ngram+{head}", drafter_placement="remote", threads=1, adaptive=False
    )


class Handle:
    """A deployment's handle, as far as a verifier uses it."""

    def __init__(self, replica: DrafterReplica | None) -> None:
        self.replica = replica
        self.introduce = SimpleNamespace(remote=self._introduce)

    async def _introduce(self, key: str) -> Contact:
        if self.replica is None:
            raise DraftreeError("there is no drafter")
        return await self.replica.introduce(key)


@pytest.fixture(scope="module")
def drafter(settings: Settings) -> Iterator[DrafterReplica]:
    replica = DrafterReplica(settings)
    yield replica
    replica.stop()


def texts(engine: Engine) -> list[tuple[int, ...]]:
    return [result.output_ids for result in engine.run(REQUESTS)]


def test_a_drafter_is_found_when_it_comes_and_changes_no_text(settings: Settings, drafter: DrafterReplica) -> None:
    spec = engine_spec(settings)
    handle = Handle(None)
    elsewhere = Elsewhere(ServeFinder(handle))  # type: ignore[arg-type]
    engine, _ = build_engine(spec, elsewhere=elsewhere)
    truth = texts(build_engine(engine_spec(settings.model_copy(update={"draft_model": "none"})))[0])
    assert texts(engine) == truth
    assert not elsewhere.figures.connected
    handle.replica = drafter
    deadline = time.monotonic() + 60
    while elsewhere.figures.answered < 20:
        assert time.monotonic() < deadline, elsewhere.figures
        assert texts(engine) == truth
    drafter.check_health()
    assert engine.stats().drafter_failures == 0
    assert elsewhere.figures.malformed == 0


def test_what_cannot_be_placed_elsewhere_is_refused(settings: Settings) -> None:
    assert "ngram" in served_model(settings).drafter.name
    assert served_model(settings.model_copy(update={"draft_model": "ngram"})).drafter.name == "ngram"
    head = settings.draft_model.removeprefix("ngram+")
    two = settings.model_copy(update={"draft_model": f"{head}+{head}/"})
    with pytest.raises(BadSetting, match="a single draft network"):
        served_model(two)


def test_a_server_that_has_failed_is_unhealthy(settings: Settings) -> None:
    replica = DrafterReplica(settings)
    replica.check_health()
    replica.stop()
    with pytest.raises(DraftreeError, match="failed"):
        replica.check_health()


def test_a_folder_is_all_that_placement_needs(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="draft_model"):
        served_model(
            Settings(model=str(make_tiny_model(tmp_path / "m")), draft_model="nothing", drafter_placement="remote")
        )
