"""The first minutes on a GPU: each stage is one rung of a ladder, in a process of its own, from a cast to a timed step. What a rung
stands on is named in stages.py; where that did not go well it is left out, and the other branches go on.

A rung prints each case before it runs: the kernels, their grids and constants, so that the last line of one that hangs says what
hung. What it finds has, for each case, the largest error over its bound: 1.3 reads as a bound that is too small, 1000 as a fault,
whose first wrong tile stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np

from barellm.assembly.build import build_programs
from barellm.config import Config, overrides
from barellm.cuda import driver, gemm_config
from barellm.cuda.bench import Bench
from barellm.cuda.kernel import Launch, Sizes, Specialisation, Target
from barellm.cuda.tuner import harness
from barellm.cuda.tuner.candidates import problems_of, specs_of
from barellm.cuda.tuning import AttentionProblem, GemmProblem, Problem
from barellm.program.integers import ceil_div
from barellm.runtime.tuner.harness import Wrong
from barellm.runtime.tuner.problem import Candidate
from barellm.tools.bench import gemms
from barellm.tools.plan.roofline import NAMED
from barellm.tools.profile import step as one_step
from benchmarks.gpu_check import correct
from benchmarks.gpu_check.bars import bar, holds
from benchmarks.gpu_check.stages import Scale

STEP = (64, 1024)  # batch and length of the ladder's end
TIMED_STEPS = 20
APART = 2.0**-6  # of a gradient's norm: how far the kernels of two libraries in bf16 may be from each other
EPILOGUES = (("nt", "gelu"), ("nt", "residual"), ("nn", "gelu_backward"), ("nn", ""), ("tn", "add"), ("tn", "start"))
CEILING = 8192  # rows, columns and depth of the matmul that says what the card can do


def probe(scale: Scale) -> dict[str, Any]:
    """Whether the GPU still answers: asked after a stage that failed."""
    scale.clock.start()
    try:
        memory = driver.Context(driver.device())
        kept = driver.DeviceMemory(512)
        kept.fill(7, 0, 512, memory.stream)
        read = kept.read(0, 512, memory.stream)
    except driver.DriverError as error:
        if not error.lost:
            raise
        return {"answers": False, "why": str(error)}
    assert (read == 7).all(), f"512 bytes of 7 are read as {sorted(set(read.tolist()))}"
    return {"answers": True}


@dataclass(frozen=True)
class Rung:
    """What a rung proves. `cases`: pieces of work, each with the multiprocessors that it has (0: all). `parts`: 0, or sums over
    tokens are in so many, and small matmuls go to Hopper's kernel too."""

    cases: Callable[[Scale, Target], list[tuple[Problem, int]]]
    parts: int = 0

    @contextmanager
    def _cut(self) -> Iterator[None]:
        with hoppers(self.parts) if self.parts else nullcontext():
            yield

    def kernels(self, scale: Scale, target: Target) -> Iterator[Specialisation]:
        """What its pieces of work launch."""
        with self._cut():
            for work, _ in self.cases(scale, target):
                yield from specs_of(work, [Candidate(work.default(target.arch))], target)

    def prove(self, scale: Scale) -> dict[str, Any]:
        """Each piece of work, held against float64 and for stray bytes."""
        rows: list[dict[str, Any]] = []
        with self._cut():
            for work, sms in self.cases(scale, Target.of(driver.device())):
                rows.append(_proved(work, sms) if scale.left_s > 1.0 else {"work": str(work), "left out": "no time"})
                print(rows[-1], flush=True)
                scale.keep({"cases": rows})
        told = [row["worst"] for row in rows if "worst" in row]
        return {
            "cases": rows,
            "bars": [
                holds("a case ran", any("worst" in row or "wrong" in row for row in rows)),
                bar("wrong cases", sum("wrong" in row for row in rows), 0, at_most=True),
                bar("largest error over its bound", max(told, default=None), 1.0, at_most=True),
            ],
        }


