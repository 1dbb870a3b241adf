"""Cached test results: a file of slow tests does not run again on this machine while nothing has changed that may decide whether
they pass.

Of a file, the tests marked `cached` are recorded together: under a digest of the file's import closure (tests/import_closure.py)
and the paths that the marks name, the node ids that are to run, Python, everything installed, the processor with its instruction
sets, and barellm's environment variables. The record is written when each of these tests has passed in one run; none is written
by a run that chooses among the cases of a file, or in which a source was changed. Records lie in barellm's cache folder, so those
of a fresh clone on a new machine are made there. `--no-cached-results` runs everything, and records it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from barellm.cpu import isa
from barellm.cpu.threads import thread_count
from barellm.runtime import artefacts
from tests import import_closure

LIMIT = 1 << 20  # bytes of records
BEGUN = time.time()
ELSEWHERE = (
    "BARELLM_CACHE",
    "BARELLM_PIN",
)  # decide where files lie and threads run; pinning differs from worker to worker
CHOOSES = ("keyword", "deselect", "lf", "stepwise", "collectonly", "quick")  # options that leave cases out


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--no-cached-results", action="store_true", help="run the tests marked `cached` all the same")


def left_to_run(config: pytest.Config, items: list[pytest.Item], *, use: bool) -> list[pytest.Item]:
    """All but those with a cached result, if there are any to `use`. Where this run may record, each of the others carries the
    digest of its file, and how many tests are to pass for it."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("cached") and not any(map(item.get_closest_marker, ("alone", "oracle"))):
            files.setdefault(item.nodeid.split("::")[0], []).append(item)
    known: set[str] = set()
    for file, tests in files.items():
        marks = [mark for item in tests for mark in item.iter_markers("cached")]
        key = digest(
            file, sorted(item.nodeid for item in tests), sorted({path for mark in marks for path in mark.args})
        )
        if key and use and artefacts.load(folder() / key) is not None:
            known.add(file)
        elif key and may_record(config):
            for item in tests:
                item.user_properties.append(("cached", f"{key} {len(tests)}"))
    cached = {id(item) for file in known for item in files[file]}
    config.stash[COUNT] = len(cached)
    return [item for item in items if id(item) not in cached]


COUNT = pytest.StashKey[int]()


def may_record(config: pytest.Config) -> bool:
    """Whether a run has all cases of the files that it runs."""
    chosen = any(config.getoption(name, None) for name in CHOOSES) or any("::" in word for word in config.args)
    device = config.getoption("device", "interpreter") != "interpreter"
    return not chosen and not device and not os.environ.get("BARELLM_GOLDEN")


def folder() -> Path:
    return artefacts.cache_folder("test-results")


def digest(file: str, node_ids: list[str], paths: list[str]) -> str:
    """Of everything that decides whether these tests of a file pass; "" where that cannot be told."""
    test = import_closure.ROOT / file
    files, unknown = import_closure.closure(test, paths)
    if unknown or edited():
        return ""
    h = hashlib.sha256(environment().encode())
    for part in (file, *node_ids):
        h.update(f"{part}\n".encode())
    for used in sorted(files):
        h.update(f"{used.relative_to(import_closure.ROOT)} {hashlib.sha256(used.read_bytes()).hexdigest()}\n".encode())
    return h.hexdigest()[:32]


@cache
def environment() -> str:
    """The machine and what is installed on it, as far as it may decide whether a test passes."""
    installed = {entry.name for path in sys.path if Path(path).is_dir() for entry in Path(path).glob("*.dist-info")}
    variables = {k: v for k, v in os.environ.items() if k.startswith(("BARELLM_", "TRITON_")) and k not in ELSEWHERE}
    processor = (
        platform.machine(),
        isa._host(""),
        isa.available(),
        sorted(isa.host_features().items()),
        thread_count(),
    )
    return repr(
        (sys.version, sys.platform, platform.release(), processor, sorted(installed), sorted(variables.items()))
    )


def edited() -> bool:
    """Whether a source was written since this run began: tests may have run with other code than the file's."""
    return any(file.stat().st_ctime > BEGUN for file in import_closure.sources() if file.exists())


class Recorder:
    """Collects what passed, of tests that run side by side too, and records a file when all its tests have."""

    def __init__(self) -> None:
        self.folder, self.count = folder(), 0
        self.passed: dict[str, set[str]] = {}
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for key in (str(value) for name, value in report.user_properties if name == "cached"):
            if not report.passed:  # a skipped test shows nothing
                self.failed.add(key)
            elif report.when == "teardown":
                passed = self.passed.setdefault(key, set())
                passed.add(report.nodeid)
                self._record(key, passed)

    def _record(self, key: str, passed: set[str]) -> None:
        name, count = key.split()
        if len(passed) == int(count) and key not in self.failed and not edited():
            artefacts.keep(self.folder / name, f"{sorted(passed)[0].split('::')[0]}: {count} tests".encode())
            artefacts.prune(self.folder, LIMIT)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """Every worker has collected the same."""
        self.count = getattr(node, "workeroutput", {}).get("cached", self.count)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.count = session.config.stash.get(COUNT, self.count)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.count:
            line = f"{self.count} tests were not run: their cached results hold (--no-cached-results runs them)"
            terminalreporter.write_line(line)


def finish_worker(session: pytest.Session) -> None:
    """Tell the process that collects the reports how many tests have cached results."""
    session.config.workeroutput["cached"] = session.config.stash.get(COUNT, 0)  # pyright: ignore[reportAttributeAccessIssue]
