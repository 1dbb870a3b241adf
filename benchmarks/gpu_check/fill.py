"""Compiles what the stages launch, on a machine without a GPU: cubins have no paths in them, so the folder can be taken along."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from barellm.assembly.build import build_programs, gemm_options
from barellm.config import Config
from barellm.cuda import bench, driver
from barellm.cuda import step as cuda_step
from barellm.cuda.compile import cache_folder, compiled
from barellm.cuda.kernel import Specialisation, Target
from barellm.cuda.step import LoweredPrograms, lower_and_plan, processes
from barellm.cuda.tuner.candidates import candidates, refined, rivals, specs_of
from barellm.program.builder import Program, Store
from barellm.runtime.tuner.problem import Candidate
from barellm.tools.bench import attentions, gemms
from barellm.tools.plan.roofline import NAMED, mix_of
from benchmarks.gpu_check import apart, craft, first, small_step, speed
from benchmarks.gpu_check.bars import bar
from benchmarks.gpu_check.correct import CASES, LONG, model
from benchmarks.gpu_check.stages import Scale

Kernels = Iterable[Specialisation]
FULL = Scale(small=False, mock=False)


def lowered(config: Config, target: Target, matmul: str = "barellm") -> tuple[dict[str, Program], LoweredPrograms]:
    programs = build_programs(config)
    return programs, lower_and_plan(programs, replace(target, **gemm_options(config.train, "cuda") | {"matmul": matmul}))


def step(config: Config, target: Target, *matmuls: str) -> Iterator[Specialisation]:
    """Of a training step, by our matmuls or by whom else `matmuls` names."""
    for matmul in matmuls or ("barellm",):
        yield from lowered(config, target, matmul)[1].specs


def rates(config: Config, target: Target) -> Iterator[Specialisation]:
    """What measures the machine for the bounds of a step."""
    programs, made = lowered(config, target)
    ops = [op for p in programs.values() for op in p.ops] + [op for low in made.lowered.values() for op in low.ops]
    yield from map(bench.bandwidth_kernel, {*NAMED.values(), *map(mix_of, ops)})
    yield from peaks()


def peaks() -> Kernels:
    return map(bench.peak_kernel, ("fp32", "bf16"))


def rung(name: str, scale: Scale, target: Target) -> Iterator[Specialisation]:
    yield bench.MemoryComparison.kernel()
    yield from first.RUNGS[name].kernels(scale, target)


def pace(scale: Scale, target: Target) -> Iterator[Specialisation]:
    yield from step(first.whole_step(scale), target)
    yield from rates(first.whole_step(scale), target)


def equal(scale: Scale, target: Target) -> Iterator[Specialisation]:
    for seq in CASES:
        yield from step(model(scale, seq=seq), target)


def layout(scale: Scale, target: Target) -> Iterator[Specialisation]:
    for dtype in ("bf16", "fp32"):
        yield from step(model(scale, dtype=dtype), target)


def steps(scale: Scale, target: Target) -> Iterator[Specialisation]:
    """Of the stage `step`, which is rehearsed with a short one."""
    for config in [model(scale)] if scale.mock else [model(scale, batch=n, seq=speed.SEQ) for n in speed.BATCHES]:
        yield from step(config, target)
        yield from rates(config, target)


def gemm(scale: Scale, target: Target) -> Iterator[Specialisation]:
    config = speed.gemm_model(scale)
    yield from peaks()
    options = gemm_options(config.train, "cuda")
    for one in gemms.gemms_of(config.model, config.train.seq, "cuda", compute=config.train.dtype, **options):
        for product, matmul in ((one, "barellm"), (gemms.alone(one), "cublaslt")):
            p = Program(Store(), compute=config.train.dtype)
            gemms.append(p, product, 0)
            yield from lower_and_plan({"p": p}, replace(target, matmul=matmul)).specs


def sides(scale: Scale, target: Target) -> Iterator[Specialisation]:
    yield bench.MemoryComparison.kernel()
    for work, tiles in speed.sides_of(scale, target):
        yield from specs_of(work, map(Candidate, (work.default(target.arch), *tiles)), target)


def attention(scale: Scale, target: Target) -> Iterator[Specialisation]:
    yield from peaks()
    for case in attentions.cases(speed.attention_dtype(scale), speed.attention_lengths(scale), "cuda"):
        yield from lower_and_plan(attentions.programs(case), target).specs


def streaming(scale: Scale, target: Target) -> Iterator[Specialisation]:
    config = speed.streaming_model(scale)
    yield from step(config, target)
    yield from rates(config, target)


def tune(scale: Scale, target: Target) -> Iterator[Specialisation]:
    """Every candidate, every order of its tiles, and what would give other bits."""
    yield bench.MemoryComparison.kernel()
    for work in speed.tuned(scale, target):
        usual = candidates(work, target)
        orders = [one for candidate in usual for one in refined(candidate)]
        yield from specs_of(work, [*usual, *orders, *rivals(work, target)], target)


def sanitizer(scale: Scale, target: Target) -> Iterator[Specialisation]:
    for config in small_step.configs():
        yield from step(config, target)
    for program in small_step.programs(**small_step.SIZES):
        yield from lower_and_plan({"product": program}, target).specs


def craft_of(name: str, scale: Scale, target: Target) -> Kernels:
    return apart.kernels(craft.CASES[name](scale), target)


# By stage. `kernels` compiles what its tests make up, and `start` begins with caches that are empty on purpose; the others that are
# not here launch nothing of ours.
KERNELS: dict[str, Callable[[Scale, Target], Kernels]] = {
    **{name: partial(rung, name) for name in first.RUNGS},
    "whole": lambda scale, target: step(first.whole_step(scale), target, "barellm", "cublaslt"),
    "same": lambda scale, target: step(first.whole_step(scale), target),
    "pace": pace,
    "graph": lambda scale, target: step(model(scale, seq=LONG), target),
    "equal": equal,
    "step": steps,
    "gemm": gemm,
    "sides": sides,
    "layout": layout,
    "determinism": lambda scale, target: step(model(scale, seq=LONG), target),
    "attention": attention,
    "streaming": streaming,
    "tune": tune,
    "counters": lambda scale, target: step(first.whole_step(scale), target),
    "sanitizer": sanitizer,
    **{name: partial(craft_of, name) for name in craft.CASES},
}


def needed(target: Target, scale: Scale = FULL) -> dict[Specialisation, None]:
    """Every kernel of the stages."""
    return {spec: None for kernels in KERNELS.values() for spec in kernels(scale, target)}


def fill(folder: Path, arch: int) -> tuple[int, int]:
    """How many kernels the folder has then, and their bytes. It is one for BARELLM_CACHE."""
    with patch.dict(os.environ, {"BARELLM_CACHE": str(folder.resolve())}):
        count = len(compiled(needed(Target(arch)), arch, processes=processes()))
        return count, sum(f.stat().st_size for f in cache_folder().glob("*.cubin"))


def compile(scale: Scale) -> dict[str, Any]:
    """What the stages that were asked for launch, stage by stage on all cores; what is in the cache already is only read. It needs
    the GPU for its name. A stage whose kernels do not compile here fails by itself later."""
    target = Target.of(driver.device())
    rows: list[dict[str, Any]] = []
    for name in [name for name in scale.stages if name in KERNELS]:
        if scale.left_s <= 1.0:
            rows.append({"stage": name, "left out": "no time"})
            continue
        begin = time.monotonic()
        row: dict[str, Any] = {"stage": name}
        try:
            row["kernels"] = len(
                cuda_step.compiled(dict.fromkeys(KERNELS[name](scale, target)), target.arch, processes=processes())
            )
        except Exception as error:
            row["wrong"] = f"{type(error).__name__}: {error}"
        rows.append(row | {"seconds": time.monotonic() - begin})
        print(rows[-1], flush=True)
        scale.keep({"stages": rows})
    wrong = sum("wrong" in row for row in rows)
    return {"stages": rows, "bars": [bar("stages whose kernels do not compile", wrong, 0, at_most=True)]}