def _proved(work: Problem, sms: int) -> dict[str, Any]:
    """A row: the largest error over its bound, or what is wrong."""
    row: dict[str, Any] = {"work": str(work), "sms": sms}
    with announced(row["work"], sms):
        try:
            done = harness.Harness(work, calls=1, sms=sms)
        except Wrong as wrong:
            return row | {"wrong": str(wrong)}
        done.close()
        return row | {"worst": done.case.worst}


@contextmanager
def announced(name: str, sms: int) -> Iterator[None]:
    """Print what is launched before it is."""
    run = harness.CudaSession.run

    def told(session: Any, program: str, **values: Any) -> None:
        sizes = Sizes.of({k: v for k, v in values.items() if k in ("batch", "seq")})
        for call in session.calls[program]:
            if isinstance(call, Launch):
                constants = " ".join(f"{k}={v}" for k, v in call.spec.constants if v is not None)
                print(f"{name}, {sms or 'all'} multiprocessors: {call.spec.name} {call.grid(sizes)} {constants}", flush=True)
        run(session, program, **values)

    with patch.object(harness.CudaSession, "run", told):
        yield


@contextmanager
def hoppers(parts: int = 1) -> Iterator[None]:
    """Also small matmuls by Hopper's kernel; sums over tokens in so many parts."""
    with patch.object(gemm_config, "WAVE", 1), patch.object(gemm_config, "num_splits", lambda tiles, rows: parts):
        yield


def product(scale: Scale, target: Target, role: str, rows: int, cols: int, depth: int, epilogue: str = "") -> GemmProblem:
    """Hopper's kernel does it, or on another card Triton's. In a rehearsal a quarter of each size: the interpreter takes a second
    for what a GPU does in a microsecond."""
    kernel = "hopper" if target.hopper else "triton"
    if scale.small:
        rows, cols, depth = (ceil_div(n, 32) * 8 for n in (rows, cols, depth))
    return GemmProblem(role, "bf16", rows, cols, depth, kernel, epilogue if kernel == "hopper" else "")


def _plain(scale: Scale, target: Target) -> list[tuple[Problem, int]]:
    return [(GemmProblem("nt", "bf16", 200, 328, 136), 0), (GemmProblem("nn", "fp32", 64, 96, 40), 0)]


def _tile(scale: Scale, target: Target) -> list[tuple[Problem, int]]:
    return [(product(scale, target, role, 128, 256, 64), 0) for role in ("nt", "nn")]


def _ring(scale: Scale, target: Target) -> list[tuple[Problem, int]]:
    """Within a tile; one block and seven that have several tiles each; more tiles than the card has blocks."""
    few = [(product(scale, target, "nt", 896, 1280, 576), sms) for sms in (1, 7)]
    many = [(product(scale, target, "nt", 896, 4864, 576), 0), (product(scale, target, "nn", 2560, 5120, 128), 0)]
    return [(product(scale, target, "nt", 128, 256, 576), 0), *few, *([] if scale.small else many)]


def _epilogues(scale: Scale, target: Target) -> list[tuple[Problem, int]]:
    """With more tiles than blocks."""
    return [(product(scale, target, role, 512, 768, 320, kind), sms) for role, kind in EPILOGUES for sms in (0, 7)]


def _parts(scale: Scale, target: Target) -> list[tuple[Problem, int]]:
    return [(product(scale, target, "tn", 768, 768, 2000), sms) for sms in (0, 7)]


def _heads(scale: Scale, target: Target) -> list[tuple[Problem, int]]:
    lengths = (33,) if scale.small else (128, 1024, 1000)
    roles = ("forward", "keys", "queries")
    found = [(AttentionProblem(role, "bf16", 2, T, 12, 64), 0) for T in lengths for role in roles]
    return found + [(AttentionProblem(role, "bf16", 2, lengths[-1], 6, 128, kv_heads=n), 0) for n in (0, 2) for role in roles]


def _works(scale: Scale, target: Target) -> list[tuple[Problem, int]]:
    """Those that take longest first."""
    found = problems_of(build_programs(whole_step(scale)), target)
    return [(work, 0) for work in (found[:2] if scale.mock else found)]


