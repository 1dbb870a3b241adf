"""For all tests."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from barellm import models
from barellm.cli.main import main
from barellm.cpu import step
from barellm.cpu.threads import thread_count
from barellm.runtime.artefacts import cache_folder
from barellm.runtime.memory import memory_limit
from tests import leftovers, selection

WORKER_BYTES = 2 << 30  # of memory, that a process of tests may need

if sys.dont_write_bytecode:  # some hundred processes of the tests would compile each module again: elsewhere than in the tree
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(cache_folder("bytecode"))
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix


def pytest_addoption(parser: pytest.Parser) -> None:
    selection.add_options(parser)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without the mark that is asked for are not read."""
    return True if selection.lacks_mark(collection_path, config.option.markexpr) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selection.select(config, items)


def pytest_configure(config: pytest.Config) -> None:
    """A process started by nohup or in the background of a script ignores signals, and so would every process that a test
    starts. Tests that run side by side leave it to the system on which processor: each would pin its first thread to the first."""
    os.environ["BARELLM_SELF_CHECK"] = "0"  # of a GPU, which would also be the device where none is named
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ |= {"BARELLM_PIN": "0", "OPENBLAS_NUM_THREADS": "1"}
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """A control group may allow fewer processors than pytest-xdist counts, and less memory than they would fill."""
    return max(1, min(thread_count(), memory_limit()[0] // WORKER_BYTES))


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """A thread or a process ends with its test. Set up before, and so looked at behind, all other fixtures of a test."""
    before = leftovers.running()
    yield
    if rendering := sys.modules.get("barellm.chat.templates"):
        rendering._worker.stop()  # it waits for the next template
    left = leftovers.left(before)
    assert not left, f"the test has left running: {'; '.join(left)}"


@pytest.fixture(autouse=True)
def one_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every core has a worker, a session starts no process that helps it to compile."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        monkeypatch.setattr(step, "allowed_cpus", lambda: (0,))


@pytest.fixture
def own_cache(tmp_path_factory, monkeypatch) -> Path:
    """A cache of the test's own, and no vocabulary from the user's environment."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("BARELLM_CACHE", str(folder))
    monkeypatch.delenv("BARELLM_GPT2_VOCAB", raising=False)
    return folder


@pytest.fixture
def no_own_models() -> Iterator[None]:
    """As in a new process: no file of a user's has brought an architecture, before the test and after it."""
    path = [*sys.path]
    yield
    for name in models.ADDED:
        del sys.modules[name]
    models.ADDED.clear()
    sys.path[:] = path


@pytest.fixture
def refused(capsys):
    """Runs a command that must be refused; returns its one line."""

    def run(*words: object) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2
        error = capsys.readouterr().err
        assert error.startswith("barellm: error: ") and error.count("\n") == 1, error
        return error.removeprefix("barellm: error: ").strip()

    return run


@pytest.fixture(scope="session")
def shared() -> Path:
    """Tiny Shakespeare and GPT-2's vocabulary files, which are not part of the project."""
    folder = Path(os.environ.get("BARELLM_SHARED") or Path(__file__).parents[1] / ".." / "shared" / "data").resolve()
    if not all((folder / name).is_file() for name in ("tinyshakespeare.txt", "gpt2_vocab.bpe")):
        pytest.skip(f"no shared data in {folder}: set BARELLM_SHARED")
    return folder
