"""Who may import whom (docs/architecture.md)."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "barellm"
VALUES = {"config", "environment", "errors", "jsontext", "caches", "__version__"}  # plain values: for all
OVERRIDES = "config.overrides"  # configurations as keys and files: the only one of its folder that knows models
STEP = {"runtime", "program"}
BUILT = STEP | {"models", "optim", "assembly", OVERRIDES}
# Folder -> the folders that it may import, itself always.
MAY = {
    "config": set(),
    "chat": set(),  # how texts begin and end, which a tokenizer knows
    "program": set(),
    "models": {"program"},
    "optim": {"program"},
    "data": {"program", "chat"},
    "runtime": {"program"},
    "distributed": STEP,
    "cpu": STEP,
    "cuda": STEP,
    "kernels": STEP | {"cpu"},  # arrays of NumPy lie in the processor's memory
    "assembly": STEP | {"models", "optim"},
    "generation": STEP | {"models", "data"},
    "evaluation": STEP | {"data"},
    "checkpoint": STEP | {"models", OVERRIDES, "data"},
    "training": BUILT | {"data", "generation", "evaluation", "checkpoint"},
    "interop": STEP | {"models", OVERRIDES, "data", "chat", "checkpoint", "training"},  # what a run says of itself: its metrics
    "serving": BUILT | {"api", "data", "generation"},
    "native": BUILT | {"cpu", "data", "checkpoint", "training"},  # a run of the CPU, as a program of its own
    "tools.plan": BUILT | {"cpu", "cuda"},  # what looks at plans, steps and kernels looks inside the backends
    "tools.inspect": BUILT | {"cpu", "cuda", "tools.plan"},
    "tools.profile": BUILT | {"cpu", "cuda", "tools.plan", "training"},  # a step as a run takes it: its schedule
    "tools.bench": BUILT | {"cpu", "cuda", "tools.plan", "tools.profile"},
}
MAY["cli"] = set(MAY) | {OVERRIDES, "runs"}
MOST = 25  # files of a folder


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
        found |= {part_of(name.split(".")[1:]) for name in names if name.startswith("barellm.")}
    return found


def part_of(name: list[str]) -> str:
    """The folder, or the file, that a module belongs to in the table."""
    both = ".".join(name[:2])
    return both if name[0] == "tools" or both == OVERRIDES else name[0]


def folders() -> list[str]:
    found = [p for p in (*PACKAGE.iterdir(), *(PACKAGE / "tools").iterdir()) if p.is_dir() and any(p.rglob("*.py"))]
    return sorted(".".join(p.relative_to(PACKAGE).parts) for p in found if p.name != "tools")


@pytest.mark.parametrize("folder", folders())
def test_arrows_point_one_way(folder):
    assert folder in MAY, f"barellm/{folder} is not in the picture of the house"
    allowed = MAY[folder] | VALUES | {folder}
    for path in sorted((PACKAGE / folder.replace(".", "/")).rglob("*.py")):
        if path == PACKAGE / "config" / "overrides.py":
            continue
        wrong = imports_of(path) - allowed
        assert not wrong, f"{path.relative_to(PACKAGE.parent)} imports {sorted(wrong)}"


def test_keys_and_files_know_models_alone():
    assert imports_of(PACKAGE / "config" / "overrides.py") <= VALUES | {"models"}


@pytest.mark.parametrize("folder", sorted({path.parent for path in PACKAGE.rglob("*.py")}), ids=lambda p: p.name)
def test_a_folder_is_seen_at_a_glance(folder):
    assert len([path for path in folder.iterdir() if path.is_file()]) <= MOST


def test_values_import_values_only():
    for name in (VALUES - {"config", "__version__"}) | {"__init__"}:
        path = PACKAGE / f"{name}.py"
        assert imports_of(path) <= VALUES, path


def files_imported_by(path: Path) -> set[Path]:
    """Files of barellm that a file imports, those for the type checker only included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            at = PACKAGE.parent / name.replace(".", "/")
            found |= {file for file in (at.with_suffix(".py"), at / "__init__.py") if file.is_file()}
    return {file for file in found if PACKAGE in file.parents} - {path}


def circles(graph: dict[Path, set[Path]]) -> list[set[str]]:
    """The sets of files that reach each other."""
    reached: dict[Path, set[Path]] = {}
    for start in graph:
        seen, left = set(), [start]
        while left:
            new = graph.get(left.pop(), set()) - seen
            seen |= new
            left += new
        reached[start] = seen
    found = [frozenset(b for b in reached[a] if a in reached.get(b, ())) for a in graph]
    return [{str(p.relative_to(PACKAGE)) for p in circle} for circle in set(found) if len(circle) > 1]


WAIVED = [
    {"cpu/lang/emit.py", "cpu/lang/values.py"}  # values and their builder: `a + b` emits an instruction
    # To go:
]


def test_no_circle_of_files():
    graph = {path: files_imported_by(path) for path in PACKAGE.rglob("*.py")}
    assert [circle for circle in circles(graph) if circle not in WAIVED] == []


def test_a_circle_is_found():
    a, b, c = (PACKAGE / name for name in ("a.py", "b.py", "c.py"))
    assert circles({a: {b}, b: {c}, c: {a}}) == [{"a.py", "b.py", "c.py"}]
    assert circles({a: {b, c}, b: {c}, c: set()}) == []


def test_any_file_may_be_imported_first():
    """In one process, each file of the folders without kernels after all others are forgotten: a package's __init__ can close a
    circle that no file has."""
    script = """
import importlib, sys
for name in sys.argv[1:]:
    for loaded in [m for m in sys.modules if m.partition(".")[0] == "barellm"]:
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{name}: {error}")
"""
    folders = ("program", "models", "optim", "data", "assembly", "checkpoint")
    paths = [path.relative_to(PACKAGE.parent) for folder in folders for path in sorted((PACKAGE / folder).rglob("*.py"))]
    names = [".".join(path.with_suffix("").parts) for path in paths if path.name != "__init__.py"]
    done = subprocess.run([sys.executable, "-c", script, *names], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr


def test_what_scripts_and_pages_import_is_there():
    """Scripts that no test runs (they take minutes, or a GPU) import from the package: a name that has moved is found here."""
    root, missing = PACKAGE.parent, []
    for path in (path for folder in ("anatomy", "benchmarks", "docs", "examples") for path in (root / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "barellm":
                module = importlib.import_module(node.module or "")
                missing += [
                    f"{path.relative_to(root)}: {node.module} has no {name.name}"
                    for name in node.names
                    if not hasattr(module, name.name)
                    and not (hasattr(module, "__path__") and find_spec(f"{node.module}.{name.name}"))
                ]
    assert not missing, "\n".join(missing)
