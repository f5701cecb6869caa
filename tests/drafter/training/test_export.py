"""What a run exports is what the loader of published heads reads, and it drafts what was trained."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafter.checkpoints import DraftFolder, open_eagle3
from drafter.eagle3 import Eagle3Head
from drafter.training import eagle3_layouts
from drafter.training.export import main
from drafter.training.objectives.eagle3 import Eagle3Objective
from drafter.training.objectives.factory import create_objective
from drafter.training.runs import RunFolder
from drafter.training.target import Target
from drafter.training.train import main as train
from drafter.training.trained import Trained
from tests.drafter.training.tiny import countdown, said_by, save_data, tiny_target
from verifier.attention import create_attention
from verifier.attention.layout import RowLayout
from verifier.batch import Segment
from verifier.errors import BadSetting, CheckpointError, ModelNotFound
from verifier.model import Model
from verifier.pool import PagePool
from verifier.tree import TokenTree

LAYOUTS = ("draftree", "safeailab", "speculators")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return save_data(tmp_path_factory.mktemp("data"), model, *range(20))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path) -> Path:
    folder = tmp_path_factory.mktemp("run")
    quick = "--draft-vocab 100 --batch-rows 40 --held-out 0.2 --steps 2 --evaluate-every 1 --intermediate-size 80"
    train(["--model", str(model), "--data", str(data), "--run", str(folder), *quick.split()])
    return folder


def trained(run: Path, model: Path, layer_ids: tuple[int, ...] = (0, 1, 2)) -> Trained:
    return replace(Trained.load(RunFolder(run), Target.open(model)), layer_ids=layer_ids)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_is_read_as_the_head_that_was_trained(layout: str, run: Path, model: Path, tmp_path: Path) -> None:
    """Three layers are too few for SafeAILab's choice of them, so that layout is written for what it reads."""
    layer_ids = (2, 1, 0) if layout == "safeailab" else (0, 1, 2)
    head = trained(run, model, layer_ids)
    getattr(eagle3_layouts, f"save_{layout}")(tmp_path / layout, head)
    asked = (0, 1, 2) if layout == "safeailab" else ()
    checkpoint = open_eagle3(DraftFolder(tmp_path / layout), head.target.config, asked)
    config = checkpoint.config
    assert config.layer_ids == (0, 1, 2)
    assert torch.equal(checkpoint.target_ids, head.target_ids)
    assert (config.draft_vocab_size, config.decoder.intermediate_size) == (100, 80)
    assert (config.decoder.rope_theta, config.decoder.head_dim) == (head.target.config.rope_theta, 8)
    assert not any((config.norm_before_residual, config.norm_before_fc, config.fc_norm, config.norm_output))
    for name, tensor in head.weights.items():
        assert torch.equal(checkpoint.tensor(name.replace("midlayer.", "layers.0.")), tensor.half())
    assert config.has_embedding == (layout == "speculators")


@torch.inference_mode()
def test_it_drafts_what_was_trained(run: Path, model: Path, tmp_path: Path) -> None:
    """Logits of the network that serves against those of the one that was trained, at the same rounded weights."""
    head = trained(run, model)
    eagle3_layouts.save_draftree(tmp_path / "head", head)
    checkpoint = open_eagle3(DraftFolder(tmp_path / "head"), head.target.config)
    attention = create_attention("reference")
    network = Eagle3Head(checkpoint, Model(head.target.config, head.target.checkpoint, attention), attention)
    objective = create_objective(head.settings, head.target, 3, head.target_ids)
    assert isinstance(objective, Eagle3Objective)
    objective.load_state_dict({name: tensor.half().float() for name, tensor in head.weights.items()})
    each = said_by(head.target, countdown(18, seed=3))
    batch = objective.collate([each], torch.device("cpu"))
    expected = objective.logits(objective.begin(batch).hidden)
    decoder = network.decoder
    pool = PagePool(2, 16, num_layers=1, num_kv_heads=decoder.num_kv_heads, head_dim=decoder.head_dim)
    slots = len(each) - 1
    layout = RowLayout.of([Segment(0, TokenTree.chain(each.ids[1:].tolist()), (0, 1))], 16)
    fused = network.fusion([states[:slots] for states in each.features.float().chunk(3, dim=1)])
    logits = network.logits(network.forward(layout, fused, pool))
    torch.testing.assert_close(logits[batch.steps[0].slots], expected, rtol=1e-3, atol=1e-3)


def test_the_command_writes_a_card_beside_the_weights(run: Path, model: Path, data: Path, tmp_path: Path) -> None:
    main(["--run", str(run), "--model", str(model), "--out", str(tmp_path / "head"), "--data", str(data)])
    assert sorted(path.name for path in (tmp_path / "head").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    card = (tmp_path / "head" / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "20 conversations" in card
    assert "| draft_vocab | 100 |" in card
    assert "train --data data --run run --draft-vocab 100" in card


def test_a_card_names_the_commands_of_the_runs_that_it_began_with(
    run: Path, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It named the last of them alone, which makes no such head."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, "first")
    small = ["--draft-vocab", "100", "--intermediate-size", "80", "--held-out", "0.2"]
    given = ["--model", str(model), "--data", str(data), "--steps", "1", "--evaluate-every", "1"]
    train([*given, *small, "--run", "second", "--start-from", "first"])
    main(["--run", "second", "--model", str(model), "--out", "head"])
    card = Path("head", "README.md").read_text()
    assert "--run first --draft-vocab 100" in card
    assert "--start-from first" not in card.split("--run first")[1].splitlines()[0]
    assert "--run run --draft-vocab 100 --intermediate-size 80 --start-from first" in card
    shutil.rmtree("first")
    main(["--run", "second", "--model", str(model), "--out", "head"])
    assert "--run first" not in Path("head", "README.md").read_text()
    Path("second").rename("first")  # the name that it began with is its own now
    main(["--run", "first", "--model", str(model), "--out", "head"])
    assert Path("head", "README.md").read_text().count("--start-from first") <= 2


def test_a_speculators_config_says_all_that_vllm_asks_for(run: Path, model: Path, tmp_path: Path) -> None:
    head = trained(run, model)
    eagle3_layouts.save_speculators(tmp_path / "head", head)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert config["norm_before_residual"] is config["norm_output"] is False
    assert config["transformer_layer_config"]["vocab_size"] == 160
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]


def test_what_cannot_be_exported(run: Path, model: Path, tmp_path: Path) -> None:
    there = ["--model", str(model), "--out", str(tmp_path / "head")]
    with pytest.raises(BadSetting, match="layout is 'gguf', but must be one of draftree, safeailab, speculators"):
        main(["--run", str(run), *there, "--layout", "gguf"])
    with pytest.raises(BadSetting, match=r"SafeAILab's code reads layers \[2, 1, 0\] alone, this head \[0, 1, 2\]"):
        main(["--run", str(run), *there, "--layout", "safeailab"])
    with pytest.raises(ModelNotFound, match=r"no best\.pt"):
        main(["--run", str(tmp_path), *there])
    head = torch.load(run / "best.pt", weights_only=True)
    torch.save(head | {"fingerprint": "0"}, tmp_path / "best.pt")
    with pytest.raises(CheckpointError, match="trained a head for"):
        main(["--run", str(tmp_path), *there])
