"""Who may import whom (docs/architecture.md)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "barellm"
VALUES = {"config", "errors", "overrides", "caches", "__version__"}  # plain values at the top of the package: for all
MIDDLE = {"training", "generation", "evaluation", "interop", "profiling"}
LOWER = {"data", "models", "optim", "program"}
# Folder -> the folders that it may import, itself always.
MAY = {
    "program": set(),
    "models": {"program"},
    "optim": {"program"},
    "data": {"program"},
    "runtime": {"program"},
    "cpu": {"runtime", "program"},
    "cuda": {"runtime", "program"},
    "training": MIDDLE | LOWER | {"runtime"},
    "generation": MIDDLE | LOWER | {"runtime"},
    "evaluation": MIDDLE | LOWER | {"runtime"},
    "interop": MIDDLE | LOWER | {"runtime"},
    "profiling": MIDDLE | LOWER | {"runtime", "cpu", "cuda"},  # it looks inside the backends
    "distributed": {"runtime", "program"},
    "cli": MIDDLE | LOWER | {"runtime", "cpu", "cuda", "distributed"},
}


def imports_of(path: Path) -> set[str]:
    """Folders and modules of barellm that a file imports, at its top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("barellm.")}
    return found


def folders() -> list[str]:
    return sorted(p.name for p in PACKAGE.iterdir() if p.is_dir() and any(p.rglob("*.py")))


@pytest.mark.parametrize("folder", folders())
def test_arrows_point_one_way(folder):
    assert folder in MAY, f"barellm/{folder} is not in the picture of the house"
    allowed = MAY[folder] | VALUES | {folder}
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        wrong = imports_of(path) - allowed
        assert not wrong, f"{path.relative_to(PACKAGE.parent)} imports {sorted(wrong)}"


def test_values_import_values_only():
    for name in (VALUES - {"__version__"}) | {"__init__"}:
        path = PACKAGE / f"{name}.py"
        assert imports_of(path) <= VALUES, path