RUNGS = {
    "plain": Rung(_plain),
    "tile": Rung(_tile, parts=1),
    "ring": Rung(_ring, parts=1),
    "epilogues": Rung(_epilogues, parts=1),
    "parts": Rung(_parts, parts=7),
    "heads": Rung(_heads),
    "works": Rung(_works),
}


def plain(scale: Scale) -> dict[str, Any]:
    """Triton's matmul, whose tiles need no tensor map."""
    return RUNGS["plain"].prove(scale)


def tile(scale: Scale) -> dict[str, Any]:
    """One tile, one turn of the ring."""
    return RUNGS["tile"].prove(scale)


def ring(scale: Scale) -> dict[str, Any]:
    """The ring goes round within a tile; from tile to tile, where blocks have several; one block and seven have them all."""
    return RUNGS["ring"].prove(scale)


def epilogues(scale: Scale) -> dict[str, Any]:
    """All that a matmul takes along, with more tiles than blocks."""
    return RUNGS["epilogues"].prove(scale)


def parts(scale: Scale) -> dict[str, Any]:
    """A weight gradient in seven parts."""
    return RUNGS["parts"].prove(scale)


def heads(scale: Scale) -> dict[str, Any]:
    """Attention forward, for keys and for queries."""
    return RUNGS["heads"].prove(scale)


def works(scale: Scale) -> dict[str, Any]:
    """Every matmul and kernel of attention of the step, untimed; those that take longest first."""
    return RUNGS["works"].prove(scale)


def whole_step(scale: Scale, **changes: Any) -> Config:
    batch, seq = STEP
    return overrides.changed(correct.model(scale, batch=batch, seq=seq), changes)


def whole(scale: Scale) -> dict[str, Any]:
    """A step launch by launch, with our matmuls and with cuBLASLt's: the loss, and how far each gradient is."""
    found = {who: _step(whole_step(scale, **{"train.gemm_backend": who})) for who in ("barellm", "cublaslt")}
    losses = {who: loss for who, (loss, _) in found.items()}
    rows = [{"gradient": name, "apart": correct.distance(a, found["cublaslt"][1][name])} for name, a in found["barellm"][1].items()]
    rows.sort(key=lambda row: row["apart"], reverse=True)
    print(losses, rows[:5], flush=True)
    return {
        "losses": losses,
        "gradients": rows,
        "bars": [
            bar("losses apart", abs(losses["barellm"] - losses["cublaslt"]), correct.LOSS_BOUND, at_most=True),
            bar("gradient furthest from cuBLASLt's", rows[0]["apart"], APART, at_most=True),
        ],
    }


def _step(config: Config) -> tuple[float, dict[str, np.ndarray]]:
    with correct.opened(config, "cuda") as bench:
        session = bench.compiled.session
        loss = bench.step(run=session.run_unrolled).loss
        return loss, {t.name: session.read(t.name) for t in session.tensors.values() if t.role == "gradient"}


def same(scale: Scale) -> dict[str, Any]:
    """The same as a graph: equal bits."""
    return correct.by_graphs(whole_step(scale))


def pace(scale: Scale) -> dict[str, Any]:
    """Timed steps, and what the card can do: a matmul of cuBLASLt's and a copy."""
    if scale.mock:
        gemms.MOST_COPIES, gemms.TABLE_SECONDS = 1, 0.0
    found = one_step.measure(whole_step(scale), steps=2 if scale.mock else TIMED_STEPS, device="cuda")
    print({name: found[name] for name in ("tokens_per_s", "percent_of_peak") if name in found}, flush=True)
    scale.keep({"step": found})
    n = 32 if scale.small else CEILING
    timed = gemms.TimedOnGpu(gemms.Gemm("", "matmul", n, n, n), "bf16", matmul="cublaslt")
    ceiling = 2.0 * n**3 / timed.warm()
    timed.close()
    meter = Bench()
    copy = meter.bandwidth(NAMED["copy"])
    meter.close()
    return {"step": found, "cublaslt_flops": ceiling, "copy_bytes_s": copy, "bars": [holds("it was timed", True)]}
