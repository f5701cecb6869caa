"""The files for fleets, offline: Ray's own schemas, our settings, versions, and whether all fits the nodes."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema

from deployments import build
from deployments.checks import ServedModel, device_of, served_model
from deployments.replicas import drafter_options, verifier_options
from deployments.settings import Settings
from drafter.factory import plan_drafter
from tests.deployments.hollow import EAGLE3_70B, LLAMA_70B, MISTRAL_LARGE, hollow_head, hollow_model
from verifier.config import ModelConfig
from verifier.errors import CheckpointError
from workers.machine import FLOAT32, GIB, needed_bytes

ROOT = Path(__file__).parents[2]
FLEETS = ROOT / "deployments" / "fleets"
CLUSTERS = [ROOT / "cluster.yaml", FLEETS / "gcp.yaml"]
SERVED = sorted(path for path in FLEETS.glob("*-tp*.yaml"))
RAYSERVICE = FLEETS / "rayservice.yaml"
FREE = 0.9  # of a GPU's or a machine's memory: the rest is for kernels, activations, Ray's object store and the system

Options = dict[str, Any]


@dataclass(frozen=True)
class NodeType:
    """What the cluster file says that a machine has. Memory is said in labels, for want of another place."""

    name: str
    cpus: int
    gpus: int
    most: int
    labels: dict[str, str]

    def gib(self, kind: str) -> float:
        return float(self.labels[f"{kind}-gib"])


def read(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(path.read_text())
    return loaded


def node_types(path: Path) -> list[NodeType]:
    """Of a file for `ray up`, or of the RayService: those that take replicas."""
    config = read(path)
    if "spec" not in config:
        return [
            NodeType(
                name, each["resources"]["CPU"], each["resources"].get("GPU", 0), each["max_workers"], each["labels"]
            )
            for name, each in config["available_node_types"].items()
            if name != config["head_node_type"]
        ]
    found = []
    for group in config["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        limits = container["resources"]["limits"]
        gpus = int(limits["nvidia.com/gpu"])
        found.append(NodeType(group["groupName"], int(limits["cpu"]), gpus, group["maxReplicas"], group["labels"]))
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like /models on the nodes."""
    folder = tmp_path_factory.mktemp("models")
    hollow_model(folder / "Llama-3.3-70B-Instruct", LLAMA_70B)
    hollow_head(folder / "EAGLE3-LLaMA3.3-Instruct-70B", EAGLE3_70B)
    hollow_model(folder / "Mistral-Large-Instruct-2407", MISTRAL_LARGE)
    return folder


def settings_of(path: Path, models: Path) -> Settings:
    (application,) = ServeDeploySchema.model_validate(read(path)).applications
    args = yaml.safe_load(yaml.safe_dump(application.args).replace("/models/", f"{models}/"))
    settings = Settings.model_validate(args)
    assert application.import_path == "deployments:app"
    return settings


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.name)
def test_ray_takes_the_cluster_file(path: Path) -> None:
    """Ray ignores some unknown keys when it launches, and refuses others when nodes are already paid for."""
    config = read(path)
    prepared = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    head = config["available_node_types"][config["head_node_type"]]
    assert head["resources"] == {"CPU": 0}, "replicas would run where the cluster is looked after"
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in config["head_start_ray_commands"][-1]
    assert sum(each.most for each in node_types(path)) <= config["max_workers"]
    # Ray's own commands would install a nightly build where they find no Ray.
    assert not [line for line in prepared["setup_commands"] if "ray-wheels" in line]
    for name, each in config["available_node_types"].items():
        assert set(each["node_config"]) <= NODE_KEYS[config["provider"]["type"]], name


NODE_KEYS = {  # of EC2's create_instances and of GCP's instances.insert; Ray looks at none of them
    "aws": {"InstanceType", "InstanceMarketOptions", "BlockDeviceMappings"},
    "gcp": {"machineType", "scheduling", "disks"},
}


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.name)
def test_nodes_share_a_token_and_watch_for_their_end(path: Path) -> None:
    """A node without the token cannot join; and nothing in Ray watches for spot notices."""
    config = read(path)
    assert config["file_mounts"]["/home/ray/.ray/auth_token"] == "~/.ray/auth_token"
    assert "--env RAY_AUTH_MODE=token" in config["docker"]["run_options"]
    watcher = config["worker_start_ray_commands"][-1]
    assert f"-m deployments.spot --cloud {config['provider']['type']} --head $RAY_HEAD_IP:6379" in watcher


