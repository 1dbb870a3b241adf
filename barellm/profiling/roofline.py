"""What this machine does at best, measured, and the time that an op cannot beat there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from barellm.program.builder import Program
from barellm.program.ops.base import Op
from barellm.program.tensor import Tensor

READ_ONLY = frozenset({"sum_squares"})
IN_PLACE = frozenset({"adamw"})


@dataclass(frozen=True)
class Ceiling:
    """`flops`: FLOP/s by dtype, operands in registers. `bandwidth`: bytes/s read plus written by "copy" (the better kind of
    store), "update" (in place) and "read"."""

    flops: dict[str, float]
    bandwidth: dict[str, float]

    def operations(self, op: Op) -> float:
        """Seconds of the op's arithmetic. Products and attention run at the peak of their operands' dtype."""
        return sum(o.flops() / self.flops[dtype_of_products(o)] for o in primitives(op))

    def traffic(self, op: Op) -> float:
        """Seconds to move the bytes that must move, at the bandwidth of this mix of reads and writes."""
        kind = "read" if op.name in READ_ONLY else "update" if op.name in IN_PLACE else "copy"
        return op.bytes() / self.bandwidth[kind]

    def seconds(self, op: Op) -> float:
        """The bound: max(operations / peak, bytes / bandwidth)."""
        return max(self.operations(op), self.traffic(op))

    def to_json(self) -> dict[str, Any]:
        return {"flops": self.flops, "bandwidth": self.bandwidth}


def primitives(op: Op) -> list[Op]:
    return list(getattr(op, "sequence", [op]))


def dtype_of_products(op: Op) -> str:
    """ "bf16" where the op multiplies bf16 operands, else "fp32": everything outside products is computed in fp32."""
    operands: list[Tensor] = list(op.inputs.values())
    return "bf16" if op.counted and any(t.dtype == "bf16" for t in operands) else "fp32"


def step_bound(programs: Mapping[str, Program], dtype: str, ceiling: Ceiling) -> float:
    """Seconds that no step can beat: model FLOPs at the peak of `dtype`, and one pass of AdamW over memory."""
    update = sum(ceiling.seconds(op) for op in programs["update"].ops if op.name == "adamw")
    return programs["micro"].flops / ceiling.flops[dtype] + update


@cache
def measured_ceiling(*, threads: int | None = None) -> Ceiling:
    """Measured once a process: the peaks take 0.1 s, bandwidth about 1 s and 512 MiB for a moment. `threads`: not all."""
    from barellm.cpu.backend import Bench

    bench = Bench(threads)
    try:
        flops = {dtype: bench.peak(dtype) for dtype in ("fp32", "bf16")}
        rates = {kind: bench.bandwidth(kind) for kind in ("copy", "copy_nontemporal", "update", "read")}
    finally:
        bench.close()
    rates["copy"] = max(rates["copy"], rates.pop("copy_nontemporal"))
    return Ceiling(flops, rates)
