"""The first minutes on a GPU: each stage is one rung of a ladder, in a process of its own, from a cast to a timed step. What a rung
stands on is named in stages.py; where that did not go well it is left out, and the other branches go on.

A rung prints each case before it runs: the kernels, their grids and constants, so that the last line of one that hangs says what
hung. What it finds has, for each case, the largest error over its bound: 1.3 reads as a bound that is too small, 1000 as a fault,
whose first wrong tile stands beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from barellm import overrides
from barellm.assembly.machine import build_programs
from barellm.bench import gemms
from barellm.config import Config
from barellm.cuda import choices, driver
from barellm.cuda.bench import Bench
from barellm.cuda.kernel import Launch, Sizes, Target
from barellm.cuda.tuner import bed
from barellm.cuda.tuner.work import AnyWork, AttentionWork, Work, works_of
from barellm.profiling import step as one_step
from barellm.program.integers import ceil_div
from barellm.runtime.tuner.child import Wrong
from benchmarks.gpu_check import correct
from benchmarks.gpu_check.bars import bar, holds
from benchmarks.gpu_check.stages import Scale

STEP = (64, 1024)  # batch and length of the ladder's end
TIMED_STEPS = 20
APART = 2.0**-6  # of a gradient's norm: how far the kernels of two libraries in bf16 may be from each other
EPILOGUES = (("nt", "gelu"), ("nt", "residual"), ("nn", "gelu_backward"), ("nn", ""), ("tn", "add"), ("tn", "start"))
CEILING = 8192  # rows, columns and depth of the product that says what the card can do


def probe(scale: Scale) -> dict[str, Any]:
    """Whether the GPU still answers: asked after a rung that failed."""
    memory = driver.Context(driver.device())
    kept = driver.DeviceMemory(512)
    kept.fill(7, 0, 512, memory.stream)
    return {"answers": bool((kept.read(0, 512, memory.stream) == 7).all())}


def prove(scale: Scale, cases: Iterable[tuple[AnyWork, int]]) -> dict[str, Any]:
    """Each piece of work, on as many multiprocessors as are named (0: all), held against float64 and for stray bytes."""
    rows: list[dict[str, Any]] = []
    for work, sms in cases:
        if scale.left_s <= 1.0:
            rows.append({"work": str(work), "sms": sms, "left out": "no time"})
            continue
        row: dict[str, Any] = {"work": str(work), "sms": sms}
        with announced(row["work"], sms):
            try:
                done = bed.Bed(work, calls=1, sms=sms)
                row["worst"] = done.case.worst
                done.close()
            except Wrong as wrong:
                row["wrong"] = str(wrong)
        print(row, flush=True)
        rows.append(row)
        scale.keep({"cases": rows})
    told = [row["worst"] for row in rows if "worst" in row]
    return {
        "cases": rows,
        "bars": [
            bar("wrong cases", sum("wrong" in row for row in rows), 0, at_most=True),
            bar("largest error over its bound", max(told, default=None), 1.0, at_most=True),
        ],
    }


@contextmanager
def announced(name: str, sms: int) -> Iterator[None]:
    """Print what is launched before it is."""
    run = bed.CudaSession.run

    def told(session: Any, program: str, **values: Any) -> None:
        sizes = Sizes.of({k: v for k, v in values.items() if k in ("batch", "seq")})
        for call in session.calls[program]:
            if isinstance(call, Launch):
                constants = " ".join(f"{k}={v}" for k, v in call.spec.constants if v is not None)
                print(
                    f"{name}, {sms or 'all'} multiprocessors: {call.spec.name} {call.grid(sizes)} {constants}",
                    flush=True,
                )
        run(session, program, **values)

    with patch.object(bed.CudaSession, "run", told):
        yield


@contextmanager
def hoppers(parts: int = 1) -> Iterator[None]:
    """Also small products by Hopper's kernel; sums over tokens in so many parts."""
    with patch.object(choices, "WAVE", 1), patch.object(choices, "splits", lambda tiles, rows: parts):
        yield


def product(scale: Scale, role: str, rows: int, cols: int, depth: int, epilogue: str = "") -> Work:
    """Hopper's kernel does it, or on another card Triton's. In a rehearsal a quarter of each size: the interpreter takes a second
    for what a GPU does in a microsecond."""
    kernel = "hopper" if Target.of(driver.device()).hopper else "triton"
    if scale.small:
        rows, cols, depth = (ceil_div(n, 32) * 8 for n in (rows, cols, depth))
    return Work(role, "bf16", rows, cols, depth, kernel, epilogue if kernel == "hopper" else "")


