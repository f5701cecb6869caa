"""How many replicas, with what, and where: what Serve is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.serve import Application
from ray.serve.config import AutoscalingConfig

from deployments.build import app
from deployments.checks import device_of, engine_spec, fingerprint
from deployments.replicas import drafter_options, verifier_options
from deployments.settings import RefusedSettings, Settings
from tests.deployments.tiny import make_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def test_by_default_there_is_one_of_each_anywhere() -> None:
    assert verifier_options(Settings(), {}) == {
        "ray_actor_options": {"num_cpus": 0.5, "runtime_env": {"env_vars": {}}},
        "num_replicas": 1,
    }
    assert drafter_options(Settings(), {"A": "b"}) == {
        "ray_actor_options": {"num_cpus": 0.1, "runtime_env": {"env_vars": {"A": "b"}}},
        "num_replicas": 1,
    }


def test_every_rank_reserves_its_gpus_and_the_replica_those_of_the_first() -> None:
    options = verifier_options(Settings(tensor_parallel=4, verifier_num_gpus=1, node_roles=True), {})
    assert options["placement_group_bundles"] == [{"CPU": 0.5, "GPU": 1}] + [{"CPU": 0.1, "GPU": 1}] * 3
    assert options["placement_group_bundle_label_selector"] == [{"role": "verifier"}]
    assert options["ray_actor_options"]["num_gpus"] == 1
    assert "label_selector" not in options["ray_actor_options"]  # Serve takes it for bundles or for actors
    alone = verifier_options(Settings(verifier_num_gpus=1, node_roles=True), {})
    assert alone["ray_actor_options"]["label_selector"] == {"role": "verifier"}
    drafter = drafter_options(Settings(drafter_num_gpus=0.5, node_roles=True), {})
    assert drafter["ray_actor_options"]["num_gpus"] == 0.5
    assert drafter["ray_actor_options"]["label_selector"] == {"role": "drafter"}


@pytest.mark.parametrize(
    ("least", "most", "range_"),
    [(1, 0, None), (3, 0, None), (2, 2, None), (1, 4, (1, 4)), (0, 0, (0, 1)), (0, 3, (0, 3))],
)
def test_a_number_or_a_range(least: int, most: int, range_: tuple[int, int] | None) -> None:
    options = verifier_options(Settings(verifier_replicas=least, verifier_max_replicas=most), {})
    if range_ is None:
        assert options["num_replicas"] == least
        assert "autoscaling_config" not in options
    else:
        assert "num_replicas" not in options
        scaling = AutoscalingConfig(**options["autoscaling_config"])
        assert (scaling.min_replicas, scaling.max_replicas) == range_
        assert not scaling.policy.is_default_policy_function()


def test_serve_takes_all_of_it(tiny: Path) -> None:
    settings = Settings(
        model=str(tiny),
        tensor_parallel=3,
        verifier_num_gpus=1,
        verifier_replicas=0,
        verifier_max_replicas=2,
        node_roles=True,
    )
    built = app(settings)
    assert isinstance(built, Application)


def test_at_most_fewer_than_at_least(tiny: Path) -> None:
    with pytest.raises(RefusedSettings, match="verifier_max_replicas is 1, but must be 0, or verifier_replicas, 2"):
        app(Settings(model=str(tiny), verifier_replicas=2, verifier_max_replicas=1))


def test_who_reserves_gpus_computes_on_them() -> None:
    assert engine_spec(Settings()).device == "cpu"
    assert engine_spec(Settings(verifier_num_gpus=1)).device == "cuda"
    assert engine_spec(Settings(verifier_num_gpus=1, device="cpu")).device == "cpu"
    apart = Settings(verifier_num_gpus=1, drafter_placement="remote")
    assert device_of(apart, apart.drafter_num_gpus) == "cpu"
    assert fingerprint(Settings()) != fingerprint(Settings(verifier_num_gpus=1))


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"device": "gpu"}, "device is 'gpu', but must be 'auto', 'cpu' or 'cuda'"),
        ({"device": "cuda"}, "device is 'cuda', but must be cpu or auto while verifier_num_gpus is 0"),
        (
            {"device": "cuda", "verifier_num_gpus": 1, "drafter_placement": "remote"},
            "device is 'cuda', but must be cpu or auto while drafter_num_gpus is 0",
        ),
        (
            {"tensor_parallel": 3, "verifier_num_gpus": 0.5},
            "verifier_num_gpus is 0.5, but must be at least 1, since ranks cannot share a GPU",
        ),
    ],
)
def test_gpus_that_nobody_will_see_are_refused(tiny: Path, args: dict[str, object], sentence: str) -> None:
    with pytest.raises(RefusedSettings, match=sentence):
        app(Settings.model_validate({"model": str(tiny), **args}))


def test_memory_of_gpus_is_looked_at_where_they_are(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.build.available_memory", lambda: 1000)
    app(Settings(model=str(tiny), verifier_num_gpus=1))
    with pytest.raises(RefusedSettings, match="does not fit"):
        app(Settings(model=str(tiny)))
