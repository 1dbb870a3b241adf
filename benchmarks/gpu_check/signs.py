"""Binary matmuls (XNOR-popcount) by the tensor cores' instruction for single bits, interleaved with the same matmuls by popc."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np

from barellm.cuda import driver
from barellm.cuda.kernel import Specialisation, Target
from barellm.cuda.kernels.gemm import binary_mma
from barellm.cuda.step import CudaSession, lower_and_plan
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.ops.pointwise.binary import pack
from barellm.program.tensor import Dim
from barellm.tools.plan import devices
from benchmarks.gpu_check.bars import bar, holds
from benchmarks.gpu_check.stages import Scale

SIZES = ((2048, 2048, 2048), (4096, 4096, 4096), (64, 4096, 4096), (1024, 1000, 777))  # rows, columns, depth
ROUNDS, REPLAYS = 5, 20
FASTER = 3.0  # than popc, for the first two; docs/binary.md has the arithmetic


def sizes(scale: Scale) -> tuple[tuple[int, int, int], ...]:
    return ((65, 70, 300),) if scale.small else SIZES


def program(rows: int, N: int, K: int) -> Program:
    """The matmul alone, of words that are packed already."""
    store = Store()
    p = Program(store, compute="fp32")
    W = -(-K // 32)
    a = p.input("a", (Dim("batch", 1), Dim("seq", rows), W), "i32")
    p.output("y", p.apply(ops.BinaryMatmul, a=a, b=store.get("b", (N, W), "i32", "state"), columns=K, dtype="fp32").y)
    return p


def opened(target: Target, rows: int, N: int, K: int) -> CudaSession:
    p = program(rows, N, K)
    return CudaSession({"product": p}, built=lower_and_plan({"product": p}, target))


def kernels(scale: Scale, target: Target) -> Iterator[Specialisation]:
    """What the stage launches."""
    for size in sizes(scale):
        yield from lower_and_plan({"product": program(*size)}, target).specs
        with patch.object(binary_mma, "LAST_ARCH", 0):
            yield from lower_and_plan({"product": program(*size)}, target).specs


def signs(scale: Scale) -> dict[str, Any]:
    """Both agree with NumPy's matmul of the signs; seconds of each."""
    rows_, bars = [], []
    target = Target.of(driver.device())
    for rows, N, K in sizes(scale):
        r = np.random.default_rng(rows)
        x, weight = (r.standard_normal(shape).astype(np.float32) for shape in ((rows, K), (N, K)))
        found: dict[str, Any] = {"size": [rows, N, K]}
        sessions = {"tensor cores": opened(target, rows, N, K)}
        with patch.object(binary_mma, "LAST_ARCH", 0):
            sessions["popc"] = opened(target, rows, N, K)
        right = np.where(x[:64] >= 0, 1.0, -1.0) @ np.where(weight >= 0, 1.0, -1.0).T
        for name, session in sessions.items():
            session.write("a", pack(x)[None])
            session.write("b", pack(weight))
            session.run("product", batch=1, seq=rows)
            found[name] = {"kernel": [call.spec.name for call in session.lowered["product"].launches], "s": []}
            bars.append(holds(f"signs {rows} x {N} x {K} by {name}: exact", bool((session.read("y")[0, :64] == right).all())))
        for _ in range(1 if scale.mock else ROUNDS):
            for name, session in sessions.items():
                found[name]["s"] += devices.replay_seconds(session, "product", 1 if scale.mock else REPLAYS, batch=1, seq=rows)[:1]
        slow, fast = (median(found[name]["s"]) for name in ("popc", "tensor cores"))
        print(rows, N, K, f"{fast:.2e} s, {2 * rows * N * K / fast:.3e} operations a second; popc {slow:.2e} s")
        if (rows, N, K) in SIZES[:2]:
            bars.append(bar(f"signs {rows} x {N} x {K}: times as fast as by popc", slow / fast, FASTER, "x"))
        for session in sessions.values():
            session.close()
        rows_.append(found)
        scale.keep({"products": rows_, "bars": bars})
    return {"products": rows_, "bars": bars}
