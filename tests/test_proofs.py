"""Which proofs run, and what is recorded of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import proofs

ROOT = Path(__file__).parents[1]
TEST = """
import pytest
from tests.helper import limit
pytestmark = pytest.mark.proof("code")
@pytest.mark.parametrize("n", [1, 2])
def test_small(n): assert n <= limit
"""


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A project with one proof, of the folder code, that reads a helper of the tests."""
    for name, text in {
        "tests/test_small.py": TEST,
        "tests/helper.py": "from tests.deeper import limit",
        "tests/deeper.py": "limit = 2",
        "tests/other.py": "",
        "code/a.py": "",
        "README.md": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(proofs, "ROOT", tmp_path)
    return tmp_path


def digest() -> str:
    for cached in (proofs.digest, proofs._below, proofs._imports):
        cached.cache_clear()
    return proofs.digest("tests/test_small.py code")


def test_a_digest_changes_with_the_paths_the_test_what_it_imports_and_the_compilers(project, monkeypatch):
    seen = {digest()}
    for name in ("code/a.py", "tests/test_small.py", "tests/helper.py", "tests/deeper.py"):
        (project / name).write_text((project / name).read_text() + "\n")
        assert digest() not in seen, name
        seen.add(digest())
    (project / "code/new.py").write_text("")
    assert digest() not in seen
    last = digest()
    for name in ("tests/other.py", "README.md"):
        (project / name).write_text("changed")
        assert digest() == last, name
    monkeypatch.setattr(proofs, "_version", lambda package: "another")
    assert digest() != last


def test_a_path_that_does_not_exist_is_refused(project):
    with pytest.raises(FileNotFoundError, match=r"test_small\.py name codes, which does not"):
        proofs.digest("tests/test_small.py codes")


def run(project: Path, *words: str, write: bool = False) -> tuple[str, dict[str, str]]:
    """The last line of a run of the project's tests, and what is on record after it."""
    (project / "pyproject.toml").write_text('[tool.pytest.ini_options]\ntestpaths = ["tests"]\nmarkers = ["proof"]\n')
    (project / "tests/conftest.py").write_text(
        "import pathlib\nfrom tests import proofs\n"
        "def pytest_configure(config):\n"
        "    if proofs.recording() and not hasattr(config, 'workerinput'):\n"
        "        config.pluginmanager.register(proofs.Recorder())\n"
        "def pytest_collection_modifyitems(items):\n    items[:] = proofs.left_to_do(items)\n"
    )
    (project / "tests/proofs.py").write_text(Path(proofs.__file__).read_text())
    (project / "tests/__init__.py").write_text("")
    environment = {"BARELLM_PROOFS": "write"} if write else {}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words],
        cwd=project, env={"PATH": "", "PYTHONPATH": str(project), **environment}, capture_output=True, text=True,
    )  # fmt: skip
    record = project / "tests/proven.json"
    return done.stdout.splitlines()[-1], json.loads(record.read_text()) if record.exists() else {}


@pytest.mark.parametrize("side_by_side", [(), ("-n", "2")])
def test_what_passes_is_recorded_and_left_out_until_it_changes(project, side_by_side):
    assert run(project)[1] == {}
    last, record = run(project, *side_by_side, write=True)
    assert last.startswith("2 passed") and record.keys() == {"tests/test_small.py code"}
    assert run(project)[0].startswith("no tests ran")
    assert run(project, "--collect-only", write=True)[1] == record  # what has not run was not proved wrong
    (project / "tests/deeper.py").write_text("limit = 1")
    assert run(project)[0].startswith("1 failed, 1 passed")
    assert run(project, *side_by_side, write=True)[1] == {}  # one case of two failed
