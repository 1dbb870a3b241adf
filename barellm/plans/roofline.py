"""What this machine does at best, measured, and the time that an op cannot beat there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol

from barellm.program.builder import Program
from barellm.program.ops.base import Op
from barellm.program.tensor import Tensor

Mix = tuple[int, int, int]  # of eight vectors that an op moves: how many it reads, writes, updates in place
NAMED: dict[str, Mix] = {"copy": (4, 4, 0), "update": (0, 0, 8), "read": (8, 0, 0)}


class Bench(Protocol):
    """What a backend measures of its machine: FLOP/s of `dtype` products, bytes/s of a mix."""

    def peak(self, dtype: str) -> float: ...
    def bandwidth(self, mix: Mix) -> float: ...
    def close(self) -> None: ...


def open_bench(device: str, threads: int | None = None) -> Bench:
    if device == "cuda":
        from barellm.cuda import bench

        return bench.Bench()
    from barellm.cpu import backend

    return backend.Bench(threads)


@dataclass(frozen=True)
class Ceiling:
    """`flops`: FLOP/s by dtype, operands in registers. `bandwidth`: bytes/s read plus written (an update counts twice) by mix;
    a mix that is asked for and not there yet is measured, on the CPU in 0.2 s."""

    flops: dict[str, float]
    bandwidth: dict[Mix, float]
    opened: Callable[[], Bench] = field(default=partial(open_bench, "cpu"))

    def operations(self, op: Op) -> float:
        """Seconds of the op's arithmetic. Products and attention run at the peak of their operands' dtype."""
        return sum(o.flops() / self.flops[dtype_of_products(o)] for o in primitives(op))

    def traffic(self, op: Op) -> float:
        """Seconds to move the bytes that must move, at the bandwidth of this mix of reads and writes."""
        mix = mix_of(op)
        if mix not in self.bandwidth:
            self.measure([mix])
        return op.bytes() / self.bandwidth[mix]

    def measure(self, mixes: Iterable[Mix]) -> None:
        """Now; of a rate that is there already the better one stays: a machine has slow minutes."""
        bench = self.opened()
        try:
            for mix in list(mixes):
                self.bandwidth[mix] = max(self.bandwidth.get(mix, 0.0), bench.bandwidth(mix))
        finally:
            bench.close()

    def again(self) -> None:
        """Measure all that is there once more, the peaks too."""
        bench = self.opened()
        try:
            for dtype, rate in self.flops.items():
                self.flops[dtype] = max(rate, bench.peak(dtype))
        finally:
            bench.close()
        self.measure(self.bandwidth)

    def seconds(self, op: Op) -> float:
        """The bound: max(operations / peak, bytes / bandwidth)."""
        return max(self.operations(op), self.traffic(op))

    def to_json(self) -> dict[str, Any]:
        names = {mix: name for name, mix in NAMED.items()}
        return {
            "flops": self.flops,
            "bandwidth": {names[m]: rate for m, rate in self.bandwidth.items() if m in names},
            "mixes": [{"read": m[0], "write": m[1], "update": m[2], "rate": r} for m, r in self.bandwidth.items()],
        }


def mix_of(op: Op) -> Mix:
    """What an op does to memory, in eighths of the bytes of its tensors."""
    outputs = set(op.outputs.values())
    updated = {t for name, t in op.outputs.items() if t in op.inputs.values() or op.modes.get(name) == "add"}
    # Of an embedding's table only the rows of the tokens are touched, unless it is written as a whole.
    most = max((t.nbytes for t in (*op.inputs.values(), *outputs) if t.dims), default=0)
    limit = most if op.name.startswith("embedding") else 1 << 62
    nbytes = [
        sum(min(t.nbytes, limit) for t in set(op.inputs.values()) - outputs),
        sum(t.nbytes for t in outputs - updated),
        sum(min(t.nbytes, limit) for t in updated),
    ]
    total = max(sum(nbytes), 1)
    write, update = (round(8 * n / total) for n in nbytes[1:])
    write = min(write, 8 - update)
    return (8 - write - update, write, update)


def primitives(op: Op) -> list[Op]:
    return list(getattr(op, "sequence", [op]))


def dtype_of_products(op: Op) -> str:
    """ "bf16" where the op multiplies bf16 operands, else "fp32": everything outside products is computed in fp32."""
    operands: list[Tensor] = list(op.inputs.values())
    return "bf16" if op.product and any(t.dtype == "bf16" for t in operands) else "fp32"


def step_bound(programs: Mapping[str, Program], dtype: str, ceiling: Ceiling) -> float:
    """Seconds that no step can beat: model FLOPs at the peak of `dtype`, and what the optimizers do with each parameter."""
    update = sum(ceiling.seconds(op) for op in programs["update"].ops if op.update)
    return programs["micro"].flops / ceiling.flops[dtype] + update


@cache
def measured_ceiling(*, device: str = "cpu", threads: int | None = None) -> Ceiling:
    """Measured once a process: on a CPU the peaks take 0.1 s, bandwidth 1 s and 256 MiB for a moment. `threads`: not all."""
    opened = partial(open_bench, device, threads)
    bench = opened()
    try:
        flops = {dtype: bench.peak(dtype) for dtype in ("fp32", "bf16")}
        return Ceiling(flops, {mix: bench.bandwidth(mix) for mix in NAMED.values()}, opened)
    finally:
        bench.close()
