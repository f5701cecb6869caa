"""Drafters by name: the one place that knows them all."""

from __future__ import annotations

from collections.abc import Callable

from drafter.base import Drafter, NoDraft
from drafter.ngram import NgramDraft
from verifier.errors import BadSetting

_DRAFTERS: dict[str, Callable[[], Drafter]] = {"none": NoDraft, "ngram": NgramDraft}


def create_drafter(name: str) -> Drafter:
    """
    Raises:
        BadSetting: no drafter has that name.
    """
    if name not in _DRAFTERS:
        raise BadSetting("draft_model", name, "one of: " + ", ".join(_DRAFTERS))
    return _DRAFTERS[name]()
