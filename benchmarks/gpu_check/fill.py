"""Compiles what the stages launch, on a machine without a GPU: cubins have no paths in them, so the folder can be taken along."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from barellm.assembly.machine import build_programs
from barellm.cuda.compile import cache_folder, compiled
from barellm.cuda.kernel import Specialisation, Target
from barellm.cuda.step import lower_and_plan, processes
from barellm.cuda.tuner.bed import built
from barellm.cuda.tuner.cases import case_of
from barellm.cuda.tuner.work import candidates, works_of
from benchmarks.gpu_check.correct import LONG, model
from benchmarks.gpu_check.stages import Scale

FULL = Scale(small=False, mock=False)
RUNS = (
    (64, 1024, "bf16"),
    (32, 1024, "bf16"),
    (4, LONG, "bf16"),
    (4, 64, "bf16"),
    (4, 64, "fp32"),
)  # batch, length, dtype


def needed(arch: int) -> dict[Specialisation, None]:
    """Every kernel of the stages' steps, of each piece of work of the largest, and of the ways to do it that `tune` tries."""
    target, found = Target(arch), {}
    for batch, seq, dtype in RUNS:
        for matmul in ("own", "cublaslt"):
            programs = build_programs(model(FULL, batch=batch, seq=seq, dtype=dtype))
            found |= dict.fromkeys(lower_and_plan(programs, replace(target, matmul=matmul)).specs)
    for work in works_of(build_programs(model(FULL, batch=64, seq=1024)), target):
        case = case_of(work)
        for candidate in candidates(work, target):
            found |= dict.fromkeys(built(case, work, candidate, target)[1].specs)
    return found


def fill(folder: Path, arch: int) -> tuple[int, int]:
    """How many kernels the folder has then, and their bytes. It is one for BARELLM_CACHE."""
    with patch.dict(os.environ, {"BARELLM_CACHE": str(folder.resolve())}):
        count = len(compiled(needed(arch), arch, processes=processes()))
        return count, sum(f.stat().st_size for f in cache_folder().glob("*.cubin"))
