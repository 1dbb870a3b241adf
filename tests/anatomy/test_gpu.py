"""The GPU's rungs: launched through a driver in Python, run as compiled PTX, compared with float64; what ptxas made of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from anatomy.gpu import r13_hilbert
from anatomy.gpu_measure import OnGpu, facts, facts_of, resident
from anatomy.gpu_rung import GPU_RUNGS, GpuRung
from barellm.cuda import compile as compiler
from barellm.cuda import driver
from tests.simulators.mock import Gpu
from tests.simulators.ptx import launch
from tests.simulators.ptx.machine import Run

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "anatomy-gpu.json"
NAMES = [r.name for r in GPU_RUNGS]
# More tiles than blocks where those are persistent, edges in all directions, more steps than the ring has buffers.
SIZES = {"fp32": (37, 70, 21), "bf16": (72, 264, 136), "producer and consumers": (72, 264, 328), "clusters": (200, 264, 328)}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.extended
def test_a_rung_is_right_as_compiled(name, monkeypatch):
    """And without spills, in the shared memory that a block may have, by the units that it is about."""
    (rung,) = [r for r in GPU_RUNGS if r.name == name]
    codes, mended = {}, GpuRung.mended
    monkeypatch.setattr(GpuRung, "mended", lambda self, spec, code: code)  # the driver in Python knows no other code

    def execute(spec, values, grid):
        kernel = compiler.triton_compile(spec, 90)
        code = codes[spec] = mended(rung, spec, compiler.code_of(spec, kernel, 90))
        ptx = (rung.mend or str)(kernel.asm["ptx"])
        how = Run(seed=1, poison=0xFF, late=True)
        launch.execute(spec, values, grid, arch=90, run=how, code=replace(code, cubin=ptx.encode()))

    gpu = Gpu(arch=90, sms=1, execute=execute)
    gpu.install(monkeypatch)
    device = driver.device()
    context = driver.Context(device)
    on_gpu = OnGpu(rung, SIZES.get(name, SIZES[rung.dtype]), device, context)
    on_gpu.check()
    on_gpu.free()
    (code,) = codes.values()
    row = facts_of(code)
    counts = row["counts"]
    assert row["spills"] == row["stack"] == 0 and row["shared"] <= 232448
    assert row["registers"] <= (255 if rung.dtype == "fp32" else 168)
    wanted = {"FFMA"} if rung.dtype == "fp32" else {"HGMMA", "UTMALDG"}
    assert wanted <= counts.keys() and ("UTMASTG" in counts) == (rung.number >= 12)
    assert ("STG" in counts) == (rung.number < 12)


def test_a_wrong_result_is_refused(monkeypatch):
    gpu = Gpu(arch=90, sms=1, execute=lambda spec, values, grid: None)
    gpu.install(monkeypatch)
    device = driver.device()
    with pytest.raises(AssertionError, match="naive: 12 of 12 numbers of C are wrong"):
        OnGpu(GPU_RUNGS[0], (3, 4, 5), device, driver.Context(device)).check()


def test_a_card_that_is_no_hopper_is_refused(monkeypatch):
    from anatomy import gpu_measure

    Gpu(arch=80).install(monkeypatch)
    with pytest.raises(ValueError, match=r"are for compute capability 9\.0"):
        gpu_measure.measured(GPU_RUNGS[:1], 64, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vector loads", "stores by TMA"])
def test_the_compiler_says_what_the_results_hold(name):
    """Every number of the page's table of these rungs; the others are made in the same way."""
    kept = json.loads(RESULTS.read_text())
    (rung,) = [r for r in GPU_RUNGS if r.name == name]
    (row,) = facts([rung], kept["size"])
    assert row == kept["rungs"][rung.number - 1]


@pytest.mark.parametrize("rows, columns", [(1, 1), (1, 5), (7, 3), (16, 16)])
def test_a_hilbert_curve_does_every_tile_once_and_never_jumps_in_a_square(rows, columns):
    order = r13_hilbert.hilbert(rows, columns)
    assert sorted(order) == list(range(rows * columns)) and order.dtype == np.int32
    if rows == columns:
        steps = abs(np.diff(order // columns)) + abs(np.diff(order % columns))
        assert (steps == 1).all()


@pytest.mark.parametrize("registers, shared, threads, blocks", [
    (32, 0, 1024, 2),  # the example of Gordic's article
    (33, 0, 1024, 1),  # given out in pieces of 8
    (168, 213184, 384, 1),
    (32, 32 << 10, 128, 6),
    (16, 0, 32, 32),
])  # fmt: skip
def test_blocks_that_fit_on_a_multiprocessor(registers, shared, threads, blocks):
    assert resident(registers, shared, threads) == blocks
