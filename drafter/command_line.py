"""How commands say that they cannot do what they were asked: in one line, and by their exit code. Knows no options."""

from __future__ import annotations

import argparse
from typing import NoReturn

BAD_INPUT, INTERRUPTED = 2, 130  # exit codes


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the list of all options."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: error: {message}\n")
