"""Paths as people write them. Knows what a machine can make of them, and not what should lie there."""

from __future__ import annotations

from pathlib import Path

from verifier.errors import BadSetting


def written_path(setting: str, text: str) -> Path:
    """The path that ``setting`` names, with "~" for a home. Nothing need be there yet.

    Raises:
        BadSetting: nothing could be there, or nobody may look.
    """
    try:
        path = Path(text).expanduser()
        (path / "anything").exists()
    except (OSError, RuntimeError) as error:  # the latter is for homes of nobody
        why = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise BadSetting(setting, text, f"a path that can be looked at ({why})") from None
    return path
