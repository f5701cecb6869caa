"""Published layouts, layer ids, maps: what loads, what is refused, and in which words."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter.checkpoints import DraftFolder, HeadCheckpoint, open_eagle, open_eagle3
from drafter.eagle_config import EagleConfig
from drafter.factory import plan_drafter
from drafter.head_config import Eagle3Config
from tests.drafter.eagle_heads import EagleShape, eagle_config, eagle_weights, save_tiny_eagle
from tests.drafter.heads import HeadShape, Weights, random_weights, safeailab_config, save_head, target_config
from verifier.errors import BadSetting, CheckpointError, ModelNotFound

SHAPE = HeadShape()
EAGLE = EagleShape()
TARGET = target_config()


def open_head(
    folder: Path, weights: Weights | None = None, *, drop: tuple[str, ...] = (), **config: Any
) -> HeadCheckpoint[Eagle3Config]:
    weights = random_weights(SHAPE) if weights is None else weights
    data = {key: value for key, value in (safeailab_config(SHAPE) | config).items() if key not in drop}
    return open_eagle3(DraftFolder(save_head(folder / "head", weights, data)), TARGET)


def renamed(weights: Weights, **parts: str) -> Weights:
    for old, new in parts.items():
        weights = {name.replace(f"{old}.", new): tensor for name, tensor in weights.items()}
    return weights


def speculators_config(shape: HeadShape, **changes: Any) -> dict[str, Any]:
    body = safeailab_config(shape)
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3DraftModel"],
        "speculators_version": "0.3.0",
        "draft_vocab_size": body.pop("draft_vocab_size"),
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": body,
        "speculators_config": {"algorithm": "eagle3"},
        **changes,
    }


# ── layouts ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_safeailab_layout_is_a_pickle_of_weights(tmp_path: Path) -> None:
    weights = {name: t.half() if t.is_floating_point() else t for name, t in random_weights(SHAPE).items()}
    config = safeailab_config(SHAPE)
    del config["rope_theta"]
    head = open_eagle3(DraftFolder(save_head(tmp_path, weights, config, pickled=True)), TARGET)
    assert torch.equal(head.tensor("layers.0.self_attn.q_proj.weight"), weights["midlayer.self_attn.q_proj.weight"])
    assert head.config.decoder.rope_theta == 10000.0  # the head's own, whatever its target has
    assert head.config.layer_ids == (2, 15, 27)
    assert not head.config.has_embedding
    assert not head.config.norm_before_residual


def test_a_pickle_runs_no_code(tmp_path: Path) -> None:
    weights: dict[str, Any] = {"fc.weight": Path("/")}
    folder = save_head(tmp_path, weights, safeailab_config(SHAPE), pickled=True)
    with pytest.raises(CheckpointError, match="nothing but weights"):
        DraftFolder(folder)


def test_specforge_layout(tmp_path: Path) -> None:
    shape = HeadShape(own_embedding=True)
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 14, 26], "use_aux_hidden_state": True}
    weights = {name: t.bfloat16() if t.is_floating_point() else t for name, t in random_weights(shape).items()}
    head = open_head(tmp_path, weights, architectures=["LlamaForCausalLMEagle3"], eagle_config=nested)
    assert head.config.layer_ids == (2, 15, 27)
    assert head.config.has_embedding


def test_modelopt_layout_may_share_the_targets_output(tmp_path: Path) -> None:
    shape = HeadShape(own_output=False, norm_before_fc=True, draft_vocab=160)
    nested = {"eagle_aux_hidden_state_layer_ids": [24, 27, 30], "norm_before_fc": True}
    head = open_head(tmp_path, random_weights(shape), draft_vocab_size=None, eagle_config=nested)
    assert head.config.layer_ids == (24, 27, 30)  # 30 is after the last layer, so these are boundary ids
    assert head.config.norm_before_fc
    assert not head.config.has_output
    assert head.target_ids.tolist() == list(range(160))


def test_speculators_layout(tmp_path: Path) -> None:
    shape = HeadShape(own_embedding=True, qk_norm=True)
    weights = renamed(random_weights(shape), midlayer="layers.0.")
    config = speculators_config(shape)
    config["transformer_layer_config"]["model_type"] = "qwen3"
    head = open_eagle3(DraftFolder(save_head(tmp_path, weights, config)), TARGET)
    assert head.config.norm_before_residual  # what a missing key means in this layout
    assert head.config.decoder.qk_norm
    config |= {"norm_before_residual": False, "eagle_aux_hidden_state_layer_ids": [1, 14, 27]}
    head = open_eagle3(DraftFolder(save_head(tmp_path, weights, config)), TARGET)
    assert not head.config.norm_before_residual
    assert head.config.layer_ids == (1, 14, 27)


def test_names_with_a_leading_model_and_older_norms(tmp_path: Path) -> None:
    weights = renamed(
        random_weights(HeadShape(fc_norm=True)), **{"fc_norm.0": "aux_norm_low.", "fc_norm.1": "aux_norm_mid."}
    )
    weights = renamed(weights, **{"fc_norm.2": "aux_norm_high."})
    maps = {name: weights.pop(name) for name in ("d2t", "t2d")}
    head = open_head(tmp_path, {f"model.{name}": tensor for name, tensor in weights.items()} | maps, use_aux_norm=True)
    assert head.config.fc_norm


def test_layers_are_counted_by_their_tensors(tmp_path: Path) -> None:
    """A published head says num_hidden_layers 36 and has one; vLLM's later layers own a hidden_norm nobody reads."""
    assert open_head(tmp_path, num_hidden_layers=36).config.decoder.num_layers == 1
    weights = random_weights(HeadShape(num_layers=2)) | {"layers.1.hidden_norm.weight": torch.ones(64)}
    assert open_head(tmp_path, weights, num_hidden_layers=1).config.decoder.num_layers == 2


