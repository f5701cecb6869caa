from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drafter.factory import plan_drafter
from drafter.options import DraftOptions, parse_layer_ids
from tests.drafter.eagle_heads import EagleShape, save_tiny_eagle
from tests.drafter.heads import HeadShape, save_tiny_head, target_config
from verifier.errors import BadSetting


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"growth": "wild"}, "draft_growth is 'wild', but must be one of: dynamic, static"),
        ({"threshold": 1.0}, "draft_threshold is 1.0, but must be a probability below 1"),
        ({"threshold": float("nan")}, "draft_threshold is nan"),
        ({"decay": 0.0}, "draft_decay is 0.0, but must be above 0 and at most 1"),
        (
            {"growth": "static", "threshold": 0.3},
            "draft_threshold is 0.3, but must be left out, since .* ranks nothing",
        ),
        ({"growth": "static", "decay": 0.9}, "draft_decay is 0.9"),
    ],
)
def test_what_cannot_be_meant_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(BadSetting, match=words):
        DraftOptions(**values)


def test_layer_ids_are_numbers_with_commas_between() -> None:
    assert parse_layer_ids("2, 15,27") == (2, 15, 27)
    assert parse_layer_ids("") == ()
    with pytest.raises(BadSetting, match="draft_layer_ids is '2;15'"):
        parse_layer_ids("2;15")


def test_options_without_use_for_a_drafter_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="draft_noise_ranking is False, but must be left out, since ngram is no"):
        plan_drafter("ngram", target_config(), DraftOptions(noise_ranking=False))
    eagle = save_tiny_eagle(tmp_path / "eagle", EagleShape())
    with pytest.raises(BadSetting, match=r"draft_layer_ids is \(2, 3, 4\), .* since eagle is no EAGLE-3 head"):
        plan_drafter(str(eagle), target_config(), DraftOptions(layer_ids=(2, 3, 4)))
    head = save_tiny_head(tmp_path / "head", HeadShape())
    assert plan_drafter(str(head), target_config(), DraftOptions(layer_ids=(2, 3, 4))).name == str(head)
