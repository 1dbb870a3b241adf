"""Processes that reach a driver as a user's do: by NVIDIA's own bindings and a libcuda.so.1, which here is simulators/libcuda.c. A
wrong name, number or type of an argument shows as it would on a machine with a GPU; kernels do nothing (test_emulated.py has the
processes in which they work)."""

import json
import re
import signal
import time

import pytest

from tests.cuda.conftest import LIBCUDA

LONG_S = 300
SESSION = """
from concurrent.futures import ThreadPoolExecutor
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
        with ThreadPoolExecutor() as pool:
            pool.submit(work).result()
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


def test_each_rule_is_held(start):
    """Whatever a function requires is broken once, and refused with a status and the rule."""
    out, err = start("-m", "tests.cuda.broken_rules").communicate(timeout=LONG_S)
    rules, function = set(), ""
    for line in LIBCUDA.read_text().splitlines():
        if found := re.match(r"(?:CUresult|static .*) (cu\w+)\(", line):
            function = found[1]
        if found := re.match(r" +REQUIRE(_OR)?\((.*)\);(?: /\*.*\*/)?$|CUresult .* (REQUIRE)(_OR)?\((.*?)\);", line):
            rule = found[2] or found[5]
            rules.add((function, rule.partition(", ")[2] if found[1] or found[4] else rule))
    held = {tuple(found) for found in re.findall(r"^libcuda: (cu[A-Z]\w*?)(?:_v\d)?: not (.*)$", err, re.MULTILINE)}
    assert len(rules) == 80 and {(function, rule) for function, rule in held if rule != "an allocation"} == rules
    assert {name for name, rule in held if rule == "an allocation"} == {"cuMemFree", "cuMemFreeHost"}
    assert "Traceback" not in err and all(int(line.split()[1]) for line in out.splitlines()), out + err


def test_any_call_may_fail_or_lose_the_context(start):
    """Each function of a session's life, at its first call and at its last: what it says is one line, or it goes on."""
    out, err = start("-m", "tests.cuda.injected", SESSION).communicate(timeout=LONG_S)
    found = json.loads(out.splitlines()[-1])
    said = {fault: text.removeprefix("it ran\n") for fault, text in found.items()}  # all may have run before its end fails
    bad = {fault: text for fault, text in said.items() if text.count("\n") > 1 or "Traceback" in text}
    assert not bad and all(line.startswith("libcuda: ") for line in err.splitlines()), (bad, err)
    assert len(found) > 100
    lost = [text for fault, text in said.items() if ":700:" in fault and "cuGraphLaunch" in fault]
    assert all("CUDA_ERROR_ILLEGAL_ADDRESS: a kernel before it went wrong" in text for text in lost) and len(lost) == 2
    refused = [text for fault, text in said.items() if ":1:" in fault and text]
    assert all("CUDA_ERROR_INVALID_VALUE" in text for text in refused) and len(refused) > 40


TINY = (
    *("shakespeare-char", "--model.layers", "1", "--model.heads", "2", "--model.d_model", "8", "--model.max_seq", "8"),
    *("--seq", "8", "--batch", "2", "--dtype", "bf16", "--device", "cuda"),
)


@pytest.mark.extended
@pytest.mark.parametrize(
    "words, said",
    [
        (["bench", "step", *TINY], "warm steps"),
        (["bench", "ops", *TINY], "ms of ops"),
        (["bench", "gemm", *TINY], "20 GEMMs"),
        (["profile", *TINY, "--out", "profile"], "the ops' roofline"),
    ],
    ids=lambda words: "-".join(words[:2]) if isinstance(words, list) else "",
)
def test_a_command_runs_as_a_process(start, tmp_path, words, said):
    """The library says nothing against any argument of any call."""
    process = start("-m", "barellm", *words, cwd=tmp_path)
    out, err = process.communicate(timeout=LONG_S)
    assert process.returncode == 0 and said in out and "libcuda:" not in err, out + err
    assert "cuLaunchKernelEx" in (tmp_path / "log").read_text()


def test_the_tuner_s_self_test_says_that_kernels_are_wrong(start):
    process = start("-m", "barellm", "tune", "--self-test", "--device", "cuda")
    out, err = process.communicate(timeout=LONG_S)
    assert process.returncode == 1 and not err, out + err
    assert out.startswith("WRONG the default     rejected: wrong values") and "cannot be trusted here" in out


def test_gpu_check_says_what_there_is(start, tmp_path):
    process = start("-m", "benchmarks.gpu_check", "--stages", "versions", "--small", "--out", str(tmp_path / "out"))
    out, err = process.communicate(timeout=LONG_S)
    assert process.returncode == 0 and "1 bars met, 0 missed" in out, out + err
    found = json.loads((tmp_path / "out" / "gpu-check.json").read_text())["stages"]["versions"]
    assert found["device"]["gpu"] == "C stand-in"


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
    process = start("-c", SESSION, LIBCUDA_LOSE="cuGraphLaunch:700:2")
    out, err = process.communicate(timeout=LONG_S)
    assert out.startswith(
        "cuGraphLaunch failed: CUDA_ERROR_ILLEGAL_ADDRESS: a kernel before it went wrong (the latest: program 'p'"
    )
    assert out.count("\n") == 1 and (err, process.returncode) == ("", 0)


def test_ctrl_c_ends_a_process_whose_gpu_hangs(start, tmp_path):
    """At once, where it asks the driver whether the GPU is done; and the end of the process waits for nothing either. Here all is
    the main thread's: Python's own pool would wait for its thread."""
    alone = SESSION.replace("        with ThreadPoolExecutor() as pool:\n            pool.submit(work).result()\n", "")
    assert alone != SESSION
    process, log, end = start("-c", alone, LIBCUDA_HANG="cuMemsetD8Async:1"), tmp_path / "log", time.monotonic() + LONG_S
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
        ({"LIBCUDA_HANG": "cuLaunchKernelEx:1"}, "no answer within 10 s: it hangs"),
        ({"LIBCUDA_HANG": "cuLibraryLoadData:1"}, "no answer within 10 s: it hangs"),  # the call itself never returns
        ({"LIBCUDA_LOSE": "cuStreamQuery:700:1"}, "CUDA_ERROR_ILLEGAL_ADDRESS: a kernel before it went wrong"),
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