@pytest.mark.parametrize(
    ("extra", "config", "words"),
    [
        ({"mask_hidden": torch.zeros(1, 192)}, {}, "P-EAGLE"),
        ({}, {"speculators_model_type": "peagle"}, "P-EAGLE"),
        ({"midlayer.self_attn.kv_a_proj_with_mqa.weight": torch.zeros(4, 4)}, {}, "MLA"),
        ({"medusa_head.0.0.linear.weight": torch.zeros(4, 4)}, {}, "Medusa"),
        ({}, {"speculators_model_type": "dflash"}, "only EAGLE-3 heads are supported"),
    ],
)
def test_other_kinds_are_named(extra: Weights, config: dict[str, Any], words: str, tmp_path: Path) -> None:
    save_head(tmp_path / "head", random_weights(SHAPE) | extra, safeailab_config(SHAPE) | config)
    with pytest.raises(CheckpointError, match=f"head .*{words}"):
        plan_drafter(str(tmp_path / "head"), TARGET)


# ── layer ids ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (2, 15, 27)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 14, 27]}, (1, 14, 27)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 14, 27]}}, (2, 15, 28)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 14, 27]}}, (2, 14, 27)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 14, 30]}}, (1, 14, 30)),
        ({"eagle_config": {"layer_ids": [1, 14, 27]}}, (1, 14, 27)),
    ],
)
def test_layer_ids_come_in_two_conventions(config: dict[str, Any], expected: tuple[int, ...], tmp_path: Path) -> None:
    """Read in the wrong one, a head reads its neighbours' states: acceptance of a few per cent and no message."""
    assert open_head(tmp_path, **config).config.layer_ids == expected


