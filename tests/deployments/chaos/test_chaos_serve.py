"""The chaos run itself, as short as it can be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


def test_a_verifier_and_the_controller_are_lost_and_no_promise_is_broken() -> None:
    kinds = ("kill verifier", "kill controller")
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "deployments.chaos",
            "--seconds",
            "1",
            "--least",
            "1",
            "--clients",
            "2",
            "--kinds",
            *kinds,
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    verdict = json.loads(run.stdout.splitlines()[-1])
    assert verdict["kept"]
    assert (verdict["failed"], verdict["changed"], verdict["faults"]) == (0, 0, 2)
    assert verdict["requests"] > 0
    assert all(times[0] > 0 for times in verdict["whole_again_s"].values())
