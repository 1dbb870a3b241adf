"""Stages that look at results: kernels on the device, launches, ten steps beside the CPU backend, equal bits, memory errors."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from barellm.assembly.build import open_model
from barellm.config import Config, overrides
from barellm.cuda import driver, nccl
from barellm.cuda.kernel import Launch
from barellm.models import preset
from barellm.runtime.ranks import ALONE
from barellm.tools.profile.step import SEED, StepBench
from benchmarks import baselines
from benchmarks.gpu_check import processes
from benchmarks.gpu_check.bars import bar, holds
from benchmarks.gpu_check.stages import Scale

TINY = {"model.layers": 2, "model.heads": 2, "model.d_model": 32, "model.vocab_size": 65, "model.padded_vocab": 65}
SMALL_TESTS = "test_cast or test_add"  # of the rehearsal: a few of every kind
TEST_S = 60  # that one kernel test may take: a kernel that hangs ends its process, and the next tests have another
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
LONG = 1024  # tokens of a sequence; with four of them every matmul of gpt2-124m is large enough for Hopper's kernel
CASES = {64: 10, LONG: 2}  # steps beside the CPU's, by length
WORSE, FLOOR = 1.5, 2e-3  # times the CPU's own distance from fp32, and beside it: what bf16 on the GPU may be off
LOSS_BOUND = 0.02  # nats between bf16 on the GPU and on the CPU, in any of ten steps


def model(scale: Scale, *, batch: int = 4, seq: int = 64, dtype: str = "bf16") -> Config:
    """gpt2-124m, or in a rehearsal next to nothing."""
    changes = {"train.micro_batch_size": batch, "train.seq": seq, "train.dtype": dtype}
    if scale.small:
        changes |= TINY | {"train.micro_batch_size": 2, "train.seq": 9}
    return overrides.changed(preset("gpt2-124m"), changes)


def versions(scale: Scale) -> dict[str, Any]:
    from barellm.cli.doctor import report
    from barellm.cuda import driver
    from barellm.cuda.compile import ptxas_variable
    from barellm.cuda.lang import TRITON

    found = report()
    packages = {name: _version(name) for name in ("torch", "triton", "cuda-bindings", "numpy", "pytest")}
    gpu = driver.device()
    tools = {name: shutil.which(name) for name in ("compute-sanitizer", "nvidia-smi", "ncu")}
    if tools["nvidia-smi"]:
        print(processes.run([tools["nvidia-smi"]], limit_s=10, together=True).out)
    facts = {"gpu": gpu.name, "arch": gpu.arch, "multiprocessors": gpu.sms, "memory": gpu.nbytes, "driver": gpu.driver}
    pins = [holds(f"triton is {TRITON}", packages["triton"] == TRITON)]
    ptxas = os.environ.get(ptxas_variable(gpu.arch), "")  # another ptxas gives other registers
    found = {"packages": packages, "device": facts, "tools": tools, "ptxas": ptxas, "doctor": found, "bars": pins}
    return found | {"machine": baselines.machine("cuda")}


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def kernels(scale: Scale) -> dict[str, Any]:
    """The tests of tests/cuda that check an op, on the device; in as many processes as there are cores. What a kernel that hangs
    or reads what is not its own does to a process is that process's matter: another takes its place."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "tests/cuda", "--device", "mock" if scale.mock else "cuda"]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}"]
        command += ["-k", SMALL_TESTS] if scale.small else []
        if find_spec("xdist"):
            command += ["-n", str(max(1, min(12, len(os.sched_getaffinity(0)))))]
        if find_spec("pytest_timeout"):
            command += ["--timeout", str(TEST_S), "--timeout-method", "thread"]
        done = processes.run(command, limit_s=scale.left_s - processes.INTERRUPTED_S, together=True, interrupt=True)
        print(done.out)
        if not report.exists():
            raise RuntimeError(f"pytest wrote no report: {done.why}")
        suite = ET.parse(report).getroot().find("testsuite")
        assert suite is not None
        counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors")}
        left_out = int(suite.attrib["skipped"])
        broken = [c.attrib["name"] for c in suite.iter("testcase") if c.find("failure") is not None or c.find("error") is not None]
    assert counts["tests"] > left_out, "no test ran"
    return counts | {
        "left_out": left_out,
        "broken": broken,
        "bars": [
            bar("kernel tests that fail", counts["failures"] + counts["errors"], 0, at_most=True),
            holds("all of them ran in time", done.status is not None),
        ],
    }


def layout(scale: Scale) -> dict[str, Any]:
    """What the driver says of each loaded kernel's parameters, beside what was read from the PTX: the bytes of each. Where they lie
    is the driver's own, which takes each by its address."""
    from barellm.cuda import driver

    wrong, count = [], 0
    for dtype in ("bf16", "fp32"):
        with open_model(model(scale, dtype=dtype), device="cuda") as compiled:
            for spec, kernel in compiled.session.kernels.items():
                count += 1
                told = _parameters(driver, kernel)
                read = [nbytes for nbytes, _ in kernel.code.params]
                if told != read:
                    wrong.append({"kernel": spec.key, "driver": told, "ptx": read})
    return {"kernels": count, "wrong": wrong, "bars": [bar("kernels with other parameters", len(wrong), 0, at_most=True)]}