def test_layer_ids_can_be_overridden_and_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_head(tmp_path / "head", random_weights(SHAPE), safeailab_config(SHAPE))
    with caplog.at_level(logging.INFO):
        assert open_eagle3(DraftFolder(folder), TARGET, layer_ids=(3, 16, 28)).config.layer_ids == (3, 16, 28)
    assert "head reads the residual stream after layers 3, 16, 28, as asked" in caplog.text
    caplog.clear()
    open_eagle3(DraftFolder(folder), TARGET)
    assert caplog.records[0].levelno == logging.WARNING
    assert "after layers 2, 15, 27, by default, since its config names none" in caplog.text


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1, 14, 31], "head reads layer 31 of its target, but target has 30"),
        ([14, 2, 27], "different and ascending"),
        ([2, 15], "head fuses features of width 192 altogether .*, but 2 layers of target give 128"),
    ],
)
def test_impossible_layer_ids_are_refused(ids: list[int], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        open_head(tmp_path, eagle_aux_hidden_state_layer_ids=ids)


# ── EAGLE-1 and EAGLE-2 ──────────────────────────────────────────────────────────────────────────────────────────────


def open_eagle_head(folder: Path, weights: Weights, **config: Any) -> HeadCheckpoint[EagleConfig]:
    return open_eagle(DraftFolder(save_head(folder / "head", weights, eagle_config(EAGLE) | config)), TARGET)


@pytest.mark.parametrize("pickled", [True, False])
def test_an_eagle_1_head_is_told_by_its_tensors(pickled: bool, tmp_path: Path) -> None:
    """Its config could be any Llama's."""
    weights = {name: tensor.half() for name, tensor in eagle_weights(EAGLE).items()}
    folder = DraftFolder(save_head(tmp_path, weights, eagle_config(EAGLE), pickled=pickled))
    assert folder.kind == "eagle"
    head = open_eagle(folder, TARGET)
    assert head.config.has_fc_bias
    assert head.config.has_embedding
    assert head.config.decoder.num_layers == 1
    assert not head.config.decoder.attention_bias
    assert torch.equal(head.tensor("fc.weight"), weights["fc.weight"])
    assert head.target_ids.tolist() == list(range(160))
    assert head.num_bytes(1000) - head.num_bytes(0) == 4 * 1000 * (2 * 2 * 16 + 64)
    as_fp32 = {name for name, tensor in weights.items() if tensor.dim() == 1 or "embed_tokens" in name}
    held = sum(tensor.numel() * (4 if name in as_fp32 else 2) for name, tensor in weights.items())
    assert head.num_bytes(0) == held


def test_biases_are_where_config_or_tensors_say(tmp_path: Path) -> None:
    without = EagleShape(fc_bias=False, attention_bias=True)
    head = open_eagle_head(tmp_path, eagle_weights(without), bias=False, qkv_bias=True)
    assert not head.config.has_fc_bias
    assert head.config.decoder.attention_bias
    assert not head.config.decoder.output_bias
    with pytest.raises(CheckpointError, match=r"head lacks tensors: fc\.bias"):
        open_eagle_head(tmp_path, eagle_weights(without), bias=True)
    with pytest.raises(CheckpointError, match=r"head lacks tensors: layers\.0\.self_attn\.q_proj\.bias, .*k_proj"):
        open_eagle_head(tmp_path, eagle_weights(EAGLE), qkv_bias=True)


def test_pickled_shards_are_one_checkpoint(tmp_path: Path) -> None:
    weights = eagle_weights(EAGLE)
    save_head(tmp_path, {}, eagle_config(EAGLE), pickled=True)
    (tmp_path / "pytorch_model.bin").unlink()
    files = {name: f"pytorch_model-0000{1 + (name > 'fc.')}-of-00002.bin" for name in weights}
    for file in set(files.values()):
        torch.save({name: weights[name] for name in weights if files[name] == file}, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    head = open_eagle(DraftFolder(tmp_path), TARGET)
    assert all(torch.equal(head.tensor(name), tensor) for name, tensor in weights.items())
    (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.bin is missing, but pytorch_model\.bin\.index\.json"):
        DraftFolder(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match=r"has neither safetensors nor a pytorch_model\.bin"):
        DraftFolder(tmp_path)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (EagleShape(hidden=48), "head continues features of width 48, but those of target have 64"),
        (EagleShape(target_vocab=32000), "made for a vocabulary of 32000 tokens, but that of target has 160"),
    ],
)
def test_an_eagle_1_head_for_another_target_is_refused(shape: EagleShape, words: str, tmp_path: Path) -> None:
    folder = save_tiny_eagle(tmp_path / "head", shape)
    with pytest.raises(CheckpointError, match=words):
        plan_drafter(str(folder), TARGET)


@pytest.mark.parametrize("name", ["layers.0.mlp.up_proj.weight", "layers.0.post_attention_layernorm.weight"])
def test_a_tensor_that_an_eagle_1_head_lacks_is_named(name: str, tmp_path: Path) -> None:
    weights = eagle_weights(EAGLE)
    del weights[name]
    with pytest.raises(CheckpointError, match=f"head lacks tensors: {name}"):
        open_eagle_head(tmp_path, weights)


def test_a_tensor_that_no_eagle_1_head_has_is_named(tmp_path: Path) -> None:
    """With a norm before its first layer it would be another network."""
    weights = eagle_weights(EAGLE) | {"layers.0.input_layernorm.weight": torch.ones(64)}
    with pytest.raises(CheckpointError, match=r"unexpected tensors: layers\.0\.input_layernorm\.weight"):
        open_eagle_head(tmp_path, weights)


# ── width and vocabulary ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_head_for_another_width_is_refused(tmp_path: Path) -> None:
    """It used to surface as a matrix error in a worker's thread, and clients waited for ever."""
    weights = random_weights(HeadShape(target_hidden=56))
    with pytest.raises(CheckpointError, match=r"fuses features of width 168 altogether .* 3 layers of target give 192"):
        open_head(tmp_path, weights)


def test_a_narrower_head_must_bring_its_embedding(tmp_path: Path) -> None:
    narrow = HeadShape(hidden=48)
    with pytest.raises(
        CheckpointError, match=r"has no embed_tokens\.weight .* hidden size is 48 and that of target is 64"
    ):
        open_head(tmp_path, random_weights(narrow), **safeailab_config(narrow))
    narrow = HeadShape(hidden=48, own_embedding=True)
    assert open_head(tmp_path, random_weights(narrow), **safeailab_config(narrow)).config.decoder.hidden_size == 48


def test_a_head_for_another_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="made for a vocabulary of 32000 tokens, but that of target has 160"):
        open_head(tmp_path, vocab_size=32000)


