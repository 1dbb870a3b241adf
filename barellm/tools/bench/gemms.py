"""Every matmul of a model's training step, by itself, as a share of the peak measured in the same run.

A matmul is timed with its operands in the caches, the same ones again and again ("warm"), and with operands that were not
touched for longer than the last-level cache remembers ("cold"). Inside a step weights are cold and activations partly warm."""

import contextlib
import itertools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from barellm.assembly.build import gemm_options
from barellm.assembly.programs import build
from barellm.config import Config, ModelConfig
from barellm.cpu.lang.sync import BARRIER
from barellm.cpu.step import CpuSession
from barellm.cpu.threads import record_table
from barellm.cuda.kernels.loss.classifier import chunk_tokens
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.dtypes import numpy_dtype
from barellm.program.ops.pointwise.elementwise import SLOPES
from barellm.program.tensor import Dim, Tensor
from barellm.tools.bench.description import description, in_checkout
from barellm.tools.plan import devices
from barellm.tools.plan.roofline import Bench, Ceiling, open_bench, primitives

COLD_BYTES = {"cpu": 96 << 20, "cuda": 192 << 20}  # three last-level caches, of 32 MiB, and of 60
MOST_COPIES = 200
CLASSIFIER_TOKENS = 1024  # the classifier does its matmuls in chunks of so many, on the CPU
TABLE_SECONDS = 0.015  # of one timed walk, so that starting it does not count
PASSES = {"matmul_dx": "dgrad", "matmul_dw": "wgrad"}  # of ops whose names begin so


@dataclass(frozen=True)
class Gemm:
    """A matmul with a layer's weight (N, K). `op`: its name after fusion; `mode`: how the result is written; `bias`: is added."""

    layer: str
    op: str
    N: int
    K: int
    tokens: int
    mode: str = "store"
    bias: bool = False


def gemms_of(model: ModelConfig, tokens: int, device: str = "cpu", *, compute: str = "bf16", **options: Any) -> list[Gemm]:
    """The distinct GEMMs of a training program as the device fuses them: fprop, dgrad, wgrad. `options`: of `devices.lower`."""
    _, programs = build(model, batch=1, seq=min(tokens, model.max_seq), compute=compute, optimizer=lambda p: None)
    lowered = devices.lower({"forward_backward": programs["forward_backward"]}, device, **options).lowered["forward_backward"]
    chunk = chunk_tokens(model.padded_vocab, 2) if device == "cuda" else CLASSIFIER_TOKENS
    found: dict[str, dict[Gemm, None]] = {}
    for op in lowered.ops:
        weight = op.outputs.get("dweight") if op.name.startswith("matmul_dw") else op.inputs.get("weight")
        if weight is None or not any(one.product for one in primitives(op)):
            continue
        N, K = (int(n) for n in weight.shape)
        if op.name in ("classifier", "softcapped_classifier"):
            layer, count, kinds = "head", min(tokens, chunk), ["matmul", "matmul_dx", "matmul_dw"]
        else:
            layer, count, kinds = layer_of(weight.name), tokens, [op.name]
        for kind in kinds:
            one = Gemm(layer, kind, N, K, count, bias=op.inputs.get("bias") is not None)
            known = found.setdefault(layer, {})
            known |= dict.fromkeys([one, replace(one, mode="add")] if kind.startswith("matmul_dw") else [one])
    order = ("fprop", "dgrad", "wgrad")
    return [p for layer in found.values() for p in sorted(layer, key=lambda p: order.index(pass_of(p.op)))]


def layer_of(weight: str) -> str:
    """The name of a weight, or of its gradient, without that of its block: "attn.c_attn" of "h.3.attn.c_attn.weight"."""
    return re.sub(r"^(.*\.)?\d+\.", "", weight).removesuffix(".grad").removesuffix(".weight")


def pass_of(op: str) -> str:
    """The name of a matmul after fusion, without what is fused to it."""
    return next((which for name, which in PASSES.items() if op.startswith(name)), "fprop")


