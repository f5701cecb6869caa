"""Imports only ever point left: verifier <- drafter <- workers <- deployments; and the driver stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = ("verifier", "drafter", "workers", "deployments")


def imported_modules(source: str) -> set[str]:
    """Absolute names of the modules that a source text imports, wherever in the text it does."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            names.add(node.module or "")
    return names


def imports_to_the_right(package: str, source: str) -> set[str]:
    forbidden = ORDER[ORDER.index(package) + 1 :]
    return {name for name in imported_modules(source) if name.split(".")[0] in (*forbidden, "tests")}


@pytest.mark.parametrize("package", ORDER)
def test_imports_point_left(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"{package} has no files"
    wrong = {file.name: found for file in files if (found := imports_to_the_right(package, file.read_text()))}
    assert not wrong


def test_an_import_to_the_right_is_seen() -> None:
    source = "def f() -> None:\n    from workers.engine import Engine\n    import verifier.tree"
    assert imports_to_the_right("drafter", source) == {"workers.engine"}
    assert imports_to_the_right("deployments", source) == set()


@pytest.mark.parametrize("module", ["deployments", "verifier.config", "verifier.errors"])
def test_the_driver_stays_light(module: str) -> None:
    """Settings are checked before anything heavy is loaded, and ``serve run`` imports the app in its own process."""
    code = f"import sys, {module}; print(*sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""
