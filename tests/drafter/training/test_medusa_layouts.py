"""Medusa heads from data to draft: a run of the command, what it exports, and that this is what was trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from drafter.medusa import MedusaHeads
from drafter.medusa_config import MedusaCheckpoint, is_medusa
from drafter.training.export import main as export
from drafter.training.objectives.factory import create_objective
from drafter.training.objectives.medusa import MedusaObjective
from drafter.training.runs import RunFolder
from drafter.training.target import Target
from drafter.training.train import main as train
from drafter.training.trained import Trained
from tests.drafter.training.tiny import WIDTH, save_data, tiny_target
from verifier.attention import create_attention
from verifier.errors import BadSetting
from verifier.model import Model

QUICK = (
    "--method medusa --batch-rows 40 --micro-rows 20 --warm-up 2 --held-out 0.2 --evaluate-every 10 --steps 20 "
    "--lr 0.02 --muon-lr 0.02 --init random"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


def run(folder: Path, model: Path, num_ids: int) -> Path:
    data = save_data(folder / "data", model, *range(30))
    options = [*QUICK.split(), "--draft-vocab", str(num_ids)]
    train(["--model", str(model), "--data", str(data), "--run", str(folder / "run"), *options])
    return folder / "run"


@pytest.mark.parametrize(("layout", "num_ids"), [("draftree", 150), ("medusa-1", 160)])
def test_heads_are_trained_exported_and_read(tmp_path: Path, model: Path, layout: str, num_ids: int) -> None:
    folder = run(tmp_path, model, num_ids)
    assert json.loads((folder / "log.jsonl").read_text().splitlines()[-1])["acceptance"][0] > 0.5
    export(["--model", str(model), "--run", str(folder), "--out", str(tmp_path / "out"), "--layout", layout])
    assert is_medusa(tmp_path / "out")
    assert "reads the target's last hidden state" in (tmp_path / "out" / "README.md").read_text()

    head = Trained.load(RunFolder(folder), Target.open(model))
    objective = create_objective(head.settings, head.target, 3, head.target_ids)
    assert isinstance(objective, MedusaObjective)
    objective.load_state_dict(dict(head.weights))
    checkpoint = MedusaCheckpoint.open(tmp_path / "out", head.target.config)
    heads = MedusaHeads(checkpoint, Model(head.target.config, head.target.checkpoint, create_attention()))
    assert torch.equal(heads.target_ids, head.target_ids)
    last = torch.randn(4, WIDTH)
    states = head.target.normed(last)
    with torch.no_grad():
        expected = torch.stack([objective.lm_heads[i](objective.blocks[i](states)) for i in range(3)])
    torch.testing.assert_close(heads.logits(heads.fusion([last]), 3), expected, rtol=1e-2, atol=3e-2)


def test_medusa_1_has_no_map(tmp_path: Path, model: Path) -> None:
    folder = run(tmp_path, model, 150)
    with pytest.raises(
        BadSetting, match="draft_vocab is 150, but must be 160, the target's, in a layout without a map"
    ):
        export(["--model", str(model), "--run", str(folder), "--out", str(tmp_path / "out"), "--layout", "medusa-1"])
