"""How a measurement is a command: what it asks, OpenMP's settings first, its figures as one line of JSON last, mistakes
in one line.

Knows no figures.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from drafter.command_line import BAD_INPUT, INTERRUPTED
from verifier.errors import DraftreeError
from workers.build import openmp_environment
from workers.flags import at_least
from workers.generate import report
from workers.measuring.prompts import PROMPTS


def as_command(name: str, measure: Callable[[], Mapping[str, Any]]) -> int:
    """Prints what ``measure`` returns, and returns the exit code."""
    os.environ.update(openmp_environment())  # as the service's verifier has it; takes effect before torch is imported
    try:
        print(json.dumps(measure()))
    except DraftreeError as error:
        report(f"{name}: error: {error}")
        return BAD_INPUT
    except OSError as error:  # of a folder that is a file, of a full disk
        report(f"{name}: error: {error}.")
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def add_prompts(parser: argparse.ArgumentParser, *, count: int | None = None, max_tokens: int) -> None:
    """What a model is asked, how much of it, and how long its answers may be.

    Args:
        count: of prompts, unless told otherwise; None is all.
    """
    add, told = parser.add_argument, "all" if count is None else count
    add("--prompts", type=Path, default=PROMPTS, metavar="F", help="JSON lines with turns or prompt (default: our own)")
    add(
        "--count",
        type=at_least(1),
        default=count,
        metavar="N",
        help=f"prompts, of each category its share (default: {told})",
    )
    add("--max-tokens", type=at_least(1), default=max_tokens, metavar="N", help="of an answer (default: %(default)s)")
