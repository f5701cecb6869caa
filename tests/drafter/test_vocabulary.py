"""Equal ids must mean equal tokens; the map of a smaller vocabulary is tested with the checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from drafter.factory import plan_drafter
from drafter.vocabulary import check_tokenizer
from tests.drafter.eagle_heads import EagleShape, save_tiny_eagle
from tests.drafter.heads import target_config
from verifier.errors import CheckpointError


def save_tokenizer(folder: Path, *, reverse: bool = False, merges: int = 0) -> Path:
    """Bytes, and a few merges of them."""
    alphabet = sorted(ByteLevel.alphabet(), reverse=reverse)
    pairs = [("h", "e"), ("c", "k"), ("o", "w")][:merges]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *map("".join, pairs)])}
    tokenizer = Tokenizer(BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_equal_tokenizers_pass_and_so_does_one_alone(tmp_path: Path) -> None:
    own, theirs = save_tokenizer(tmp_path / "own", merges=2), save_tokenizer(tmp_path / "theirs", merges=2)
    check_tokenizer(own, theirs, "own", "theirs")
    (theirs / "model.gguf").touch()
    check_tokenizer(own, theirs / "model.gguf", "own", "theirs")
    check_tokenizer(own, tmp_path, "own", "theirs")
    check_tokenizer(tmp_path, theirs, "own", "theirs")


@pytest.mark.parametrize("other", [{"reverse": True}, {"merges": 3}])
def test_other_ids_for_the_same_text_are_refused(other: dict[str, int], tmp_path: Path) -> None:
    """Vocabularies of equal size are not yet the same: guesses would be noise, and nobody would be told."""
    own = save_tiny_eagle(tmp_path / "own", EagleShape())
    save_tokenizer(own, **{"merges": 2} | other)  # type: ignore[arg-type]
    theirs = save_tokenizer(tmp_path / "theirs", merges=2)
    with pytest.raises(CheckpointError, match="own has another tokenizer than target: the same text gives other token"):
        plan_drafter(str(own), target_config(), model=theirs)


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    own, theirs = save_tokenizer(tmp_path / "own"), save_tokenizer(tmp_path / "theirs")
    (own / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"own/tokenizer\.json cannot be read"):
        check_tokenizer(own, theirs, "own", "theirs")