def _parameters(driver: Any, kernel: Any) -> list[int]:
    """Bytes of each, by cuKernelGetParamInfo, which fails behind the last."""
    found: list[int] = []
    while True:
        try:
            _, nbytes = driver.call("cuKernelGetParamInfo", kernel.kernel, len(found))
        except driver.DriverError:
            return found
        found.append(int(nbytes))


def graph(scale: Scale) -> dict[str, Any]:
    """By graphs and launch by launch, at a length at which Hopper's kernel does every matmul."""
    return by_graphs(model(scale, seq=LONG))


def by_graphs(config: Config) -> dict[str, Any]:
    """Two steps by graphs, two launch by launch, and a replay: equal bits."""
    digests, losses, bars = {}, {}, []
    for kind in ("run", "run_unrolled"):
        with opened(config, "cuda") as bench:
            bars = played(bench.compiled.session, config)
            session = bench.compiled.session
            losses[kind] = [bench.step(run=getattr(session, kind)).loss for _ in range(2)]
            digests[kind] = session.digest()
            before = session.read("loss").tobytes()
            session.replay("forward_backward", batch=bench.train.micro_batch_size, seq=bench.train.seq)
            session.synchronize()
            replayed = session.read("loss").tobytes()
    same = digests["run"] == digests["run_unrolled"] and losses["run"] == losses["run_unrolled"]
    return {
        "digests": digests,
        "losses": losses,
        "bars": [
            holds("a graph's bits are those of single launches", same),
            holds("a replay after the update gives another loss", before != replayed),
            *bars,
        ],
    }


def roles(calls: Iterable[Any]) -> set[str]:
    """What Hopper's kernel does in a step: "nt", "nn" and "tn" matmuls."""
    constants = [dict(c.spec.constants) for c in calls if isinstance(c, Launch) and c.spec.name == "hopper_gemm"]
    return {"tn" if c["A_TRANSPOSED"] else "nt" if c["B_TRANSPOSED"] else "nn" for c in constants}


def played(session: Any, config: Config) -> list[dict[str, Any]]:
    """On Hopper, at LONG tokens, the bar that its kernel does every kind of matmul, and that Triton's does none."""
    calls = session.calls["forward_backward"]
    if not session.target.hopper or config.train.seq < LONG:
        return []
    plain = [c for c in calls if isinstance(c, Launch) and c.spec.name == "gemm"]
    return [holds("hopper_gemm plays every role", roles(calls) == {"nt", "nn", "tn"} and not plain)]


@contextmanager
def opened(config: Config, device: str):
    with open_model(config, device=device) as compiled:
        compiled.initialize(SEED)
        yield StepBench(compiled)


def equal(scale: Scale) -> dict[str, Any]:
    """Gradients of the first step and losses of some, in bf16 on the GPU and on the CPU, held against fp32 on the CPU; of short
    sequences, and of those at which every matmul on Hopper is its own kernel's."""
    cases: dict[str, Any] = {}
    found: dict[str, Any] = {"cases": cases, "bars": []}
    for seq, steps in [(LONG, CASES[LONG])] if scale.small else CASES.items():  # rehearsed, all lengths are the tiny model's
        config, runs = model(scale, seq=seq), {}
        for side, device, dtype in (("gpu", "cuda", "bf16"), ("cpu", "cpu", "bf16"), ("fp32", "cpu", "fp32")):
            runs[side] = _run(overrides.changed(config, {"train.dtype": dtype}), device, steps)
            print(seq, side, runs[side]["losses"])
        rows = []
        for name, truth in runs["fp32"]["gradients"].items():
            off = {side: distance(runs[side]["gradients"][name], truth) for side in ("gpu", "cpu")}
            limit = WORSE * off["cpu"] + FLOOR
            rows.append({"gradient": name, **off, "limit": limit, "held": off["gpu"] <= limit})
        losses = {side: r["losses"] for side, r in runs.items()}
        apart = max(abs(a - b) for a, b in zip(losses["gpu"], losses["cpu"], strict=True))
        cases[f"{config.train.micro_batch_size} x {config.train.seq}"] = {"gradients": rows, "losses": losses}
        missed, at = sum(not r["held"] for r in rows), f"4 x {seq}"
        found["bars"] += [
            bar(f"{at}: gradients further from fp32 than 1.5x the CPU's bf16", missed, 0, at_most=True),
            bar(f"{at}: losses of {steps} steps, GPU and CPU apart", apart, LOSS_BOUND, at_most=True),
            *runs["gpu"]["bars"],
        ]
        scale.keep(found)
    return found