def test_padding_of_the_vocabulary_is_no_difference(tmp_path: Path) -> None:
    shape = HeadShape(target_vocab=192, draft_vocab=192, own_embedding=True)
    head = open_head(tmp_path, random_weights(shape), vocab_size=192, draft_vocab_size=192)
    assert head.target_ids.tolist() == list(range(160))  # never proposes what the target cannot say


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    weights = random_weights(SHAPE)
    del weights["fc.weight"]
    with pytest.raises(CheckpointError, match=r"head lacks tensors: fc\.weight"):
        open_head(tmp_path, weights)
    weights = random_weights(SHAPE)
    del weights["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"head lacks lm_head\.weight for its draft vocabulary of 48"):
        open_head(tmp_path, weights)


def test_norms_that_exclude_one_another_are_refused(tmp_path: Path) -> None:
    weights = random_weights(HeadShape(norm_before_fc=True, fc_norm=True))
    with pytest.raises(CheckpointError, match="exclude one another"):
        open_head(tmp_path, weights)


# ── the map ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_d2t_holds_offsets(tmp_path: Path) -> None:
    weights = random_weights(SHAPE)
    head = open_head(tmp_path, weights)
    assert head.target_ids.tolist() == [i + int(offset) for i, offset in enumerate(weights["d2t"])]
    assert head.target_ids.tolist() == weights["t2d"].nonzero().flatten().tolist()


def test_a_missing_map_is_refused(tmp_path: Path) -> None:
    """Taken for the first ids of the vocabulary, it makes acceptance collapse without a message."""
    weights = random_weights(SHAPE)
    del weights["d2t"]
    with pytest.raises(CheckpointError, match="head lacks d2t, the map of its 48 draft ids to the target's 160"):
        open_head(tmp_path, weights)


def test_a_whole_vocabulary_needs_no_map(tmp_path: Path) -> None:
    head = open_head(tmp_path, random_weights(HeadShape(draft_vocab=160)), draft_vocab_size=160)
    assert head.target_ids.tolist() == list(range(160))


def changed_d2t(index: int, value: int) -> Weights:
    weights = random_weights(SHAPE)
    weights["d2t"][index] = value
    return weights


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (changed_d2t(0, -1), r"d2t\[0\] is negative"),
        (changed_d2t(47, 113), r"d2t\[47\] leads beyond the target's 160 token ids"),
        (changed_d2t(9, int(random_weights(SHAPE)["d2t"][8]) - 1), r"d2t\[9\] leads to a token id that is not new"),
        (
            random_weights(SHAPE) | {"d2t": torch.zeros(48, dtype=torch.int64)},
            "all zeros, so the map .* was never saved",
        ),
        (
            random_weights(SHAPE) | {"d2t": torch.zeros(47, dtype=torch.int64)},
            r"d2t has shape \[47\], but must have \[48\]",
        ),
        (random_weights(SHAPE) | {"t2d": torch.ones(160, dtype=torch.bool)}, "t2d marks 160 token ids, but .* has 48"),
        (random_weights(SHAPE) | {"t2d": torch.ones(99, dtype=torch.bool)}, r"t2d has shape \[99\]"),
        (
            random_weights(SHAPE) | {"t2d": torch.zeros(160, dtype=torch.bool)},
            r"d2t\[0\] leads to a token id that t2d says",
        ),
    ],
)
def test_a_wrong_map_is_refused(weights: Weights, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        open_head(tmp_path, weights)


def test_an_absolute_map_is_understood_if_the_mask_agrees(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = random_weights(SHAPE)
    ids = weights["d2t"] + torch.arange(48)
    assert torch.equal(open_head(tmp_path, weights | {"d2t": ids}).target_ids, ids)
    assert "d2t holds target ids rather than offsets" in caplog.text
    del weights["t2d"]
    with pytest.raises(CheckpointError, match="leads beyond"):
        open_head(tmp_path, weights | {"d2t": ids})


# ── by name ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_folder_is_a_drafters_name(tmp_path: Path) -> None:
    folder = save_head(tmp_path / "head", random_weights(SHAPE), safeailab_config(SHAPE))
    plan = plan_drafter(str(folder), TARGET)
    assert plan.num_bytes(1000) - plan.num_bytes(0) == 4 * 1000 * (2 * 2 * 24 + 64)
    assert plan_drafter("ngram", TARGET).num_bytes(1000) == 0
    with pytest.raises(
        BadSetting,
        match="ngram, eagle3, or the folder of an EAGLE head, of Medusa heads or of a small model",
    ):
        plan_drafter("eagle9", TARGET)
    with pytest.raises(ModelNotFound):
        DraftFolder(tmp_path)
    (folder / "config.json").write_text(json.dumps([]))
    with pytest.raises(CheckpointError, match="one JSON object"):
        plan_drafter(str(folder), TARGET)
