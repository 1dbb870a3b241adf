"""Proofs: slow tests whose outcome depends on the paths that their mark names, on their file and on what it imports of the tests.

tests/proven.json has, for each file and list of paths, a digest of them all with which its tests passed. Such a test says nothing
new while the digest is the same: kernels are compiled by one version of a compiler, and run on machines written in Python. `make
proofs` runs them all and records what passes.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROVEN = Path(__file__).with_name("proven.json")
COMPILERS = ("llvmlite", "triton")


def recording() -> bool:
    """Whether this run proves all anew."""
    return os.environ.get("BARELLM_PROOFS") == "write"


def left_to_do(items: list[pytest.Item]) -> list[pytest.Item]:
    """All but the proofs on record. Where this run records, each proof carries its name to whoever collects the reports."""
    known = {} if recording() else read()
    kept = []
    for item in items:
        name = name_of(item)
        if name is None or known.get(name) != digest(name):
            kept.append(item)
            if name is not None:
                item.user_properties.append(("proof", name))
    return kept


def name_of(item: pytest.Item) -> str | None:
    """The test's file and the paths that its marks name; None for a test that is no proof."""
    marks = list(item.iter_markers("proof"))
    paths = sorted({path for mark in marks for path in mark.args})
    return " ".join([item.nodeid.split("::")[0], *paths]) if marks else None


def read() -> dict[str, str]:
    return json.loads(PROVEN.read_text()) if PROVEN.exists() else {}


@cache
def digest(name: str) -> str:
    """Everything that decides whether the proofs of one name pass."""
    test, *paths = name.split(" ")
    for path in paths:
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"the proofs of {test} name {path}, which does not exist")
    files = {file for path in paths for file in _below(path)} | _imported(ROOT / test)
    h = hashlib.sha256(f"{sys.platform} {platform.machine()}".encode())
    for package in COMPILERS:
        h.update(f"{package} {_version(package)}".encode())
    for file in sorted(files):
        h.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return h.hexdigest()[:16]


@cache
def _below(path: str) -> tuple[Path, ...]:
    at = ROOT / path
    return (at,) if at.is_file() else tuple(f for f in at.rglob("*") if f.is_file() and "__pycache__" not in f.parts)


def _imported(test: Path) -> set[Path]:
    """A file of the tests with all that it imports of the tests, at any depth."""
    found, todo = set(), [test]
    while todo:
        file = todo.pop()
        if file not in found:
            found.add(file)
            todo += _imports(file)
    return found


@cache
def _imports(file: Path) -> tuple[Path, ...]:
    modules: list[str] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules += [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
    files = (ROOT / f"{module.replace('.', '/')}.py" for module in modules if module.startswith("tests."))
    return tuple(file for file in files if file.is_file())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


class Recorder:
    """Collects what passed and writes it down at the end of a whole run, for tests that run side by side too."""

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for key, name in report.user_properties:
            if key == "proof":
                (self.passed if report.passed else self.failed).add(str(name))  # a skipped proof proves nothing

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        ran = self.passed or self.failed  # `--collect-only` would forget all that is on record
        if ran and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            record = {name: digest(name) for name in self.passed - self.failed}
            PROVEN.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