def _run(config: Config, device: str, steps: int) -> dict[str, Any]:
    """The same initial weights and tokens everywhere: both come from seeds, by counter-based bits."""
    with opened(config, device) as bench:
        losses = [bench.step().loss]
        session = bench.compiled.session
        gradients = {t.name: session.read(t.name) for t in session.tensors.values() if t.role == "gradient"}
        losses += [bench.step().loss for _ in range(steps - 1)]
        bars = played(session, config) if device == "cuda" else []
    return {"losses": losses, "gradients": gradients, "bars": bars}


def distance(a: np.ndarray, truth: np.ndarray) -> float:
    difference = float(np.linalg.norm(a.astype(np.float64) - truth))
    return difference / max(float(np.linalg.norm(truth.astype(np.float64))), 1e-30)


def determinism(scale: Scale) -> dict[str, Any]:
    """The same steps in two processes, and once with another order of the inputs' buffers."""
    found = [_digest(scale) for _ in range(2)]
    return {"runs": found, "bars": [holds("two processes, equal weights and losses", found[0] == found[1])]}


def _digest(scale: Scale) -> dict[str, Any]:
    if scale.mock:  # which lives in this process
        with opened(model(scale), "cuda") as bench:
            losses = [bench.step().loss for _ in range(2)]
            return {"losses": losses, "digest": bench.compiled.session.digest()}
    config = overrides.flat(model(scale, seq=LONG))
    changes = [f"--{key}={value}" for key, value in config.items() if value != overrides.flat(preset("gpt2-124m"))[key]]
    command = [sys.executable, "-m", "barellm", "bench", "step", "gpt2-124m", "--device", "cuda", "--digest", "--json"]
    done = processes.run([*command, "--steps", "5", *changes], limit_s=scale.left_s)
    if done.status != 0:
        raise RuntimeError(done.why)
    result = json.loads(done.out.splitlines()[-1])
    return {name: result[name] for name in ("losses", "digest")}


def loop(scale: Scale) -> dict[str, Any]:
    """A communicator of one rank, whose bytes travel from the GPU to itself: a transfer, and one in a graph that is replayed while
    the stream beside it goes on. Two GPUs would show more: barellm train --ranks 2 --device cuda."""
    if not scale.mock and find_spec("nccl") is None:
        return {"skipped": "nccl4py is not installed"}
    nbytes = 1 << (12 if scale.small else 28)
    context = driver.Context(driver.device())
    memory = driver.DeviceMemory(3 * nbytes)
    made = nccl.Communicator(ALONE, context.device)
    rows = []

    def travel() -> None:
        made.exchange([(0, memory.address, nbytes)], [(0, memory.address + nbytes, nbytes)], context.stream)
        memory.fill(7, 2 * nbytes, nbytes, context.stream)
        made.join(context.stream)

    def arrived(value: int, start: Callable[[], None]) -> dict[str, Any]:
        memory.fill(value, 0, nbytes, context.stream)
        memory.fill(0, nbytes, 2 * nbytes, context.stream)
        start()
        found = memory.read(nbytes, 3 * nbytes, context.stream)
        return holds("bytes arrive, and the rest goes on", bool((found[:nbytes] == value).all() and (found[nbytes:] == 7).all()))

    rows.append(arrived(3, travel))
    graph = driver.Graph(context.stream, travel)
    rows += [arrived(value, lambda: graph.launch(context.stream)) for value in (4, 5)]
    version = None if scale.mock else int(nccl.call("get_version"))
    context.synchronize()
    begin = time.perf_counter()
    for _ in range(10):
        graph.launch(context.stream)
    context.synchronize()
    seconds = (time.perf_counter() - begin) / 10
    graph.free()
    made.close()
    memory.free()
    return {"version": version, "gb_per_s": nbytes / seconds / 1e9, "bars": rows}


def sanitizer(scale: Scale) -> dict[str, Any]:
    """compute-sanitizer's tools on two steps of a tiny model in both dtypes, which run without it first, so that nothing is
    compiled under it. initcheck is told by name what it finds: an arena is set to zeros by the driver, so a read of bytes that no
    kernel wrote is no error to it; memory of the tests is NaN instead."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return {"skipped": "compute-sanitizer is not on the PATH"}
    steps = [sys.executable, "-m", "benchmarks.gpu_check.small_step"]
    alone = processes.run(steps, limit_s=scale.left_s)
    if alone.status != 0:
        raise RuntimeError(f"the step without compute-sanitizer: {alone.why}")
    rows, bars = [], []
    for i, tool in enumerate(TOOLS):
        limit = scale.left_s / (len(TOOLS) - i)
        done = processes.run([program, "--tool", tool, "--error-exitcode", "9", *steps], limit_s=limit)
        counts = [int(a or b) for a, b in ERRORS.findall(done.out)]
        ran = "two steps done" in done.out
        row = {"tool": tool, "status": done.status, "errors": counts, "ran": ran, "log": done.out[-4000:]}
        if not (ran and counts):
            row["why"] = done.why
        print(tool, {name: row[name] for name in row if name != "log"})
        rows.append(row)
        bars.append(bar(f"{tool}: errors", sum(counts) if ran and counts else None, 0, at_most=True))
        scale.keep({"tools": rows, "bars": bars})
    return {"tools": rows, "bars": bars}
