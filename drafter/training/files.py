"""Files that appear whole or not at all, so that whoever writes them may be killed at any moment. Knows no contents."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from verifier.errors import DraftreeError


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Gives a path to write to; what was written there becomes ``path`` at the end, if the end is reached.

    Raises:
        DraftreeError: it cannot be written, as on a full disk.
    """
    unfinished = path.with_name(f".unfinished-{os.getpid()}-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield unfinished
        unfinished.replace(path)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors each have a word of their own
        raise DraftreeError(f"{path} cannot be written: {error}.") from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