def append(p: Program, gemm: Gemm, copy: int) -> None:
    """Append the ops of a GEMM on tensors of their own (no two copies share bytes)."""
    N, K, mode = gemm.N, gemm.K, gemm.mode
    sizes = (Dim("batch", 1), Dim("seq", gemm.tokens))

    def activation(name: str, width: int, dtype: str = p.compute) -> Tensor:
        return p.store.get(f"{name}.{copy}", (*sizes, width), dtype, "state")

    weight = p.parameter(f"weight.{copy}", (N, K))
    after = gemm.op.partition("_")[2]  # residual, or an activation
    if gemm.op.startswith("matmul_dw"):
        if gemm.op == "matmul_dw_dbias":
            into = {"dbias": (p.gradient_of(p.parameter(f"bias.{copy}", (N,))), mode)}
            p.apply(ops.BiasGrad, into=into, dy=activation("dy", N))
        into = {"dweight": (p.gradient_of(weight), mode)}
        p.apply(ops.MatmulDw, into=into, dy=activation("dy", N), x=activation("x", K))
    elif gemm.op == "matmul_dx":
        p.apply(ops.MatmulDx, into={"dx": (activation("dx", K), mode)}, dy=activation("dy", N), weight=weight)
    elif gemm.op.startswith("matmul_dx_"):
        dx = p.apply(ops.MatmulDx, dy=activation("dy", N), weight=weight).dx
        slope = ops.ACTIVATIONS[gemm.op.removeprefix("matmul_dx_")].backward
        p.apply(slope, into={"dx": (activation("dx", K), mode)}, dy=dx, x=activation("pre", K))
    elif after in SLOPES:  # of a matmul whose weight is stored the other way round
        y = p.apply(ops.Matmul, x=activation("x", K), weight=weight).y
        p.apply(SLOPES[after].backward, into={"dx": (activation("y", N), mode)}, dy=y, x=activation("pre", N))
    else:
        steps: list[tuple[Any, dict[str, Any]]] = [(ops.Matmul, {"x": activation("x", K), "weight": weight})]
        if gemm.bias:
            steps.append((ops.Bias, {"bias": p.parameter(f"bias.{copy}", (N,))}))
        last = activation("y", N, "fp32" if after == "residual" else p.compute)
        if after == "residual":
            steps.append((ops.Add, {"a": activation("residual", N, "fp32")}))
        elif after:
            steps.append((ops.ACTIVATIONS[after].forward, {}))
        y: Tensor | None = None
        for i, (kind, given) in enumerate(steps):
            if y is not None:
                given |= {"b" if kind is ops.Add else "x": y}
            target = last if i == len(steps) - 1 else None
            if target is None and i == len(steps) - 2 and after not in ("", "residual"):
                target = activation("pre", N)  # what an activation's slope is of
            y = p.apply(kind, into={"y": (target, mode)} if target is not None else None, **given).y


