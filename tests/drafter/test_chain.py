"""A small model as drafter: it says what `transformers` says, and is only taken if it speaks the target's language."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from drafter.base import DraftLimits
from drafter.factory import plan_drafter
from drafter.options import DraftOptions
from tests.drafter.bench import CHAIN, TEXT, TREE, Bench, Target
from tests.drafter.heads import target_config
from tests.models import save_tiny_model
from verifier.errors import CheckpointError


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(tmp_path_factory.mktemp("target") / "target")


@pytest.mark.parametrize("family", ["smollm2", "qwen2-windowed", "qwen3"])
def test_a_chain_is_the_small_models_own_greedy_text(family: str, target: Target, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "small", family, seed=5)
    here = Bench(target, folder, DraftOptions())
    tree = here.drafter.propose(here.request(TEXT[:30], CHAIN)).tree
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = model.generate(torch.tensor([TEXT[:30]]), do_sample=False, max_new_tokens=4, min_new_tokens=4)[0]  # type: ignore[misc]
    assert tree.tokens == tuple(text[29:].tolist())
    assert max(tree.depths) == len(tree) - 1
    bushy = here.drafter.propose(here.request(TEXT[:30], TREE)).tree
    assert max(bushy.depths) < len(bushy) - 1


@pytest.mark.parametrize("vocab_size", [140, 192])
def test_padding_of_the_vocabulary_is_no_difference(vocab_size: int, target: Target, tmp_path: Path) -> None:
    """It reads every id of the target's, and guesses none that the target cannot say."""
    here = Bench(target, save_tiny_model(tmp_path / "small", seed=5, vocab_size=vocab_size), DraftOptions())
    assert here.drafter.network.target_ids.tolist() == list(range(min(vocab_size, 160)))
    wide = DraftLimits(max_draft=1, draft_top_k=200, max_nodes=200)
    assert len(here.drafter.propose(here.request([159, 159], wide)).tree) == 1 + min(vocab_size, 160)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "small", vocab_size=2000)
    with pytest.raises(CheckpointError, match="small was made for a vocabulary of 2000 tokens, but that of target"):
        plan_drafter(str(tmp_path / "small"), target_config())


def test_a_damaged_model_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "small")
    (folder / "config.json").write_text((folder / "config.json").read_text().replace('size": 160', 'size": 161'))
    with pytest.raises(CheckpointError, match=r"small: model\.embed_tokens\.weight has shape"):
        plan_drafter(str(folder), target_config())


def test_its_memory_is_its_weights_and_its_cache(tmp_path: Path) -> None:
    plan = plan_drafter(str(save_tiny_model(tmp_path / "small")), target_config())
    assert plan.num_bytes(10) - plan.num_bytes(0) == 4 * 10 * 2 * 3 * 3 * 8
    assert plan.num_bytes(0) >= (tmp_path / "small" / "model.safetensors").stat().st_size - 4096
