"""When the result of a test file is cached, and what makes it run again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from barellm.cpu import isa
from tests import cached_results, import_closure

ROOT = Path(__file__).parents[1]
TEST = """
import pytest
from anatomy.code import limit
pytestmark = pytest.mark.cached
@pytest.mark.parametrize("n", [1, 2])
def test_small(n): assert n <= limit
"""
CONFTEST = """
import pytest
from tests import cached_results
def pytest_addoption(parser): cached_results.add_options(parser)
def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(cached_results.Recorder())
def pytest_collection_modifyitems(config, items):
    items[:] = cached_results.left_to_run(config, items, use=not config.getoption("--no-cached-results"))
def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        cached_results.finish_worker(session)
"""
PROJECT = {
    "tests/test_small.py": TEST,
    "tests/conftest.py": CONFTEST,
    "tests/__init__.py": "",
    "anatomy/__init__.py": "",
    "anatomy/code.py": "limit = 2",
    "pyproject.toml": '[tool.pytest.ini_options]\ntestpaths = ["tests"]\nmarkers = ["cached", "alone"]\n',
    **{f"tests/{m.__name__.split('.')[-1]}.py": Path(m.__file__ or "").read_text() for m in (cached_results, import_closure)},
}  # fmt: skip
ALL, NONE = "2 passed", "2 tests were not run: their cached results hold"


@pytest.fixture
def project(tmp_path) -> Path:
    """A project of one test with two cases, and a cache of its own."""
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def run(project: Path, *words: str) -> str:
    """What a run of the project's tests says, without the time that it took."""
    environment = {"PYTHONPATH": f"{project}{os.pathsep}{ROOT}", "BARELLM_CACHE": str(project / "cache"), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-o", "cache_dir=cache/pytest", *words],
        cwd=project, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize("side_by_side", [(), ("-n", "2")])
def test_what_passes_is_not_run_again_until_it_changes(project, side_by_side):
    assert ALL in run(project, *side_by_side)
    assert NONE in (said := run(project, *side_by_side)) and "passed" not in said
    assert ALL in run(project, *side_by_side, "--no-cached-results")
    (project / "anatomy/code.py").write_text("limit = 1")
    for _ in range(2):  # a failure is on no record
        assert "1 failed, 1 passed" in run(project, *side_by_side)


@pytest.mark.parametrize("chooses", [
    ("-k", "small and 2"), ("--deselect", "tests/test_small.py::test_small[1]"), ("tests/test_small.py::test_small[2]",),
    ("tests/test_small.py::test_small",), ("--collect-only",),
], ids=lambda words: words[0])  # fmt: skip
def test_a_run_that_chooses_among_the_cases_records_nothing(project, chooses):
    (project / "tests/test_small.py").write_text(TEST.replace("n <= limit", "n > 1 or n <= limit"))
    run(project, *chooses)
    assert not list((project / "cache").glob("test-results/*"))
    assert ALL in run(project)


@pytest.mark.parametrize("stops", ["-x", "--maxfail=1"])
def test_a_run_that_stops_records_nothing_of_the_file_in_which_it_stops(project, stops):
    (project / "tests/test_small.py").write_text(TEST.replace("n <= limit", "n != 2"))
    (project / "tests/test_zero.py").write_text(TEST.replace("n <= limit", "n"))
    assert "1 failed, 1 passed" in run(project, stops)
    assert not list((project / "cache").glob("test-results/*"))


def test_a_run_of_what_failed_last_records_nothing(project):
    (project / "anatomy/code.py").write_text("limit = 1")
    run(project)
    (project / "anatomy/code.py").write_text("limit = 2")
    assert "1 passed" in run(project, "--lf")
    assert not list((project / "cache").glob("test-results/*")) and ALL in run(project)


@pytest.mark.parametrize("what, said", [
    ("assert n == 2 or pytest.skip()", "1 passed, 1 skipped"),
    ("assert __import__('os').utime(__file__) is None", "2 passed"),
])  # fmt: skip
def test_what_was_skipped_or_changed_meanwhile_is_not_recorded(project, what, said):
    (project / "tests/test_small.py").write_text(TEST.replace("assert n <= limit", what))
    assert said in run(project) and said in run(project)


def test_one_of_two_files_runs_again(project):
    (project / "tests/test_other.py").write_text(TEST.replace("from anatomy.code import limit", "limit = 3"))
    assert "4 passed" in run(project)
    (project / "anatomy/code.py").write_text("limit = 3")
    assert ALL in (said := run(project)) and NONE in said


def test_tests_that_are_measured_alone_always_run(project):
    (project / "tests/test_small.py").write_text(f"{TEST}@pytest.mark.alone\ndef test_measured(): pass\n")
    assert "3 passed" in run(project)
    assert "1 passed" in (said := run(project)) and NONE in said


def key(*ids: str) -> str:
    cached_results.environment.cache_clear()
    return cached_results.digest("tests/test_import_closure.py", list(ids or ("one", "two")), [])


@pytest.mark.parametrize("name, changed", [
    ("the version of Python", lambda m: m.setattr(cached_results.sys, "version", "3.99")),
    ("what is installed", lambda m: m.setattr(cached_results.sys, "path", [])),
    ("the instruction sets", lambda m: m.setattr(isa, "available", lambda: ["avx1024"])),
    ("a feature of the processor", lambda m: m.setattr(isa, "host_features", lambda: {"new": True})),
    ("a variable of barellm's", lambda m: m.setenv("BARELLM_POISON", "1")),
])  # fmt: skip
def test_the_machine_is_part_of_the_key(name, changed, monkeypatch):
    monkeypatch.setattr(cached_results, "edited", lambda: False)
    monkeypatch.setattr(import_closure, "closure", lambda test, paths: ({test}, set()))
    before = key()
    assert key() == before
    changed(monkeypatch)
    assert key() != before
    monkeypatch.undo()
    cached_results.environment.cache_clear()


def test_node_ids_and_files_are_part_of_the_key(monkeypatch):
    monkeypatch.setattr(cached_results, "edited", lambda: False)
    monkeypatch.setattr(import_closure, "closure", lambda test, paths: ({test}, set()))
    keys = [key(), key("one"), key("one", "three")]
    monkeypatch.setattr(import_closure, "closure", lambda test, paths: ({test, Path(__file__)}, set()))
    assert len({*keys, key()}) == 4
    monkeypatch.setattr(import_closure, "closure", lambda test, paths: ({test}, {"something is lost"}))
    assert key() == ""
