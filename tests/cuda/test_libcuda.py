"""Processes that reach a driver as a user's do: by NVIDIA's own bindings and a libcuda.so.1, which here is simulators/libcuda.c. A
wrong name, number or type of an argument shows as it would on a machine with a GPU; kernels do nothing."""

import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "simulators" / "libcuda.c"
LONG_S = 300
SESSION = """
import threading
import numpy as np
from barellm.cuda import driver
from barellm.cuda.step import CudaSession
from barellm.errors import UserError
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.tensor import Dim

p = Program(Store())
p.output("y", p.apply(ops.Cast, x=p.input("x", (Dim("batch", 3), Dim("seq", 8), 40), "fp32"), dtype="bf16").y)

def work():
    session.write("x", np.ones((2, 8, 40)))
    session.run("p", batch=2, seq=8)
    assert session.read("y").shape == (2, 8, 40)

try:
    session = CudaSession({"p": p})
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        work()
        with driver.profiled():
            session.run_unrolled("p", batch=2, seq=8)
        assert [ms for _, ms in session.timed("p", batch=2, seq=8)] == [0.25]
        print("it ran", flush=True)
    finally:
        session.close()
except UserError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    """The folder of the library, which is compiled with the cuda.h that comes with Triton."""
    compiler, triton = shutil.which("gcc") or shutil.which("clang"), find_spec("triton")
    if sys.platform != "linux" or compiler is None or triton is None or triton.origin is None:
        pytest.skip("it needs Linux, a C compiler and Triton's cuda.h")
    folder = tmp_path_factory.mktemp("libcuda")
    header = Path(triton.origin).parent / "backends" / "nvidia" / "include"
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
    command = [compiler, "-shared", "-fPIC", *warnings, f"-I{header}", "-o", str(folder / "libcuda.so.1"), str(SOURCE)]
    subprocess.run([*command, "-ldl", "-lpthread"], check=True)
    return folder


@pytest.fixture
def start(library, tmp_path):
    """Starts Python with words, on this library; `log` has its calls."""
    started = []

    def begin(*words: str, **environment: str) -> subprocess.Popen[str]:
        own = {"LD_LIBRARY_PATH": str(library), "LIBCUDA_LOG": str(tmp_path / "log"), "CUDA_LAUNCH_BLOCKING": "0"}
        command, pipe = [sys.executable, *words], subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=os.environ | own | environment)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_doctor_finds_a_gpu(start):
    out, err = start("-m", "barellm", "doctor").communicate(timeout=LONG_S)
    assert "C stand-in" in out and "compute capability   9.0" in out and "CUDA 13.0" in out, out + err


def test_doctor_says_what_the_driver_refuses(start):
    process = start("-m", "barellm", "doctor", LIBCUDA_FAIL="cuDeviceGetName:999:1")
    out, err = process.communicate(timeout=LONG_S)
    assert "no: cuDeviceGetName failed: CUDA_ERROR_UNKNOWN" in out and process.returncode == 0, out + err


def test_a_session_runs_from_its_opening_to_its_end(start, tmp_path):
    """In two threads, by a graph, launch by launch and with times; the library says nothing against any argument."""
    process = start("-c", SESSION)
    out, err = process.communicate(timeout=LONG_S)
    assert (out, err, process.returncode) == ("it ran\n", "", 0)
    calls = [name.removesuffix("_v2") for name in (tmp_path / "log").read_text().split()]
    assert calls.count("cuCtxSetCurrent") == 2 and calls.count("cuLaunchKernelEx") == 3  # two graphs, one launch
    assert calls.count("cuGraphLaunch") == 3 and {"cuMemFree", "cuProfilerStop", "cuLibraryUnload"} <= set(calls)


def test_a_lost_context_is_one_line_at_the_end_of_a_process(start):
    process = start("-c", SESSION, LIBCUDA_FAIL="cuGraphLaunch:700:2")
    out, err = process.communicate(timeout=LONG_S)
    assert out.startswith(
        "cuGraphLaunch failed: CUDA_ERROR_ILLEGAL_ADDRESS: a kernel before it went wrong (the latest: program 'p'"
    )
    assert out.count("\n") == 1 and (err, process.returncode) == ("", 0)


def test_ctrl_c_ends_a_process_whose_gpu_hangs(start, tmp_path):
    """At once, where it asks the driver whether the GPU is done; and the end of the process waits for nothing either."""
    process, log, end = start("-c", SESSION, LIBCUDA_HANG="1"), tmp_path / "log", time.monotonic() + LONG_S
    while not (log.exists() and "Query" in log.read_text()) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LONG_S)
    assert process.returncode == -signal.SIGINT and err.rstrip().endswith("KeyboardInterrupt")


CHECK = """
import sys
from barellm import models
from barellm.assembly import build
from barellm.cuda import self_check, tuning

self_check._cases = lambda config, programs, target: (CASES, {})
self_check.Worker.OPENING_S = 0.0
self_check.LIMIT_S = 10.0
problem = tuning.GemmProblem("nt", "fp32", 9, 7, 5)
case = problem, problem.default(90)
CASES = {"right": {}, "Hopper": {"Hopper GEMM": case}, "Triton": {"Triton GEMM": case}}[sys.argv[1]]
print(build.chosen_device("auto", models.preset("shakespeare-char")))
"""


@pytest.mark.extended
@pytest.mark.parametrize(
    "fault, why",
    [
        ({}, "wrong values"),  # its kernels do nothing
        ({"LIBCUDA_HANG": "1"}, "no answer within 10 s: it hangs"),
        ({"LIBCUDA_FAIL": "cuStreamQuery:700:1"}, "CUDA_ERROR_ILLEGAL_ADDRESS: a kernel before it went wrong"),
    ],
)
def test_auto_is_the_gpu_with_tritons_gemm_where_hoppers_fails(start, tmp_path, fault, why):
    """And the CPU where Triton's does; the second process believes the first."""
    own = {"BARELLM_SELF_CHECK": "1", "BARELLM_CACHE": str(tmp_path / "cache")}
    for name, device, words in (
        ("Hopper", "cuda", "Triton's GEMM takes its place"),
        ("Triton", "cpu", "note: the CPU is used, and not the GPU: Triton GEMM"),
    ):  # fmt: skip
        for again in (False, True):
            out, err = start("-c", CHECK, name, **own, **fault).communicate(timeout=LONG_S)
            lines = err.splitlines()
            assert out.split()[0] == device and why in lines[-1] and words in lines[-1], out + err
            assert len(lines) == (1 if again else 2)


@pytest.mark.parametrize(
    "fault, device, said", [({}, "cuda", ""), ({"LIBCUDA_FAIL": "cuInit:100:1"}, "cpu", ""),
                            ({"LIBCUDA_FAIL": "cuInit:999:1"}, "cpu", "does not start: CUDA_ERROR_UNKNOWN")]
)  # fmt: skip
def test_auto_says_only_why_a_gpu_is_not_used(start, fault, device, said):
    out, err = start("-c", CHECK, "right", BARELLM_SELF_CHECK="1", **fault).communicate(timeout=LONG_S)
    assert out.split()[0] == device and said in err and err.count("\n") == bool(said), out + err
