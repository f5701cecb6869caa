from __future__ import annotations

from pathlib import Path

import pytest

from drafter import shipped
from drafter.base import NoDraft
from drafter.factory import create_drafter, plan_drafter, spelled_out
from drafter.ngram import NgramDraft
from drafter.options import DraftOptions
from drafter.shipped import shipped_head
from tests.drafter.heads import HeadShape, save_tiny_head, target_config
from tests.models import save_tiny_model
from verifier.errors import BadSetting


def test_drafters_have_names() -> None:
    assert isinstance(create_drafter("none"), NoDraft)
    assert isinstance(create_drafter("ngram"), NgramDraft)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadSetting, match="draft_model is 'eagle9', but must be one of: none, ngram"):
        create_drafter("eagle9")


def test_names_are_joined_by_plus_in_any_order(tmp_path: Path) -> None:
    small = save_tiny_model(tmp_path / "small")
    plan = plan_drafter(f"ngram + {small}", target_config())
    assert plan.name == plan_drafter(f"{small}+ngram", target_config()).name
    assert plan.num_bytes(100) == plan_drafter(str(small), target_config()).num_bytes(100)
    assert plan_drafter(f"ngram+{small}", target_config(), DraftOptions(growth="static")).name == plan.name


def test_a_folder_may_have_a_plus_in_its_name(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "small+fast")
    assert plan_drafter(str(folder), target_config()).name == str(folder)


@pytest.mark.parametrize("name", ["ngram+ngram", "ngram+none", "ngram + ngram", "ngram+auto"])
def test_drafters_are_joined_once_and_none_with_nothing(name: str) -> None:
    with pytest.raises(BadSetting, match="must be made of drafters that guess, each of them once"):
        plan_drafter(name, target_config())


def test_an_unknown_part_is_refused_by_its_own_name() -> None:
    with pytest.raises(
        BadSetting, match="draft_model is 'eagle9', but must be one of: auto, none, ngram, eagle3, or the"
    ):
        plan_drafter("ngram+eagle9", target_config())


def test_without_a_head_that_comes_along_auto_is_ngram(tmp_path: Path) -> None:
    assert plan_drafter("auto", target_config()).name == "ngram"
    with pytest.raises(BadSetting, match="draft_model is 'eagle3', but must be something else, since no head for"):
        plan_drafter("eagle3", target_config())


def test_a_head_that_comes_along_is_found_by_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "HEADS", tmp_path)
    target = target_config()
    folder = save_tiny_head(tmp_path / target.name, HeadShape())
    assert shipped_head(target) == folder
    assert plan_drafter("eagle3", target).name == str(folder)
    assert plan_drafter("auto", target).name == plan_drafter("ngram+eagle3", target).name != "ngram"
    assert spelled_out("auto", target) == "eagle3+ngram"


def test_auto_is_spelled_out_for_those_who_ask_who_guesses() -> None:
    """``draftree_drafting`` in /metrics said "auto"."""
    assert spelled_out("auto", target_config()) == "ngram"
    assert spelled_out("ngram+/heads/new", target_config()) == "ngram+/heads/new"
