"""EAGLE-1 heads and small models from data to draft: a run of the command, what it exports, and who reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from drafter.checkpoints import DraftFolder
from drafter.networks import plan_network
from drafter.options import DraftOptions
from drafter.training.export import main as export
from drafter.training.objectives.eagle import EagleObjective
from drafter.training.objectives.factory import create_objective
from drafter.training.objectives.small_model import SmallModelObjective
from drafter.training.runs import RunFolder
from drafter.training.target import Target
from drafter.training.train import main as train
from drafter.training.trained import Trained
from tests.drafter.training.tiny import countdown, said_by, save_data, tiny_target
from verifier.attention import create_attention
from verifier.attention.layout import RowLayout
from verifier.batch import Segment
from verifier.model import Model
from verifier.pool import PagePool
from verifier.tree import TokenTree

QUICK = (
    "--draft-vocab 150 --batch-rows 40 --micro-rows 20 --warm-up 2 --held-out 0.2 --evaluate-every 10 --steps 20 "
    "--lr 0.02 --muon-lr 0.02 --init random --model-hidden 48 --model-layers 1"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


def trained(folder: Path, model: Path, method: str) -> Trained:
    data = save_data(folder / "data", model, *range(30))
    train(
        ["--model", str(model), "--data", str(data), "--run", str(folder / "run"), "--method", method, *QUICK.split()]
    )
    lines = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"]
    return Trained.load(RunFolder(folder / "run"), Target.open(model))


def exported(folder: Path, model: Path, layout: str) -> DraftFolder:
    export(["--model", str(model), "--run", str(folder / "run"), "--out", str(folder / "out"), "--layout", layout])
    return DraftFolder(folder / "out")


@torch.inference_mode()
def slot_logits(folder: DraftFolder, head: Trained, tokens: list[int], features: torch.Tensor | None) -> torch.Tensor:
    """What the network that serves says in each slot of a text."""
    attention = create_attention()
    config = head.target.config
    network = plan_network(folder, config, DraftOptions()).load(
        Model(config, head.target.checkpoint, attention), attention
    )
    decoder = network.decoder
    pool = PagePool(2, 16, num_layers=1, num_kv_heads=decoder.num_kv_heads, head_dim=decoder.head_dim)
    layout = RowLayout.of([Segment(0, TokenTree.chain(tokens), (0, 1))], 16)
    if features is not None and network.fusion:
        features = network.fusion([features])
    return network.logits(network.forward(layout, features, pool))


@pytest.mark.parametrize("layout", ["draftree", "safeailab"])
def test_an_eagle_1_head_is_trained_exported_and_read(layout: str, model: Path, tmp_path: Path) -> None:
    head = trained(tmp_path, model, "eagle")
    folder = exported(tmp_path, model, layout)
    assert folder.kind == "eagle"
    assert ("embed_tokens.weight" in folder.shapes) == (layout == "safeailab")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# eagle draft head for" in card
    assert "reads the target's last hidden state" in card

    objective = create_objective(head.settings, head.target, 3, head.target_ids)
    assert isinstance(objective, EagleObjective)
    objective.load_state_dict({name: tensor.half().float() for name, tensor in head.weights.items()})
    each = said_by(head.target, countdown(18, seed=3))
    batch = objective.collate([each], torch.device("cpu"))
    with torch.no_grad():
        expected = objective.continued(batch) @ head.target.output.T
    logits = slot_logits(folder, head, each.ids[1:].tolist(), each.last[:-1].float())
    torch.testing.assert_close(logits[batch.rows], expected, rtol=1e-3, atol=1e-3)


def test_a_small_model_is_trained_exported_and_read(model: Path, tmp_path: Path) -> None:
    head = trained(tmp_path, model, "model")
    folder = exported(tmp_path, model, "draftree")
    assert folder.kind == "model"
    assert "# Small draft model for" in (tmp_path / "out" / "README.md").read_text()

    objective = create_objective(head.settings, head.target, 3, head.target_ids)
    assert isinstance(objective, SmallModelObjective)
    objective.load_state_dict({name: tensor.half().float() for name, tensor in head.weights.items()})
    each = said_by(head.target, countdown(18, seed=3))
    batch = objective.collate([each], torch.device("cpu"))
    with torch.no_grad():
        expected = objective.logits(batch)
        theirs = AutoModelForCausalLM.from_pretrained(folder.path, dtype=torch.float32)(each.ids[None].long()).logits[0]
    logits = slot_logits(folder, head, each.ids.tolist(), None)
    torch.testing.assert_close(logits[batch.rows], expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(theirs[batch.rows], expected, rtol=1e-3, atol=1e-3)
