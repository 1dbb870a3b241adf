"""`--device`: where the checks of single ops run. "interpreter" (the default), "ptx" for a machine that runs compiled code
(of the least target, or "ptx-sm_90"), "cuda" for this machine's GPU, or "mock", the driver in Python, through which a session of
the GPU's kind is rehearsed. On all but the first only checks of ops run: the rest needs no GPU.
A kernel that spoils the GPU for its process ends a pytest-xdist worker, and the next one goes on with the next test."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from barellm.cuda import driver, step
from tests.cuda import check

LIBCUDA = Path(__file__).parents[1] / "simulators" / "libcuda.c"

DEVICES = ("interpreter", "ptx", "ptx-sm_90", "mock", "cuda")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default=DEVICES[0], choices=DEVICES, help="where the checks of CUDA ops run")


def pytest_configure(config: pytest.Config) -> None:
    check.DEVICE = config.getoption("--device")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if DEVICES[0] == check.DEVICE:
        return
    chosen = [item for item in items if isinstance(item, pytest.Function) and _checks_an_op(item)]
    here = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in here])
    items[:] = chosen


def _checks_an_op(item: pytest.Function) -> bool:
    """But not those of the interpreter itself, whose kernels leave their operands on purpose."""
    return "check_op" in item.function.__code__.co_names and item.module.__name__.rpartition(".")[2] != "test_interpreter"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if call.excinfo is not None and lost(call.excinfo.value) and os.environ.get("PYTEST_XDIST_WORKER"):
        print(f"{item.nodeid}\n{report.longreprtext}", file=sys.__stderr__, flush=True)
        os._exit(1)  # the report of a worker that ends says the rest
    return report


def lost(error: BaseException | None) -> bool:
    """Whether the GPU is lost to this process, by the error or one that led to it."""
    while error is not None:
        if isinstance(error, driver.DriverError) and error.lost:
            return True
        error = error.__cause__ or error.__context__
    return False


@pytest.fixture(autouse=True)
def mock_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("PYTEST_XDIST_WORKER"):  # every core has a worker
        monkeypatch.setattr(step, "processes", lambda: 1)
    if check.DEVICE == "mock":
        from tests.simulators.mock import Gpu

        Gpu().install(monkeypatch)


@pytest.fixture(scope="session")
def library(tmp_path_factory) -> Path:
    """The folder of the driver library in C, which is compiled with the cuda.h that comes with Triton."""
    compiler, triton = shutil.which("gcc") or shutil.which("clang"), find_spec("triton")
    if sys.platform != "linux" or compiler is None or triton is None or triton.origin is None:
        pytest.skip("it needs Linux, a C compiler and Triton's cuda.h")
    folder = tmp_path_factory.mktemp("libcuda")
    header = Path(triton.origin).parent / "backends" / "nvidia" / "include"
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
    command = [compiler, "-shared", "-fPIC", *warnings, f"-I{header}", "-o", str(folder / "libcuda.so.1"), str(LIBCUDA)]
    subprocess.run([*command, "-ldl", "-lpthread"], check=True)
    return folder


@pytest.fixture
def start(library, tmp_path):
    """Starts Python with words, on this library; `log` has its calls."""
    started = []

    def begin(*words: str, cwd: Path | None = None, **environment: str) -> subprocess.Popen[str]:
        own = {"LD_LIBRARY_PATH": str(library), "LIBCUDA_LOG": str(tmp_path / "log"), "CUDA_LAUNCH_BLOCKING": "0"}
        own["PYTHONPATH"] = str(LIBCUDA.parents[2])
        command, pipe = [sys.executable, *words], subprocess.PIPE
        process = subprocess.Popen(command, cwd=cwd, stdout=pipe, stderr=pipe, text=True, env=os.environ | own | environment)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()
