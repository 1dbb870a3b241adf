"""When the result of a test file is cached, and what makes it run again."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from barellm.cpu import isa
from tests import cached_results, import_closure

ROOT = Path(__file__).parents[1]
TEST = """
import pytest
from limits.code import limit
pytestmark = pytest.mark.cached
@pytest.mark.parametrize("n", [1, 2])
def test_small(n): assert n <= limit
"""
PROJECT = {
    "tests/test_small.py": TEST,
    "limits/__init__.py": "",
    "limits/code.py": "limit = 2",
    "pyproject.toml": '[tool.pytest.ini_options]\ntestpaths = ["tests"]\nmarkers = ["cached", "alone"]\n',
}
ALL, NONE = "2 passed", "2 tests were not run: their cached results hold"


class Plugin:
    """What tests/conftest.py does about cached results."""

    def pytest_addoption(self, parser):
        cached_results.add_options(parser)

    def pytest_configure(self, config):
        config.pluginmanager.register(cached_results.Recorder())

    def pytest_collection_modifyitems(self, config, items):
        items[:] = cached_results.left_to_run(config, items, use=not config.getoption("--no-cached-results"))


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A project of one test with two cases, and a cache of its own."""
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(import_closure, "ROOT", tmp_path)
    monkeypatch.setattr(import_closure, "FOLDERS", ("limits", "tests"))
    return tmp_path


@pytest.fixture
def run(project, monkeypatch, capsys):
    """Gives what a run of the project's tests says; each is as a process of its own."""

    def in_a_new_process(*words: str) -> str:
        forget()
        monkeypatch.setattr(cached_results, "BEGUN", time.time())
        pytest.main(["-q", "-s", "--import-mode=importlib", "-o", "cache_dir=cache/pytest", *words], plugins=[Plugin()])
        return capsys.readouterr().out

    yield in_a_new_process
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "limits" or name.endswith("tests.test_small")]:
        del sys.modules[name]
    importlib.invalidate_caches()
    for cached in (value for value in vars(import_closure).values() if hasattr(value, "cache_clear")):
        cached.cache_clear()


@pytest.mark.extended
def test_what_passes_is_not_run_again_until_it_changes(project, run):
    assert ALL in run()
    assert NONE in (said := run()) and "passed" not in said
    assert ALL in run("--no-cached-results")
    (project / "limits/code.py").write_text("limit = 1 ")
    for _ in range(2):  # a failure is on no record
        assert "1 failed, 1 passed" in run()


def test_tests_that_run_side_by_side_are_recorded_together(tmp_path):
    """Two processes of pytest-xdist, and the conftest.py of these tests."""
    names = ("__init__", "conftest", "selection", "cached_results", "import_closure", "leftovers")
    files = {f"tests/{name}.py": (ROOT / f"tests/{name}.py").read_text() for name in names}
    files["tests/test_small.py"] = TEST.replace("from limits.code import limit", "limit = 2")
    files["pyproject.toml"] = PROJECT["pyproject.toml"].replace('"alone"', '"alone", "oracle"')
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "BARELLM_CACHE": str(tmp_path / "cache"), "PATH": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2"]
    said = [
        subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout for _ in range(2)
    ]
    assert ALL in said[0] and NONE in said[1], said


@pytest.mark.parametrize("chooses", [
    ("-k", "small and 2"), ("--deselect", "tests/test_small.py::test_small[1]"), ("tests/test_small.py::test_small[2]",),
    ("tests/test_small.py::test_small",), ("--collect-only",),
], ids=lambda words: words[0])  # fmt: skip
def test_a_run_that_chooses_among_the_cases_records_nothing(project, run, chooses):
    (project / "tests/test_small.py").write_text(TEST.replace("n <= limit", "n > 1 or n <= limit"))
    run(*chooses)
    assert not list((project / "cache").glob("test-results/*"))
    assert ALL in run()


@pytest.mark.parametrize("stops", ["-x", "--maxfail=1"])
def test_a_run_that_stops_records_nothing_of_the_file_in_which_it_stops(project, run, stops):
    (project / "tests/test_small.py").write_text(TEST.replace("n <= limit", "n != 2"))
    (project / "tests/test_zero.py").write_text(TEST.replace("n <= limit", "n"))
    assert "1 failed, 1 passed" in run(stops)
    assert not list((project / "cache").glob("test-results/*"))


def test_a_run_of_what_failed_last_records_nothing(project, run):
    (project / "limits/code.py").write_text(
        "limit = 1 "
    )  # of another size: Python's bytecode goes by that and by seconds
    run()
    (project / "limits/code.py").write_text("limit = 2")
    assert "1 passed" in run("--lf")
    assert not list((project / "cache").glob("test-results/*")) and ALL in run()


@pytest.mark.parametrize("what, said", [
    ("assert n == 2 or pytest.skip()", "1 passed, 1 skipped"),
    ("assert __import__('os').utime(__file__) is None", "2 passed"),
])  # fmt: skip
def test_what_was_skipped_or_changed_meanwhile_is_not_recorded(project, run, what, said):
    (project / "tests/test_small.py").write_text(TEST.replace("assert n <= limit", what))
    assert said in run() and said in run()


def test_one_of_two_files_runs_again(project, run):
    (project / "tests/test_other.py").write_text(TEST.replace("from limits.code import limit", "limit = 3"))
    assert "4 passed" in run()
    (project / "limits/code.py").write_text("limit = 3")
    assert ALL in (said := run()) and NONE in said


def test_tests_that_are_measured_alone_always_run(project, run):
    (project / "tests/test_small.py").write_text(f"{TEST}@pytest.mark.alone\ndef test_measured(): pass\n")
    assert "3 passed" in run()
    assert "1 passed" in (said := run()) and NONE in said


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