def plain(scale: Scale) -> dict[str, Any]:
    """Triton's product, whose tiles need no tensor map."""
    return prove(scale, [(Work("nt", "bf16", 200, 328, 136), 0), (Work("nn", "fp32", 64, 96, 40), 0)])


def tile(scale: Scale) -> dict[str, Any]:
    """One tile, one turn of the ring."""
    with hoppers():
        return prove(scale, [(product(scale, role, 128, 256, 64), 0) for role in ("nt", "nn")])


def ring(scale: Scale) -> dict[str, Any]:
    """The ring goes round within a tile; from tile to tile, where blocks have several; one block and seven have them all."""
    few = [(product(scale, "nt", 896, 1280, 576), sms) for sms in (1, 7)]
    many = [(product(scale, "nt", 896, 4864, 576), 0), (product(scale, "nn", 2560, 5120, 128), 0)]
    with hoppers():
        return prove(scale, [(product(scale, "nt", 128, 256, 576), 0), *few, *([] if scale.small else many)])


def epilogues(scale: Scale) -> dict[str, Any]:
    """All that a product takes along, with more tiles than blocks."""
    with hoppers():
        return prove(
            scale, [(product(scale, role, 512, 768, 320, kind), sms) for role, kind in EPILOGUES for sms in (0, 7)]
        )


def parts(scale: Scale) -> dict[str, Any]:
    """A weight gradient in seven parts."""
    with hoppers(parts=7):
        return prove(scale, [(product(scale, "tn", 768, 768, 2000), sms) for sms in (0, 7)])


def heads(scale: Scale) -> dict[str, Any]:
    """Attention forward, for keys and for queries."""
    lengths = (33,) if scale.small else (128, 1024, 1000)
    roles = ("forward", "keys", "queries")
    return prove(scale, [(AttentionWork(role, "bf16", 2, T, 12, 64), 0) for T in lengths for role in roles])


def whole_step(scale: Scale, **changes: Any) -> Config:
    batch, seq = STEP
    return overrides.changed(correct.model(scale, batch=batch, seq=seq), changes)


def works(scale: Scale) -> dict[str, Any]:
    """Every product and kernel of attention of the step, untimed; those that take longest first."""
    target = Target.of(driver.device())
    found = works_of(build_programs(whole_step(scale)), target)
    return prove(scale, [(work, 0) for work in (found[:2] if scale.mock else found)])


def whole(scale: Scale) -> dict[str, Any]:
    """A step launch by launch, with our products and with cuBLASLt's: the loss, and how far each gradient is."""
    found = {who: _step(whole_step(scale, **{"train.matmul": who})) for who in ("own", "cublaslt")}
    losses = {who: loss for who, (loss, _) in found.items()}
    rows = [
        {"gradient": name, "apart": correct.distance(a, found["cublaslt"][1][name])}
        for name, a in found["own"][1].items()
    ]
    rows.sort(key=lambda row: row["apart"], reverse=True)
    print(losses, rows[:5], flush=True)
    return {
        "losses": losses,
        "gradients": rows,
        "bars": [
            bar("losses apart", abs(losses["own"] - losses["cublaslt"]), correct.LOSS_BOUND, at_most=True),
            bar("gradient furthest from cuBLASLt's", rows[0]["apart"], APART, at_most=True),
        ],
    }


def _step(config: Config) -> tuple[float, dict[str, np.ndarray]]:
    with correct.opened(config, "cuda") as bench:
        session = bench.machine.session
        loss = bench.step(run=session.run_unrolled).loss
        return loss, {t.name: session.read(t.name) for t in session.tensors.values() if t.role == "gradient"}


def same(scale: Scale) -> dict[str, Any]:
    """The same as a graph: equal bits."""
    return correct.by_graphs(whole_step(scale))


def pace(scale: Scale) -> dict[str, Any]:
    """Timed steps, and what the card can do: a product of cuBLASLt's and a copy."""
    if scale.mock:
        gemms.MOST_COPIES, gemms.TABLE_SECONDS = 1, 0.0
    found = one_step.measure(whole_step(scale), steps=2 if scale.mock else TIMED_STEPS, device="cuda")
    print({name: found[name] for name in ("tokens_per_s", "percent_of_peak") if name in found}, flush=True)
    scale.keep({"step": found})
    n = 32 if scale.small else CEILING
    timed = gemms.TimedOnGpu(gemms.Product("", "matmul", n, n, n), "bf16", matmul="cublaslt")
    ceiling = 2.0 * n**3 / timed.warm()
    timed.close()
    meter = Bench()
    copy = meter.bandwidth((1, 1, 0))
    meter.close()
    return {"step": found, "cublaslt_flops": ceiling, "copy_bytes_s": copy, "bars": [holds("it was timed", True)]}
