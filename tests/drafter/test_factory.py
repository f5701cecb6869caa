from __future__ import annotations

import pytest

from drafter.base import NoDraft
from drafter.factory import create_drafter
from drafter.ngram import NgramDraft
from verifier.errors import BadSetting


def test_drafters_have_names() -> None:
    assert isinstance(create_drafter("none"), NoDraft)
    assert isinstance(create_drafter("ngram"), NgramDraft)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadSetting, match="draft_model is 'eagle9', but must be one of: none, ngram"):
        create_drafter("eagle9")
