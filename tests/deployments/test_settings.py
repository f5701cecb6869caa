"""What a user gets wrong is one sentence, before Ray and before torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import click
import pytest
import yaml
from ray.serve import Application
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ServeDeploySchema

import deployments
from deployments.checks import served_model
from deployments.settings import RefusedSettings, Settings
from tests.deployments.tiny import make_tiny_model
from verifier.errors import ModelNotFound

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


def build(**args: object) -> Application:
    """As Ray does it, for the command line and for YAML files."""
    assert isinstance(deployments.app, FunctionType)
    app = call_user_app_builder_with_args_if_necessary(deployments.app, args)
    assert isinstance(app, Application)
    return app


def verifier_of(app: Application) -> Any:
    ingress: Any = app._bound_deployment
    return ingress.init_args[1]._bound_deployment


def test_values_may_be_strings() -> None:
    settings = Settings.model_validate({"max_draft": "3", "exact": "false", "model": "m"})
    assert (settings.max_draft, settings.exact, settings.model) == (3, False, "m")
    assert Settings.model_validate({}) == Settings()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"max_drafts": "3"}, ("there is no setting max_drafts", "max_draft?")),
        ({"zzz": "3"}, ("there is no setting zzz", "draft_model, max_draft")),
        ({"max_draft": "many"}, ("max_draft", "'many'", "integer")),
        ({"max_draft": "-1"}, ("max_draft", "'-1'", "greater than or equal to 0")),
        ({"exact": "perhaps"}, ("exact", "'perhaps'", "boolean")),
        ({"acceptance": "typical"}, ("acceptance", "'typical'", "'exact' or 'typical-lossy'")),
        # Python's way to hold a byte that is no UTF-8; Ray ended with a traceback once it had started.
        ({"served_model_name": "\udcff"}, ("served_model_name", "printable")),
        ({"model": "\udcff"}, ("model", "printable")),
        # More than a float holds: working out the pages ended with a traceback.
        ({"kv_cache_tokens": "1" + "0" * 400}, ("kv_cache_tokens", "less than or equal to")),
        # With less than signs of life take, whatever had to wait its turn was given up.
        ({"stall_timeout_s": "0.5"}, ("stall_timeout_s", "'0.5'", "greater than or equal to 3")),
    ],
)
def test_mistakes_are_named_in_one_sentence(args: dict[str, str], words: tuple[str, ...]) -> None:
    with pytest.raises(RefusedSettings) as caught:
        Settings.model_validate(args)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert "\n" not in text
    # What makes `serve run` print the sentence alone, and a YAML deployment show it as its status.
    assert isinstance(caught.value, click.ClickException)
    assert isinstance(caught.value, RayServeException)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"model": "/nowhere/model"}, ("/nowhere/model",)),
        ({"api_keys": "/nowhere/keys.toml"}, ("api_keys", "/nowhere/keys.toml", "can be read")),
        ({"draft_model": "eagle9"}, ("draft_model", "'eagle9'", "auto, none, ngram, eagle3")),
        ({"draft_growth": "wild"}, ("draft_growth", "'wild'", "dynamic, static")),
        ({"draft_threshold": "1.5"}, ("draft_threshold", "1.5", "below 1")),
        ({"draft_layer_ids": "2;15"}, ("draft_layer_ids", "'2;15'", "2,15,27")),
        ({"draft_growth": "static"}, ("draft_growth", "'static'", "ngram is no draft network")),
        ({"draft_model": "none", "draft_decay": "0.9"}, ("draft_decay", "0.9", "none is no draft network")),
        ({"tensor_parallel": "2"}, ("tensor_parallel", "2", "9 query heads", "1 or 3")),
        ({"tensor_parallel": "9"}, ("tensor_parallel", "9", "1 or 3")),  # 96 feed-forward columns do not go by nine
        ({"max_model_len": "257"}, ("max_model_len", "257", "256")),
        ({"max_model_len": "1"}, ("max_model_len", "1", "at least 2")),  # was served, and refused every request
        ({"kv_cache_tokens": "255"}, ("kv_cache_tokens", "255", "at least 256")),
        ({"kv_cache_tokens": str(10**12)}, ("does not fit", "GiB")),
        ({"max_running": "97", "max_rows": "96"}, ("max_running", "97", "96")),
        # Were overlooked, and somebody took the drafter to be on a GPU.
        ({"drafter_num_gpus": "1"}, ("drafter_num_gpus", "1.0", "left out", "local")),
        ({"drafter_replicas": "2"}, ("drafter_replicas", "2", "left out", "local")),
        ({"drafter_max_replicas": "2"}, ("drafter_max_replicas", "2", "left out", "local")),
    ],
)
def test_settings_that_do_not_fit_the_model(tiny: str, args: dict[str, str], words: tuple[str, ...]) -> None:
    with pytest.raises(RefusedSettings) as caught:
        build(**{"model": tiny} | args)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert "\n" not in text


def test_the_app_is_built_from_settings(tiny: str) -> None:
    """A broken replica must fail at once, not twenty times; and all replicas must fit on a machine of one core."""
    app = build(model=tiny, max_draft="3")
    ingress: Any = app._bound_deployment
    verifier = verifier_of(app)
    assert ingress.name == "Ingress"
    assert verifier.name == "VerifierReplica"
    assert ingress.ray_actor_options["num_cpus"] + verifier.ray_actor_options["num_cpus"] <= 1
    for deployment in (ingress, verifier):
        assert deployment._deployment_config.max_constructor_retry_count == 1


@pytest.mark.parametrize(("max_waiting", "replicas"), [("64", "1"), ("5000", "1"), ("5000", "3")])
def test_whatever_is_let_in_finds_room_at_one_verifier(tiny: str, max_waiting: str, replicas: str) -> None:
    """Of more than 1024, Serve kept the rest from the verifier, and all that asked for its health as well."""
    settings = Settings(model=tiny, max_waiting=max_waiting, verifier_replicas=replicas)  # type: ignore[arg-type]
    app = build(model=tiny, max_waiting=max_waiting, verifier_replicas=replicas)
    for deployment in (app._bound_deployment, verifier_of(app)):
        assert deployment._deployment_config.max_ongoing_requests > settings.capacity


def test_building_the_app_needs_no_torch(tiny: str) -> None:
    code = f"import sys, deployments as d; d.app(d.build.Settings(model={tiny!r})); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_what_is_left_to_work_out(tiny: str) -> None:
    model = served_model(Settings(model=tiny, page_size=16))
    assert (model.name, model.engine.max_model_len, model.engine.num_pages) == ("tiny", 256, 32)
    model = served_model(Settings(model=tiny, served_model_name="mine", max_model_len=100, kv_cache_tokens=101))
    assert (model.name, model.engine.max_model_len, model.engine.num_pages) == ("mine", 100, 7)
    assert model.engine.acceptance == "exact"
    assert served_model(Settings(model=tiny, acceptance="typical-lossy")).engine.acceptance == "typical-lossy"


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    (make_tiny_model(tmp_path) / "tokenizer.json").unlink()
    with pytest.raises(RefusedSettings, match="tokenizer"):
        build(model=str(tmp_path))


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        served_model(Settings(model=str(tmp_path)))


def test_ranks_have_a_bundle_each_on_one_node(tiny: str) -> None:
    """A replica whose ranks cannot all be placed must not be placed either."""
    config = verifier_of(build(model=tiny, tensor_parallel="3"))._replica_config
    assert len(config.placement_group_bundles) == 3
    assert config.placement_group_strategy == "STRICT_PACK"
    assert verifier_of(build(model=tiny))._replica_config.placement_group_bundles is None


def test_the_yaml_file_is_a_serve_config_with_known_settings() -> None:
    config = ServeDeploySchema.model_validate(yaml.safe_load((ROOT / "deployments" / "serve.yaml").read_text()))
    (application,) = config.applications
    assert application.import_path == "deployments:app"
    Settings.model_validate(application.args)


@pytest.mark.parametrize("args", ["max_drafts=3", "max_draft=many", "model=/nowhere/model", "tensor_parallel=2"])
@pytest.mark.slow
def test_serve_run_prints_one_sentence_and_exits_1(tiny: str, args: str) -> None:
    """Ray would print a traceback of its own for any other kind of exception."""
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "deployments:app", f"model={tiny}", args]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "Traceback" not in result.stdout + result.stderr
    *_, sentence = result.stderr.strip().splitlines()
    assert sentence.startswith("Error: ")
    assert args.split("=")[args.startswith("model")] in sentence
    assert "Started a local Ray instance" not in result.stdout + result.stderr
