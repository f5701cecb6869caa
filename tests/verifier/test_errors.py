"""Mistakes cross processes, and read as one sentence."""

from __future__ import annotations

import pickle

import pytest

from verifier.errors import BadRequest, BadSetting, CheckpointError, DraftreeError, ModelNotFound, OutOfPages


@pytest.mark.parametrize(
    "error",
    [
        BadSetting("page_size", 0, "a power of two"),
        BadRequest("temperature", -1.0, "between 0 and 2"),
        ModelNotFound("There is no folder x."),
        CheckpointError("x is cut short."),
        OutOfPages("3 pages are wanted, 1 is free."),
    ],
)
def test_errors_survive_pickling(error: DraftreeError) -> None:
    """An exception whose __init__ takes other arguments than ``args`` cannot be unpickled, and Ray pickles them."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_a_bad_setting_names_the_setting_the_value_and_what_is_allowed() -> None:
    assert str(BadSetting("page_size", 0, "1, 4 or 16")) == "page_size is 0, but must be 1, 4 or 16."