def pinned(name: str) -> str:
    found = re.search(rf"^{name}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found
    return found[1]


@pytest.mark.parametrize("path", [*CLUSTERS, FLEETS / "Containerfile", RAYSERVICE], ids=lambda path: path.name)
def test_versions_are_those_that_are_tested(path: Path) -> None:
    """The nodes' Ray was another one than the package's, and no node could join."""
    text = path.read_text()
    assert 'requires-python = ">=3.11"' in (ROOT / "pyproject.toml").read_text()
    if path == RAYSERVICE:
        assert read(path)["spec"]["rayClusterConfig"]["rayVersion"] == pinned("ray")
        return
    images = re.findall(r"rayproject/ray:(\S+)", text)
    assert {image.rsplit("-", 1)[0] for image in images} == {f"{pinned('ray')}-py311"}
    assert f"found == ['3.11', '{pinned('ray')}', '{pinned('torch')}']" in text
    assert all(version == pinned("ray") for version in re.findall(r"ray\[default\]==([\d.]+)", text))


def test_all_pods_run_the_container_file() -> None:
    """The tag is the package's version, so that an image is of one state of the code."""
    (version,) = re.findall(r'^version = "(\S+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    images = set(re.findall(r"YOUR-REGISTRY/\S+", RAYSERVICE.read_text() + (FLEETS / "Containerfile").read_text()))
    assert images - {"YOUR-REGISTRY,"} == {f"YOUR-REGISTRY/draftree:{version}"}


def test_the_rayservice_is_what_kuberay_takes() -> None:
    service = read(RAYSERVICE)
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        assert "labels" not in group["rayStartParams"], "KubeRay refuses labels there"
        (container,) = group["template"]["spec"]["containers"]
        assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/models"}
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert yaml.safe_load(service["spec"]["serveConfigV2"]) == read(FLEETS / "llama-3.3-70b-tp8.yaml")


@pytest.mark.parametrize("path", SERVED, ids=lambda path: path.stem)
def test_our_settings_and_the_models_fit(path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `serve deploy` would find out: names, values, the model's sizes, the head's, and the machine's memory."""
    monkeypatch.setattr(build, "available_memory", lambda: int(2048 * GIB * FREE))
    build.app(settings_of(path, models))


@pytest.mark.parametrize("path", SERVED, ids=lambda path: path.stem)
def test_the_files_say_what_a_gpu_holds(path: Path, models: Path) -> None:
    model = served_model(settings_of(path, models))
    assert model.engine.device == "cuda"
    found = re.search(r"holds (\d+) GiB of weights .* (\d+) GiB of KV", path.read_text())
    assert found
    weights, cache = needed_bytes(model.config, model.engine)
    assert float(found[1]) == pytest.approx(weights / GIB, abs=1)
    assert float(found[2]) == pytest.approx(cache / GIB, abs=1)


@pytest.mark.parametrize("path", SERVED, ids=lambda path: path.stem)
@pytest.mark.parametrize("cluster", [*CLUSTERS, RAYSERVICE], ids=lambda path: path.name)
def test_what_is_deployed_fits_the_nodes(path: Path, cluster: Path, models: Path) -> None:
    settings = settings_of(path, models)
    model = served_model(settings)
    verifiers, drafters = verifier_options(settings, {}), drafter_options(settings, {})
    (verifier,) = matching(node_types(cluster), verifiers["placement_group_bundle_label_selector"][0])
    bundles = verifiers["placement_group_bundles"]
    per_node = verifier.gpus // int(sum(bundle["GPU"] for bundle in bundles))
    assert per_node >= 1, "the ranks of a verifier share a node"
    assert per_node * sum(bundle["CPU"] for bundle in bundles) <= verifier.cpus
    assert most_replicas(verifiers) <= per_node * verifier.most
    assert rank_gib(model) <= verifier.gib("gpu") * FREE
    if settings.drafter_placement == "remote":
        (node,) = matching(node_types(cluster), drafters["ray_actor_options"]["label_selector"])
        assert device_of(settings, settings.drafter_num_gpus) == "cuda"
        assert most_replicas(drafters) * drafters["ray_actor_options"]["num_gpus"] <= node.most * node.gpus
        assert drafter_gib(settings, model) <= node.gib("gpu") * FREE
        assert drafter_gib(settings, model) <= node.gib("memory") * FREE


def matching(nodes: list[NodeType], selector: dict[str, str]) -> list[NodeType]:
    return [node for node in nodes if selector.items() <= node.labels.items()]


def most_replicas(options: Options) -> int:
    scaling = options.get("autoscaling_config", {})
    return int(scaling.get("max_replicas", options.get("num_replicas", 0)))


def rank_gib(model: ServedModel) -> float:
    """What rank 0, which holds most, takes of a GPU: its part of weights and cache, and all that is kept for drafts."""
    drafting = model.drafter.num_bytes(model.engine.num_pages * model.engine.page_size)
    return (sum(needed_bytes(model.config, model.engine)) + drafting) / GIB


def drafter_gib(settings: Settings, model: ServedModel) -> float:
    """The network with its cache, and the target's embedding and output matrix, which it may share."""
    tokens = model.engine.num_pages * model.engine.page_size
    shared = 2 * FLOAT32 * model.config.vocab_size * model.config.hidden_size
    network = plan_drafter(settings.draft_model, model.config).num_bytes(tokens)
    return (network + shared) / GIB


def test_a_model_that_is_no_llama_is_refused_by_name() -> None:
    """What the file for the 175B class says of OPT-175B."""
    for architecture in ("OPTForCausalLM", "BloomForCausalLM", "FalconForCausalLM"):
        with pytest.raises(CheckpointError, match=architecture):
            ModelConfig.from_hf(LLAMA_70B | {"architectures": [architecture]})


@pytest.mark.parametrize(
    ("nodes", "cpus", "here"), [(1, 8.0, True), (1, 0.0, False), (3, 200.0, False), (0, 0.0, True)]
)
def test_a_head_does_not_measure_models_by_its_own_memory(
    nodes: int, cpus: float, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fleet's head, which builds the application, refused every model that did not fit into its own memory."""
    monkeypatch.setattr("ray.is_initialized", lambda: nodes > 0)
    monkeypatch.setattr("ray.nodes", lambda: [{}] * nodes)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": cpus} if cpus else {})
    assert build.runs_here() == here
