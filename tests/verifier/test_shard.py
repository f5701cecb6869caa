"""What each rank holds of every tensor, and that it reads no more."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from tests.models import save_tiny_model
from tests.verifier.gguf_files import write_gguf
from verifier.shard import BY_INPUTS, BY_OUTPUTS, Shard, find_cut
from verifier.weights import Checkpoint, SafetensorsFolder

LAYER = "model.layers.1"


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four query heads, two KV heads, biases everywhere, a vocabulary that four ranks do not divide."""
    return save_tiny_model(tmp_path_factory.mktemp("m") / "m", "llama-biased", vocab_size=161)


def shards(checkpoint: Checkpoint, size: int) -> list[Shard]:
    return [Shard(checkpoint, rank, size) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 4])
def test_shards_together_are_the_model(size: int, biased: Path) -> None:
    checkpoint = Checkpoint.open(biased)
    for name, shape in checkpoint.config.tensor_shapes().items():
        whole = checkpoint.tensor(name)
        parts = [shard.tensor(name) for shard in shards(checkpoint, size)]
        *_, linear, kind = name.split(".")
        if linear in BY_INPUTS and kind == "bias":  # added to each rank's sum, so that one alone may have it
            assert torch.equal(parts[0], whole)
            assert not any(part.any() for part in parts[1:])
        elif linear in BY_INPUTS:
            assert torch.equal(torch.cat(parts, dim=1), whole)
        elif linear in BY_OUTPUTS:
            copies = size // 2 if linear in ("k_proj", "v_proj") else 1
            assert torch.equal(torch.cat(parts[::copies]), whole)
            assert all(torch.equal(parts[rank], parts[rank // copies * copies]) for rank in range(size))
        elif len(shape) == 2:  # the vocabulary
            rows = torch.cat(parts)
            assert torch.equal(rows[:161], whole)
            assert not rows[161:].any()
            assert len({part.shape for part in parts}) == 1
        else:
            assert all(torch.equal(part, whole) for part in parts)


def test_the_sizes_that_are_left(biased: Path) -> None:
    config = Shard(Checkpoint.open(biased), 3, 4).config
    assert (config.num_heads, config.num_kv_heads, config.intermediate_size) == (1, 1, 24)
    assert (config.hidden_size, config.vocab_size) == (64, 161)


def test_queries_are_on_the_rank_that_has_their_kv_head() -> None:
    """Eight query heads, two KV heads, four ranks: the first four queries read the first KV head."""
    queries = [find_cut(f"{LAYER}.self_attn.q_proj.weight", (8, 1), 2, rank, 4) for rank in range(4)]
    keys = [find_cut(f"{LAYER}.self_attn.k_proj.weight", (2, 1), 2, rank, 4) for rank in range(4)]
    assert [cut and cut[1:3] for cut in queries] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [cut and cut[1:3] for cut in keys] == [(0, 1), (0, 1), (1, 2), (1, 2)]


@pytest.mark.parametrize(("family", "quantization"), [("llama2", "Q8_0"), ("llama2", "F32"), ("qwen2", "F32")])
def test_a_gguf_is_cut_as_its_safetensors_are(family: str, quantization: str, tmp_path: Path) -> None:
    """GGUF's llama architecture stores the rows of q and k in another order, head by head."""
    folder = save_tiny_model(tmp_path / "m", family, num_key_value_heads=2)
    path = write_gguf(folder, tmp_path / "m.gguf", GGMLQuantizationType[quantization])
    ours, theirs = Checkpoint.open(folder), Checkpoint.open(path)
    tolerance = 0.0 if quantization == "F32" else 0.01
    for rank, name in product(range(4), ours.config.tensor_shapes()):
        part = Shard(theirs, rank, 4).tensor(name).float()
        torch.testing.assert_close(part, Shard(ours, rank, 4).tensor(name), atol=tolerance, rtol=0)


def test_a_gguf_head_is_never_cut(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_gguf(save_tiny_model(tmp_path / "m", "llama2"), tmp_path / "m.gguf"))
    with pytest.raises(AssertionError, match="head"):
        checkpoint.part(f"{LAYER}.self_attn.q_proj.weight", 0, 8, 24)


def test_a_rank_reads_its_slices_only(biased: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole tensors would not fit: a rank asks for one only where it holds all of it, that is for norms."""
    whole: list[str] = []
    read: Callable[..., torch.Tensor] = SafetensorsFolder.tensor

    def tensor(self: SafetensorsFolder, name: str) -> torch.Tensor:
        whole.append(name)
        return read(self, name)

    monkeypatch.setattr(SafetensorsFolder, "tensor", tensor)
    checkpoint = Checkpoint.open(biased)
    for name in checkpoint.config.tensor_shapes():
        Shard(checkpoint, 1, 2).tensor(name)
    assert whole
    assert all("norm" in name for name in whole)
