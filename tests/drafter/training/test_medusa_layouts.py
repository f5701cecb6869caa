"""What was trained is what is read, in both layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafter.medusa import MedusaHeads
from drafter.medusa_config import MedusaCheckpoint, is_medusa
from drafter.training.medusa_layouts import save_medusa_1, save_vllm
from drafter.training.objectives.medusa import MedusaObjective, initialise
from drafter.training.target import Target
from tests.drafter.training.data import conversation
from tests.models import save_tiny_model
from verifier.attention import create_attention
from verifier.errors import BadSetting
from verifier.model import Model

VOCAB, HIDDEN = 160, 64


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.open(save_tiny_model(tmp_path_factory.mktemp("models") / "target", "llama2"))


def trained(target: Target, ids: torch.Tensor) -> MedusaObjective:
    """After one step, so that no weight is at its first value."""
    objective = MedusaObjective(target, ids, 3, 0.8, num_layers=2)
    initialise(objective, "target", seed=0)
    optimizer = torch.optim.AdamW(objective.parameters(), lr=0.1)
    objective(objective.collate([conversation(60, hidden=HIDDEN, vocab=VOCAB)], torch.device("cpu"))).loss.backward()
    optimizer.step()
    return objective


@pytest.mark.parametrize(("layout", "num_ids"), [("vllm", VOCAB), ("vllm", 100), ("medusa-1", VOCAB)])
def test_exported_heads_say_what_the_trained_ones_say(
    tmp_path: Path, target: Target, layout: str, num_ids: int
) -> None:
    ids = torch.arange(VOCAB)[-num_ids:]
    objective = trained(target, ids)
    save = save_vllm if layout == "vllm" else save_medusa_1
    save(tmp_path, objective.state_dict(), ids, target.config)
    assert is_medusa(tmp_path)
    checkpoint = MedusaCheckpoint.open(tmp_path, target.config)
    heads = MedusaHeads(checkpoint, Model(target.config, target.checkpoint, create_attention()))
    assert torch.equal(heads.target_ids, ids)
    last = torch.randn(4, HIDDEN)
    states = target.normed(last)
    with torch.no_grad():
        expected = torch.stack([objective.lm_heads[head](objective.blocks[head](states)) for head in range(3)])
    torch.testing.assert_close(heads.logits(heads.fusion([last]), 3), expected, rtol=1e-2, atol=3e-2)


def test_medusa_1_has_no_map(tmp_path: Path, target: Target) -> None:
    ids = torch.arange(100)
    with pytest.raises(
        BadSetting, match="draft_vocab is 100, but must be 160, the target's, in a layout without a map"
    ):
        save_medusa_1(tmp_path, trained(target, ids).state_dict(), ids, target.config)
