"""Memory and cores: what is counted, and that what does not fit is refused wherever an engine is built."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from drafter.factory import plan_drafter
from tests.deployments.tiny import make_tiny_model
from verifier.config import ModelConfig
from verifier.errors import DraftreeError
from verifier.weights import Checkpoint
from workers import build
from workers.build import EngineSpec, build_engine
from workers.machine import (
    available_memory,
    check_memory,
    kv_bytes_per_token,
    needed_bytes,
    physical_cores,
    weight_bytes,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def test_memory_is_counted(tiny: Path) -> None:
    config = ModelConfig.from_hf(tiny)
    weights = sum(path.stat().st_size for path in tiny.glob("*.safetensors"))
    embedding = config.vocab_size * config.hidden_size
    # fp16 on disk; the embedding is held as fp32, and once more as the packed head.
    assert weight_bytes(config) == pytest.approx(weights + embedding * 4, abs=20_000)
    assert Checkpoint.open(tiny).held_bytes == pytest.approx(weight_bytes(config), abs=20_000)
    assert kv_bytes_per_token(config) == 2 * 2 * 3 * 64 * 4
    engine = EngineSpec().engine_config(config)
    needed = weight_bytes(config) + 512 * kv_bytes_per_token(config)
    check_memory(config, engine, plan_drafter("none", config), needed)
    with pytest.raises(DraftreeError, match="does not fit"):
        check_memory(config, engine, plan_drafter("none", config), needed - 1)


def test_a_gpu_holds_one_ranks_part_as_it_was_saved(tiny: Path) -> None:
    config = ModelConfig.from_hf(tiny)
    engine = EngineSpec(device="cuda", tensor_parallel=3).engine_config(config)
    weights, cache = needed_bytes(config, engine)
    on_disk = sum(path.stat().st_size for path in tiny.glob("*.safetensors"))
    assert weights == pytest.approx(on_disk / 3, abs=20_000)
    assert cache == 512 * 2 * 2 * 3 * 64 * 2 // 3
    check_memory(config, engine, plan_drafter("none", config), weights + cache)
    with pytest.raises(DraftreeError, match="does not fit"):
        check_memory(config, engine, plan_drafter("none", config), weights + cache - 1)


def test_the_machine_has_memory_and_cores() -> None:
    assert 2**26 < available_memory() < 2**50
    assert 1 <= physical_cores() <= (os.cpu_count() or 1)


def test_no_engine_is_built_that_does_not_fit(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line loaded any model, and the kernel killed it when memory ran out; only the service asked first."""
    monkeypatch.setattr(build, "available_memory", lambda: 1000)
    with pytest.raises(DraftreeError, match="does not fit"):
        build_engine(EngineSpec(model=str(tiny)))
