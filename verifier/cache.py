"""Where this machine keeps what is made once: converted models and compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """``DRAFTREE_CACHE``, or ``draftree`` in the user's cache folder. It need not exist yet."""
    if own := os.environ.get("DRAFTREE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftree"
