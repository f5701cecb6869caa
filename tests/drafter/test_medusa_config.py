"""Published layouts of Medusa heads: what loads, what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter.factory import plan_drafter
from drafter.medusa_config import MedusaCheckpoint, is_medusa
from drafter.options import DraftOptions
from tests.drafter.heads import HeadShape, random_weights, safeailab_config, save_head, target_config
from tests.drafter.medusas import (
    MedusaShape,
    Weights,
    medusa_1_names,
    random_medusa,
    save_medusa,
    save_medusa_1,
    vllm_config,
)
from tests.models import save_tiny_model
from verifier.config import ModelConfig
from verifier.errors import BadSetting, CheckpointError, ModelNotFound
from verifier.weights import Checkpoint

SHAPE = MedusaShape()
TARGET = target_config()


def open_vllm(folder: Path, shape: MedusaShape, weights: Weights | None = None, **config: Any) -> MedusaCheckpoint:
    weights = random_medusa(shape) if weights is None else weights
    return MedusaCheckpoint.open(save_medusa(folder / "heads", weights, vllm_config(shape) | config), TARGET)


# ── layouts ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("pickled", [True, False])
def test_medusa_1_layout_has_as_many_heads_as_tensors_say(tmp_path: Path, pickled: bool) -> None:
    """The published config says two heads, and five are in the file."""
    weights = {name: tensor.half() for name, tensor in random_medusa(SHAPE).items()}
    folder = save_medusa_1(tmp_path, weights, pickled=pickled)
    assert is_medusa(folder)
    heads = MedusaCheckpoint.open(folder, TARGET)
    assert (heads.config.num_heads, heads.config.num_layers, heads.config.outputs) == (5, 1, "own")
    for name, tensor in weights.items():
        assert torch.equal(heads.tensor(name), tensor)
    assert heads.target_ids.tolist() == list(range(160))


def test_medusa_1_heads_need_no_config(tmp_path: Path) -> None:
    folder = save_medusa_1(tmp_path, random_medusa(MedusaShape(num_layers=2, bias=False)))
    (folder / "config.json").unlink()
    assert is_medusa(folder)
    assert MedusaCheckpoint.open(folder, TARGET).config.num_layers == 2


def test_medusa_2_heads_lie_in_the_target_itself(tmp_path: Path) -> None:
    """And the target loads, though it has tensors that no decoder knows."""
    folder = save_tiny_model(tmp_path / "model", "llama2", max_shard_size="100KB")
    target = ModelConfig.from_hf(folder)
    weights = random_medusa(SHAPE)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 1
    inner = {f"medusa_head.{name}": tensor for name, tensor in medusa_1_names(weights).items()}
    save_file(load_file(shards[-1]) | inner, shards[-1])
    index = folder / "model.safetensors.index.json"
    listed = "".join(f'"{name}": "{shards[-1].name}", ' for name in inner)
    index.write_text(index.read_text().replace('"weight_map": {', '"weight_map": {' + listed))
    config = folder / "config.json"
    config.write_text(config.read_text().replace("{", '{"medusa_num_heads": 5, "medusa_num_layers": 1, ', 1))
    assert is_medusa(folder)
    assert Checkpoint.open(folder).config.hidden_size == 64
    heads = MedusaCheckpoint.open(folder, target)
    assert heads.config.num_heads == 5
    assert torch.equal(heads.output(3), weights["lm_heads.3.weight"])


@pytest.mark.parametrize("bias", [True, False])
def test_vllm_layout(tmp_path: Path, bias: bool) -> None:
    shape = MedusaShape(num_heads=3, num_layers=2, bias=bias)
    heads = open_vllm(tmp_path, shape, num_heads=4)
    assert (heads.config.num_heads, heads.config.num_layers, heads.config.has_bias) == (3, 2, bias)
    assert is_medusa(tmp_path / "heads")
    weights = {f"medusa_heads.{name}": tensor for name, tensor in random_medusa(shape).items()}
    assert open_vllm(tmp_path, shape, weights).config == heads.config


def test_a_truncated_vocabulary_has_a_map_in_any_order(tmp_path: Path) -> None:
    shape = MedusaShape(truncated=48)
    weights = random_medusa(shape)
    heads = open_vllm(tmp_path, shape)
    assert torch.equal(heads.target_ids, weights["token_map"])
    assert torch.equal(heads.output(1), weights["lm_heads.1.weight"])
    whole = random_medusa(SHAPE) | {"token_map": weights["token_map"].int()}
    heads = open_vllm(tmp_path, shape, whole)
    assert torch.equal(heads.output(1), whole["lm_heads.1.weight"][weights["token_map"]])


def test_one_output_matrix_for_all_heads(tmp_path: Path) -> None:
    shape = MedusaShape(shared=True)
    weights = random_medusa(shape)
    heads = open_vllm(tmp_path, shape)
    assert heads.config.outputs == "shared"
    weights["lm_heads.0.weight"] = weights.pop("lm_head.weight")  # as vLLM also finds it
    assert torch.equal(open_vllm(tmp_path, shape, weights).output(4), weights["lm_heads.0.weight"])
    del weights["lm_heads.0.weight"]
    assert open_vllm(tmp_path, shape, weights).config.outputs == "target"


def test_ids_that_only_pad_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    heads = open_vllm(tmp_path, MedusaShape(vocab=192))
    assert heads.target_ids.tolist() == list(range(160))
    assert len(heads.output(0)) == 160


def test_other_folders_hold_no_medusa_heads(tmp_path: Path) -> None:
    assert not is_medusa(tmp_path)
    assert not is_medusa(save_head(tmp_path, random_weights(HeadShape()), safeailab_config(HeadShape())))


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_heads_for_another_width_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="heads reads hidden states of width 48, but those of target have 64"):
        open_vllm(tmp_path, MedusaShape(hidden=48))


@pytest.mark.parametrize("layout", ["medusa-1", "vllm"])
def test_heads_for_another_vocabulary_are_refused(tmp_path: Path, layout: str) -> None:
    shape = MedusaShape(num_heads=1, vocab=2000)
    folder = tmp_path / "heads"
    if layout == "vllm":
        save_medusa(folder, random_medusa(shape), vllm_config(shape))
    else:
        save_medusa_1(folder, random_medusa(shape))
    with pytest.raises(CheckpointError, match="made for a vocabulary of 2000 tokens, but that of target has 160"):
        MedusaCheckpoint.open(folder, TARGET)


@pytest.mark.parametrize("missing", ["lm_heads.2.weight", "blocks.3.layers.0.weight", "blocks.1.layers.0.bias"])
def test_missing_tensors_are_named(tmp_path: Path, missing: str) -> None:
    weights = random_medusa(SHAPE)
    del weights[missing]
    with pytest.raises(CheckpointError, match=f"heads lacks tensors: {missing}"):
        open_vllm(tmp_path, SHAPE, weights)


def test_heads_without_outputs_or_heads_at_all(tmp_path: Path) -> None:
    blocks = {name: tensor for name, tensor in random_medusa(SHAPE).items() if name.startswith("blocks.")}
    with pytest.raises(CheckpointError, match="lacks the heads' output matrices"):
        open_vllm(tmp_path, SHAPE, blocks)
    with pytest.raises(CheckpointError, match="heads holds no Medusa heads"):
        open_vllm(tmp_path, SHAPE, {"fc.weight": torch.zeros(64, 64)})
    (tmp_path / "heads" / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="neither safetensors nor"):
        MedusaCheckpoint.open(tmp_path / "heads", TARGET)


def test_unexpected_tensors_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"heads has unexpected tensors: fc2\.weight"):
        open_vllm(tmp_path, SHAPE, random_medusa(SHAPE) | {"fc2.weight": torch.zeros(64, 64)})


def test_a_pickle_runs_no_code(tmp_path: Path) -> None:
    torch.save({"0.0.linear.weight": Path("/")}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match="nothing but weights"):
        MedusaCheckpoint.open(tmp_path, TARGET)


def changed_map(index: int, value: int) -> torch.Tensor:
    token_map = random_medusa(MedusaShape(truncated=48))["token_map"]
    token_map[index] = value
    return token_map


@pytest.mark.parametrize(
    ("token_map", "words"),
    [
        (None, "lacks token_map, the map of its 48 draft ids to the target's 160"),
        (changed_map(7, 160), r"token_map\[7\] is 160, but ids end at 160"),
        (changed_map(9, -1), r"token_map\[9\] is -1"),
        (changed_map(9, int(changed_map(0, 5)[8])), "token_map holds a token id twice"),
        (torch.arange(49), r"token_map has shape \[49\] for 48 outputs"),
        (torch.zeros(2, 24), r"token_map has shape \[2, 24\]"),
    ],
)
def test_a_wrong_map_is_refused(tmp_path: Path, token_map: torch.Tensor | None, words: str) -> None:
    weights = random_medusa(MedusaShape(truncated=48))
    del weights["token_map"]
    maps = {} if token_map is None else {"token_map": token_map}
    with pytest.raises(CheckpointError, match=words):
        open_vllm(tmp_path, MedusaShape(truncated=48), weights | maps)


def test_a_truncated_vocabulary_that_only_the_config_knows(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="lacks token_map, the map of its 48 draft ids"):
        open_vllm(tmp_path, SHAPE, truncated_vocab_size=48)


# ── by name ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_folder_of_heads_is_a_drafters_name(tmp_path: Path) -> None:
    folder = save_medusa_1(tmp_path / "heads", random_medusa(SHAPE))
    plan = plan_drafter(str(folder), TARGET)
    weights = 5 * (64 * 64 + 64 + 160 * 64)
    assert plan.num_bytes(1000) == 4 * (weights + 1000 * 64)
    with pytest.raises(CheckpointError, match="width 64, but those of target have 72"):
        plan_drafter(str(folder), target_config(hidden_size=72, num_attention_heads=9, num_key_value_heads=3))
    with pytest.raises(BadSetting, match=r"draft_layer_ids .* left out, since heads has Medusa heads"):
        plan_drafter(str(folder), TARGET, DraftOptions(layer_ids=(2,)))
