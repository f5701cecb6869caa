"""Configurations in every published spelling, against `transformers`' own reading of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.models import FAMILIES, SMALL
from verifier.config import ModelConfig, RopeScaling
from verifier.errors import BadSetting, CheckpointError, ModelNotFound

SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **SIZES}
LLAMA_3_1: dict[str, Any] = {  # as published with transformers 4
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def write_model(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def tiny(family: str) -> Any:
    settings = {**SMALL, **FAMILIES[family]}
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    reference = tiny(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(reference)  # type: ignore[no-untyped-call]
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if reference.tie_word_embeddings:
        del expected["lm_head.weight"]
    model.config.save_pretrained(tmp_path)  # names its architecture, as a saved model does
    assert ModelConfig.from_hf(tmp_path).tensor_shapes() == expected


def test_llama_3_1_as_published() -> None:
    config = ModelConfig.from_hf(LLAMA_3_1)
    assert config.head_dim == 128
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.bos_token_id == 128000
    assert config.dtype == "bfloat16"
    assert config.layer_windows == (None,) * 32


def test_transformers_5_spelling_means_the_same() -> None:
    """transformers 5 moved theta into ``rope_parameters``: read from its old place it was silently 10000."""
    new = {key: value for key, value in LLAMA_3_1.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    new["rope_parameters"] = {**LLAMA_3_1["rope_scaling"], "rope_theta": 500000.0}
    new["dtype"] = "bfloat16"
    assert ModelConfig.from_hf(new) == ModelConfig.from_hf(LLAMA_3_1)


def test_transformers_4_spelling_of_an_old_scaling() -> None:
    scaling = ModelConfig.from_hf({**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}}).rope_scaling
    assert scaling == RopeScaling("linear", 4.0, 512)


@pytest.mark.parametrize(
    "parameters",
    [
        {"factor": 4.0, "original_max_position_embeddings": 128},
        {"factor": 40.0, "original_max_position_embeddings": 128, "mscale": 1.0, "mscale_all_dim": 0.8},
        {"factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 0.5},
    ],
)
def test_yarn_attention_factor_is_that_of_transformers(parameters: dict[str, Any]) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, **parameters}
    reference = AutoConfig.for_model("llama", **SIZES, rope_parameters=dict(rope))
    expected = ROPE_INIT_FUNCTIONS["yarn"](reference, torch.device("cpu"))[1]
    scaling = ModelConfig.from_hf({**LLAMA, "rope_parameters": rope}).rope_scaling
    assert scaling is not None
    assert scaling.attention_factor == pytest.approx(expected)
    assert scaling.original_max_positions == 128


def test_defaults_of_absent_keys_are_those_of_transformers() -> None:
    assert ModelConfig.from_hf(LLAMA).rope_theta == 10000.0
    assert ModelConfig.from_hf(LLAMA).eos_token_ids == (2,)
    assert ModelConfig.from_hf(QWEN2).eos_token_ids == ()
    assert ModelConfig.from_hf({**LLAMA, "num_key_value_heads": None}).num_kv_heads == 9
    assert ModelConfig.from_hf({**QWEN2, "model_type": "qwen3", "architectures": None}).head_dim == 128


def test_eos_ids_of_the_generation_config_win(tmp_path: Path) -> None:
    """Qwen2.5-Instruct ends a text with two ids, and config.json knows only one of them."""
    folder = write_model(tmp_path / "m", {**QWEN2, "eos_token_id": 45}, {"eos_token_id": [45, 43]})
    assert ModelConfig.from_hf(folder).eos_token_ids == (45, 43)


def test_a_generation_config_without_eos_changes_nothing(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", {**QWEN2, "eos_token_id": 45}, {"eos_token_id": None})
    assert ModelConfig.from_hf(folder).eos_token_ids == (45,)


def test_mistral_windows_every_layer() -> None:
    config = {**SIZES, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    assert ModelConfig.from_hf({**config, "sliding_window": 8}).layer_windows == (8,) * 4
    assert ModelConfig.from_hf({**config, "sliding_window": None}).layer_windows == (None,) * 4


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "window",
    [
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 28},
    ],
)
def test_qwen_windows_are_those_of_transformers(family: str, window: dict[str, Any]) -> None:
    reference = AutoConfig.for_model(family, **SIZES, **window)
    config = ModelConfig.from_hf({**SIZES, **window, "model_type": family})
    windows = [reference.sliding_window if kind == "sliding_attention" else None for kind in reference.layer_types]
    assert list(config.layer_windows) == windows


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM.*Qwen3ForCausalLM"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "LlamaForCausalLMEagle3"),
        ({"architectures": None, "model_type": "mixtral"}, "model_type is 'mixtral'.*llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'.*silu"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'.*linear, dynamic, llama3, yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 2}, "9 query heads, which 2 KV heads do not divide"),
        ({"head_dim": 7}, "odd head_dim, 7"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn; supported are float32"),
    ],
)
def test_what_is_not_supported_is_refused_in_words(change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        ModelConfig.from_hf({**LLAMA, **change})


def test_layer_types_must_name_every_layer() -> None:
    window = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"]}
    with pytest.raises(CheckpointError, match="names 1 layers, but there are 4"):
        ModelConfig.from_hf({**QWEN2, **window})


def test_a_folder_without_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        ModelConfig.from_hf(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_config_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.from_hf(tmp_path)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "columns", "sizes"),
    [
        (9, 3, 1536, {1, 3}),  # 9 ranks would split the heads, but not 1536 columns
        (32, 8, 14336, {1, 2, 4, 8, 16, 32}),  # above 8, ranks share a KV head
        (12, 2, 96, {1, 2, 4, 6, 12}),  # 3 ranks would hold two thirds of a KV head
        (1, 1, 96, {1}),
    ],
)
def test_tensor_parallel_sizes(heads: int, kv_heads: int, columns: int, sizes: set[int]) -> None:
    config = dataclasses.replace(
        ModelConfig.from_hf(LLAMA), num_heads=heads, num_kv_heads=kv_heads, intermediate_size=columns
    )
    for size in range(40):
        if size in sizes:
            config.check_tensor_parallel(size)
        else:
            with pytest.raises(BadSetting):
                config.check_tensor_parallel(size)


def test_a_wrong_tensor_parallel_size_is_explained() -> None:
    config = dataclasses.replace(ModelConfig.from_hf(LLAMA), name="SmolLM2", intermediate_size=1536)
    with pytest.raises(BadSetting) as refusal:
        config.check_tensor_parallel(2)
    words = "tensor_parallel is 2, but must be 1 or 3, since SmolLM2 has 9 query heads and 3 KV heads."
    assert str(refusal.value) == words
