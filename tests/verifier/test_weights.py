"""Weights from safetensors and GGUF against `transformers`' own; damaged and foreign files in words."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from safetensors.torch import load_file, save_file

from tests.models import save_tiny_model
from tests.verifier.gguf_files import write_gguf
from verifier.config import ModelConfig
from verifier.errors import CheckpointError, ModelNotFound
from verifier.weights import Checkpoint

State = dict[str, torch.Tensor]
Change = Callable[[State], Any]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama2", num_key_value_heads=2)


def changed(source: Path, folder: Path, change: Change) -> Path:
    """A copy of a model after ``change`` to its tensors."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def assert_same_tensors(checkpoint: Checkpoint, expected: State) -> None:
    assert set(checkpoint.config.tensor_shapes()) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(checkpoint.tensor(name), tensor, rtol=0, atol=0)


def test_one_file(llama: Path) -> None:
    assert_same_tensors(Checkpoint.open(llama), load_file(llama / "model.safetensors"))


def test_shards(llama: Path, tmp_path: Path) -> None:
    sharded = save_tiny_model(tmp_path / "m", "llama2", num_key_value_heads=2, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert_same_tensors(Checkpoint.open(sharded), load_file(llama / "model.safetensors"))
    assert Checkpoint.open(sharded).fingerprint == Checkpoint.open(llama).fingerprint


def test_checking_a_model_loads_no_torch(llama: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from verifier.weights import Checkpoint\n"
        f"Checkpoint.open(Path({str(llama)!r})).fingerprint; print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def drop_many(tensors: State) -> None:
    for name in list(tensors):
        if "layers.1" in name:
            del tensors[name]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), r"lacks tensors: model\.norm\.weight\."),
        (drop_many, r"lacks tensors: model\.layers\.1\..*, .*, .* and 6 more"),
        (lambda t: t.update({"model.extra.weight": torch.ones(2)}), r"unexpected tensors: model\.extra\.weight\."),
        (lambda t: t.update({"model.norm.weight": torch.ones(63)}), r"model\.norm\.weight has shape \[63\].*\[64\]"),
        (lambda t: t.update({"model.norm.weight": torch.ones(64).int()}), r"model\.norm\.weight is I32.*F32, F16"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change: Change, words: str, llama: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(changed(llama, tmp_path / "m", change))


def test_old_checkpoints_carry_tensors_without_use(llama: Path, tmp_path: Path) -> None:
    def change(tensors: State) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    Checkpoint.open(changed(llama, tmp_path / "m", change))


def test_a_tied_head_may_be_stored_too(tmp_path: Path) -> None:
    def change(tensors: State) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    tied = save_tiny_model(tmp_path / "tied", "smollm2")
    Checkpoint.open(changed(tied, tmp_path / "m", change))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m", "llama2", max_shard_size="100KB")
    lost = sorted(folder.glob("*.safetensors"))[-1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=f"{lost.name} is missing"):
        Checkpoint.open(folder)


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m", "llama2", max_shard_size="100KB")
    index = folder / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    first, last = min(data["weight_map"].values()), max(data["weight_map"].values())
    name = next(name for name, file in data["weight_map"].items() if file == first)
    data["weight_map"][name] = last
    index.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=f"{last} lacks {name}"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("left", [0, 100, 5000])
def test_a_download_that_broke_off_is_seen_at_once(left: int, llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(llama, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:left])
    with pytest.raises(CheckpointError, match=r"model\.safetensors .*cut short"):
        Checkpoint.open(folder)


def test_a_git_lfs_pointer_is_no_model(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(llama, folder)
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        Checkpoint.open(folder)


def test_other_weight_formats_are_not_loaded(llama: Path, tmp_path: Path) -> None:
    shutil.copy(llama / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelNotFound, match=r"no model\.safetensors"):
        Checkpoint.open(tmp_path)


def test_fingerprints_tell_models_apart(llama: Path, tmp_path: Path) -> None:
    copied = changed(llama, tmp_path / "copy", lambda tensors: None)
    tuned = changed(llama, tmp_path / "tuned", lambda t: t["model.layers.2.mlp.up_proj.weight"].mul_(1.01))
    config = json.loads((llama / "config.json").read_text()) | {"rms_norm_eps": 1e-6}
    other = changed(llama, tmp_path / "other", lambda tensors: None)
    (other / "config.json").write_text(json.dumps(config))
    fingerprints = [Checkpoint.open(folder).fingerprint for folder in (llama, copied, tuned, other)]
    assert fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints)) == 3


