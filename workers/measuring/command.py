"""How a measurement is a command: OpenMP's settings first, its figures as one line of JSON last, mistakes in one line.

Knows no figures.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from drafter.command_line import BAD_INPUT, INTERRUPTED
from verifier.errors import DraftreeError
from workers.build import openmp_environment
from workers.generate import report


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