class Timed:
    """A matmul compiled and mapped in as many copies as overflow the caches; `warm()` and `cold()` give seconds of one."""

    def __init__(self, gemm: Gemm, dtype: str) -> None:
        """Compile the GEMM on enough copies of its tensors to overflow the caches: `cold` goes through all, `warm` stays on one."""
        one = Program(Store(), compute=dtype)
        append(one, gemm, 0)
        self.nbytes = sum(t.nbytes for t in one.store.tensors.values())
        self.copies = copies = copies_of(self.nbytes, "cpu")
        program = Program(Store(), compute=dtype)
        for copy in range(copies):
            append(program, gemm, copy)
        self.session = CpuSession({"products": program})
        self.ops = self.session.lowered["products"].ops
        assert [op.name for op in self.ops] == [gemm.op] * copies
        fill(self.session)
        self.session.run("products", batch=1, seq=gemm.tokens)
        records = self.session.records["products"]
        turns = 1 + int(TABLE_SECONDS / (self._table(records, 1)() * copies))
        self.cold = self._table(records, turns)
        self.warm = self._table(records[:1], turns * copies)

    def _table(self, records: np.ndarray, turns: int) -> Callable[[], float]:
        """A function that executes `records` `turns` times with barriers and returns seconds per record."""
        table = record_table(len(records) * turns)
        table.reshape(turns, *records.shape)[:] = records
        table[:, BARRIER // 8] = 1

        def run() -> float:
            start = time.perf_counter()
            self.session.pool.run(table.ctypes.data, len(table))
            return (time.perf_counter() - start) / len(table)

        return run

    def close(self) -> None:
        self.session.close()


class TimedOnGpu:
    """The same as `Timed`, on a GPU. Two programs: the matmul on each of the copies in turn, and on the first of them as often."""

    def __init__(self, gemm: Gemm, dtype: str, **options: Any) -> None:
        """`options`: GEMM options, as from `assembly.build.gemm_options`. Program "cold": each copy once; "warm": one, as often."""
        store = Store()
        append(Program(store, compute=dtype), gemm, 0)
        self.nbytes = sum(t.nbytes for t in store.tensors.values())
        self.copies = copies_of(self.nbytes, "cuda")
        store = Store()
        programs = {name: Program(store, compute=dtype) for name in ("cold", "warm")}
        for copy in range(self.copies):
            append(programs["cold"], gemm, copy)
            append(programs["warm"], gemm, 0)
        self.session = devices.open_session(programs, "cuda", **options)
        self.ops = self.session.lowered["cold"].ops
        assert [op.name for op in self.ops] == [gemm.op] * self.copies
        fill(self.session)
        self.sizes = {"batch": 1, "seq": gemm.tokens}
        for name in programs:
            self.session.run(name, **self.sizes)
        self.turns = 1 + int(TABLE_SECONDS / (self._seconds("cold", 1) * self.copies))

    def _seconds(self, program: str, turns: int) -> float:
        return devices.replay_seconds(self.session, program, turns, **self.sizes)[0] / self.copies

    def warm(self) -> float:
        return self._seconds("warm", self.turns)

    def cold(self) -> float:
        return self._seconds("cold", self.turns)

    def close(self) -> None:
        self.session.close()


def copies_of(nbytes: int, device: str) -> int:
    """The number of copies for which no cache holds any of them when its turn comes again."""
    return min(max(2, -(-COLD_BYTES[device] // nbytes)), MOST_COPIES)


def fill(session: Any) -> None:
    """Random normal bf16 everywhere, which as pairs are fp32 numbers as normal; it also backs the memory with pages."""
    block = np.random.default_rng(1).standard_normal(1 << 20).astype(numpy_dtype("bf16")).view(np.uint8)
    for start in range(0, session.plan.arena_bytes, block.size):
        session._set(start, block[: session.plan.arena_bytes - start])


def measure(
    config: Config, *, tokens: list[int], rounds: int, report: Callable[[dict[str, Any]], None], device: str = "cpu",
    baseline: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Benchmark each GEMM of the model for each number of tokens; `report` gets each row. Peak, warm and cold runs are interleaved,
    and so is the `baseline` ("torch" or "cublaslt") GEMM, which fuses nothing; numbers are medians of `rounds`. On a CPU each round
    goes through all GEMMs, so a busy moment affects one sample of each at most. `config` has its dtype resolved."""
    bench, rows, dtype = open_bench(device), [], config.train.dtype
    options = gemm_options(config.train, device)
    all_gemms = [p for n in tokens for p in gemms_of(config.model, n, device, compute=dtype, **options)]
    samples: list[list[tuple[float, ...]]] = [[] for _ in all_gemms]
    sweeps = rounds if device == "cpu" else 1
    environment, pytorch = {"set": {}}, contextlib.nullcontext()
    if baseline == "torch":
        baselines, process = in_checkout("baselines"), in_checkout("baseline_process")
        environment = baselines.environments()["tuned"] if device == "cpu" else environment
        cases = [case(gemm, dtype, device) for gemm in all_gemms]
        pytorch = process.opened(baselines.baseline_script("torch_gemm.py"), cases, device=device, environment=environment["set"])
    theirs: dict[str, Any] = {"peer": "cuBLASLt"} if baseline else {}
    try:
        with pytorch as process, contextlib.ExitStack() as opened:
            for sweep, (i, gemm) in itertools.product(range(sweeps), enumerate(all_gemms)):
                timed = TimedOnGpu(gemm, dtype, **options) if device == "cuda" else Timed(gemm, dtype)
                opened.callback(timed.close)
                sides: list[Any] = [timed]
                if process:
                    sides.append(InterleavedBaseline(process, i))
                elif baseline:
                    sides.append(TimedOnGpu(alone(gemm), dtype, **options | {"matmul": "cublaslt"}))
                    opened.callback(sides[-1].close)
                samples[i] += [_sample(sides, dtype, bench) for _ in range(rounds // sweeps)]
                if sweep == sweeps - 1:
                    rows.append(_row(gemm, timed, samples[i], dtype))
                    report(rows[-1])
                opened.close()
            if process:
                theirs = {"peer": f"PyTorch {process.facts['version']}", "peer_threads": process.facts["threads"]}
                theirs |= {"environment": environment} if device == "cpu" else {}
    finally:
        bench.close()
    return {**description("gemm", config, device), **options, **theirs, "rounds": rounds, "products": rows}


def speedups_by_pass(rows: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """(lowest, median, highest) speedup over the baseline by pass, "warm" and "cold"."""
    found: dict[str, dict[str, list[float]]] = {}
    for which in dict.fromkeys(pass_of(row["op"]) for row in rows):
        of_pass = [row for row in rows if pass_of(row["op"]) == which]
        for kind in ("warm", "cold"):
            times = sorted(row[f"times_peer_{kind}"] for row in of_pass)
            found.setdefault(which, {})[kind] = [times[0], median(times), times[-1]]
    return found


def alone(gemm: Gemm) -> Gemm:
    """The same without what is fused to it, its result stored."""
    bare = {which: name for name, which in PASSES.items()}.get(pass_of(gemm.op), "matmul")
    return replace(gemm, op=bare, mode="store", bias=False)


def case(gemm: Gemm, dtype: str, device: str) -> dict[str, Any]:
    """The matmul as the baseline is told of it."""
    N, K, tokens = gemm.N, gemm.K, gemm.tokens
    nbytes = (tokens * N + tokens * K + N * K) * numpy_dtype(dtype).itemsize
    sizes = {"N": N, "K": K, "tokens": tokens, "dtype": dtype, "copies": copies_of(nbytes, device)}
    return {"op": pass_of(gemm.op), **sizes}


class InterleavedBaseline:
    """The baseline's side of one matmul."""

    def __init__(self, baseline: Any, at: int) -> None:
        self.baseline, self.at = baseline, at
        self.calls = 1 + int(TABLE_SECONDS / self._seconds("cold", 3))

    def _seconds(self, what: str, calls: int) -> float:
        return median(self.baseline.run(self.at, what, calls=calls, warm_up=1))

    def warm(self) -> float:
        return self._seconds("warm", self.calls)

    def cold(self) -> float:
        return self._seconds("cold", self.calls)


def _sample(sides: list[Any], dtype: str, bench: Bench) -> tuple[float, ...]:
    """Peaks of fp32 and of the dtype, then of each side the seconds warm and cold."""
    peaks = bench.peak("fp32"), bench.peak(dtype)
    return (*peaks, *(seconds for side in sides for seconds in (side.warm(), side.cold())))


def _row(gemm: Gemm, timed: Timed | TimedOnGpu, samples: list[tuple[float, ...]], dtype: str) -> dict[str, Any]:
    """A result row from the samples of one GEMM: (fp32 peak, peak of the dtype, warm s, cold s, then the baseline's two) each."""
    fp32, peak, warm, cold, *theirs = (median(column) for column in zip(*samples, strict=True))
    op = timed.ops[0]
    bound = Ceiling({"fp32": fp32, dtype: peak}, {}).operations(op)
    row = {
        **gemm.__dict__, "dtype": dtype, "flops": op.flops(), "nbytes": timed.nbytes, "peak_flops": peak, "warm_s": warm,
        "cold_s": cold, "warm_percent": 100 * bound / warm, "cold_percent": 100 * bound / cold,
    }  # fmt: skip
    if theirs:
        row |= {"peer_warm_s": theirs[0], "peer_cold_s": theirs[1]}
        row |= {"times_peer_warm": theirs[0] / warm, "times_peer_cold": theirs[1] / cold}
    return row