@pytest.mark.parametrize("family", ["llama2", "llama-biased", "smollm2", "qwen2", "qwen3"])
def test_gguf_equals_safetensors(family: str, tmp_path: Path) -> None:
    """llama.cpp's converter permutes the rows of q and k of the llama architecture, and of no other. Loaded as they
    lie, every head turns the wrong pairs and the model talks nonsense.
    """
    folder = save_tiny_model(tmp_path / "m", family)
    checkpoint = Checkpoint.open(write_gguf(folder, tmp_path / "m.gguf"))
    expected = ModelConfig.from_hf(folder)
    assert checkpoint.config.tensor_shapes() == expected.tensor_shapes()
    assert_same_tensors(checkpoint, load_file(folder / "model.safetensors"))


def test_a_gguf_of_bfloat16_stays_bfloat16(llama: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_gguf(llama, tmp_path / "m.gguf", GGMLQuantizationType.BF16))
    expected = load_file(llama / "model.safetensors")
    assert checkpoint.config.dtype == "bfloat16"
    assert_same_tensors(checkpoint, {name: tensor.bfloat16() for name, tensor in expected.items()})


def test_a_quantised_gguf_is_dequantised_to_fp16(llama: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_gguf(llama, tmp_path / "m.gguf", GGMLQuantizationType.Q8_0))
    assert checkpoint.config.dtype == "float16"
    expected = load_file(llama / "model.safetensors")
    for name, tensor in expected.items():
        if tensor.ndim == 2:
            blocks = quantize(tensor.numpy(), GGMLQuantizationType.Q8_0)
            expected[name] = torch.from_numpy(dequantize(blocks, GGMLQuantizationType.Q8_0))
    assert_same_tensors(checkpoint, {name: tensor.half() for name, tensor in expected.items()})


def test_gguf_configuration_equals_the_folders(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m", "smollm2", bos_token_id=1, eos_token_id=2)
    config = Checkpoint.open(write_gguf(folder, tmp_path / "m.gguf")).config
    assert config == ModelConfig.from_hf(folder)


def llama3_factors(factor: float, theta: float = 5e5, head_dim: int = 16) -> np.ndarray:
    """As the converter computes them (Llama 3.1: an original context of 8192, wavelengths 8192 / 4 to 8192 / 1)."""
    factors = []
    for index in range(head_dim // 2):
        wavelength = 2 * np.pi * theta ** (2 * index / head_dim)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_read_from_a_gguf(factor: float, tmp_path: Path) -> None:
    """A GGUF keeps Llama 3's scaling as a tensor only; without it, long contexts go wrong and short ones do not."""
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    folder = save_tiny_model(tmp_path / "m", "llama3", rope_parameters=scaling)
    path = write_gguf(folder, tmp_path / "m.gguf", rope_factors=llama3_factors(factor))
    assert Checkpoint.open(path).config.rope_scaling == ModelConfig.from_hf(folder).rope_scaling


def test_other_rope_factors_are_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m", "llama3", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    path = write_gguf(folder, tmp_path / "m.gguf", rope_factors=np.linspace(1, 8, 8))
    with pytest.raises(CheckpointError, match="rope_freqs are not those of Llama 3"):
        Checkpoint.open(path)


@pytest.mark.parametrize("left", [0, 2, 200, 30000])
def test_a_damaged_gguf_is_refused(left: int, llama: Path, tmp_path: Path) -> None:
    path = write_gguf(llama, tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(CheckpointError, match="not a whole GGUF file"):
        Checkpoint.open(path)


def test_gguf_fingerprints_tell_models_apart(llama: Path, tmp_path: Path) -> None:
    tuned = changed(llama, tmp_path / "tuned", lambda t: t["model.layers.2.mlp.up_proj.weight"].mul_(1.01))
    paths = [write_gguf(folder, tmp_path / f"{index}.gguf") for index, folder in enumerate((llama, llama, tuned))]
    fingerprints = [Checkpoint.open(path).fingerprint for path in paths]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
