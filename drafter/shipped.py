"""Draft heads that come with this package, by their target's name. Knows folders and nothing of what is in them."""

from __future__ import annotations

from pathlib import Path

from verifier.config import ModelConfig

HEADS = Path(__file__).parent / "heads"


def shipped_head(target: ModelConfig) -> Path | None:
    """The folder of the EAGLE-3 head for this target; None if none comes along."""
    folder = HEADS / target.name
    return folder if (folder / "config.json").is_file() else None
