"""Where this machine keeps what is made once: converted models and compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path

from verifier.paths import written_path


def cache_dir() -> Path:
    """``DRAFTREE_CACHE``, or ``draftree`` in the user's cache folder. It need not exist yet.

    Raises:
        BadSetting: ``DRAFTREE_CACHE`` is a path at which nobody can look.
    """
    if own := os.environ.get("DRAFTREE_CACHE"):
        return written_path("DRAFTREE_CACHE", own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftree"
