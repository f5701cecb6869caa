"""Paths as people write them, and what is said of impossible ones wherever they are given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deployments.keys import KeyRing
from drafter.factory import plan_drafter
from tests.drafter.heads import target_config
from verifier.cache import cache_dir
from verifier.config import read_json
from verifier.errors import BadSetting, CheckpointError
from verifier.hub import resolve_model
from verifier.paths import written_path

IMPOSSIBLE = ("~nobody-at-all/x", "x" * 300, "/tmp/" + "x" * 300)


def test_a_path_need_not_lead_anywhere(tmp_path: Path) -> None:
    assert written_path("model", "~") == Path.home()
    for there in (tmp_path / "no" / "such", Path(__file__)):
        assert written_path("model", str(there)) == there


@pytest.mark.parametrize("text", IMPOSSIBLE)
@pytest.mark.parametrize(
    ("setting", "ask"),
    [
        ("model", resolve_model),
        ("draft_model", lambda text: plan_drafter(text, target_config())),
        ("draft_model", lambda text: plan_drafter(f"ngram+{text}", target_config())),
        ("api_keys", KeyRing.load),
    ],
)
def test_an_impossible_path_is_refused_in_words(setting: str, ask: Callable[[str], object], text: str) -> None:
    """The home of an unknown user, a name too long and a folder that may not be entered ended in a traceback."""
    with pytest.raises(BadSetting, match=f"{setting} is .* a path that can be looked at"):
        ask(text)


def test_an_impossible_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, at the first start after the environment was set."""
    monkeypatch.setenv("DRAFTREE_CACHE", "~nobody-at-all/cache")
    with pytest.raises(BadSetting, match="DRAFTREE_CACHE is"):
        cache_dir()


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """A config.json of another user, say, ended in a traceback."""
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        read_json(tmp_path)
