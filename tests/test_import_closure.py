"""Which files decide whether a test passes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import import_closure

ROOT = Path(__file__).parents[1]
TEST = """
import pytest
from anatomy import top
from tests.helper import limit
def test_small(own): assert limit
"""
PROJECT = {
    "tests/test_small.py": TEST,
    "tests/__init__.py": "",
    "tests/helper.py": "from tests.deeper import limit",
    "tests/deeper.py": "def limit():\n    from barellm.inside import value",
    "tests/conftest.py": """
import pytest
from barellm.fixtures import own_one, other_one
@pytest.fixture
def own(): return made()
def made(): return own_one()
@pytest.fixture
def another():
    other_one()
    import barellm.not_taken
""",
    "tests/unused.py": "",
    "anatomy/__init__.py": "",
    "anatomy/top.py": """'''barellm.docstring, and other.json'''
from importlib import import_module
from . import beside
def by_name(name):
    import_module("barellm.constant"), import_module(f"barellm.ops.{name}"), import_module(f"{__name__}s.{name}")
    patch("barellm.patched.function"), run([exe, "-m", "benchmarks"], ["-v", "examples"]), open("golden.json")
    script = '''
from barellm import in_script
'''
""",
    "anatomy/beside.py": "import barellm.package.part",
    "anatomy/tops/__init__.py": "",
    "anatomy/tops/one.py": "",
    "barellm/__init__.py": "def late():\n    import barellm.only_when_called",
    "barellm/package/__init__.py": """
from importlib import import_module
for name in names(): import_module(f"{__name__}.{name}")
def names(): import barellm.called_at_import
def late(): import barellm.only_when_called
""",
    "barellm/package/part.py": "",
    "barellm/package/scanned.py": "",
    "barellm/package/data.bin": "",
    "barellm/package/c/source.c": "",
    "barellm/fixtures/__init__.py": "from barellm.fixtures.kept import own_one, other_one",
    "barellm/fixtures/kept.py": "",
    **{f"barellm/{name}.py": "" for name in (
        "inside", "constant", "patched", "in_script", "called_at_import", "only_when_called", "docstring", "not_taken",
    )},
    "barellm/ops/__init__.py": "",
    "barellm/ops/add.py": "",
    "benchmarks/__main__.py": "",
    "examples/__main__.py": "",
    "docs/golden.json": "",
    "docs/other.json": "",
    "pyproject.toml": "",
    "README.md": "",
}  # fmt: skip
NOT_USED = {
    "tests/unused.py", "barellm/only_when_called.py", "barellm/docstring.py", "barellm/not_taken.py", "docs/other.json",
    "README.md", "examples/__main__.py",
}  # fmt: skip


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(import_closure, "ROOT", tmp_path)
    cached = [value for value in vars(import_closure).values() if hasattr(value, "cache_clear")]
    for function in cached:
        function.cache_clear()
    yield tmp_path
    for function in cached:
        function.cache_clear()


def found(project: Path, *extra: str) -> tuple[set[str], set[str]]:
    files, unknown = import_closure.closure(project / "tests/test_small.py", extra)
    return {file.relative_to(project).as_posix() for file in files}, unknown


def test_everything_is_followed_that_may_decide(project):
    files, unknown = found(project)
    assert files == PROJECT.keys() - NOT_USED and not unknown


def test_a_package_that_is_named_itself_counts_whole(project):
    (project / "tests/helper.py").write_text("import barellm")
    assert "barellm/only_when_called.py" in found(project)[0]


def test_paths_of_a_mark_count_and_exist(project):
    assert found(project, "docs")[0] >= {"docs/other.json", "docs/golden.json"}
    with pytest.raises(FileNotFoundError, match="a mark names docs/none, which does not exist"):
        found(project, "docs/none")


@pytest.mark.parametrize("text, told", [
    ("from importlib import import_module\ndef one(name): import_module(name)", "imports by a name that cannot be read there"),
    ("from pathlib import Path\nfiles = [*Path('x').glob('*')]", "looks through a folder"),
])  # fmt: skip
def test_what_cannot_be_followed_is_told(project, text, told):
    (project / "tests/deeper.py").write_text(text)
    assert found(project)[1] == {f"tests/deeper.py:2 {told}"}


def test_files_that_import_what_they_are_given_exist():
    assert all((ROOT / file).is_file() for file in import_closure.GIVEN)


def marked() -> list[str]:
    return [
        str(f.relative_to(ROOT)) for f in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.cached" in f.read_text()
    ]


def test_all_of_every_file_with_cached_results_can_be_followed():
    files = [name for name in marked() if name not in ("tests/test_import_closure.py", "tests/test_cached_results.py")]
    assert len(files) > 30
    assert not {name: unknown for name in files if (unknown := import_closure.closure(ROOT / name)[1])}


@pytest.mark.parametrize("test, needs", [
    ("tests/cuda/test_tuner.py", ["barellm/runtime/tuner/decision.py"]),  # which the paths that its mark named did not have
    ("tests/cuda/test_golden.py", ["tests/cuda/golden.json", "barellm/cuda/tuned.json", "barellm/program/ops/norm/softmax.py"]),
    ("tests/cuda/test_loops.py", ["docs/cuda_gemm.md"]),
    ("tests/cpu/test_cross.py", ["barellm/cpu/kernels/gemm/gemm.py", "barellm/models/gpt2.py", "barellm/errors.py"]),
])  # fmt: skip
@pytest.mark.extended
def test_closures_have_what_decides(test, needs):
    files = {file.relative_to(ROOT).as_posix() for file in import_closure.closure(ROOT / test)[0]}
    assert files >= {test, "tests/conftest.py", "tests/selection.py", "tests/import_closure.py", *needs}


def test_no_module_is_missed_that_a_file_imports_when_it_runs():
    """Beside Python's own list of what importing a test file has imported."""
    code = "import sys, tests.cuda.test_tuner as t; print(*(getattr(m, '__file__', None) or '' for m in [*sys.modules.values()]))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    imported = {Path(file) for file in run.stdout.split() if ROOT in Path(file).parents and "site-packages" not in file}
    assert len(imported) > 100 and imported <= import_closure.closure(ROOT / "tests/cuda/test_tuner.py")[0]
