"""The roofline of an op: the least time it takes at the measured rates of this machine. An estimate: tensors in caches may move
faster than memory bandwidth, and rates measured under load are too low."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol

from barellm.program.dtypes import LARGEST
from barellm.program.ops.base import Op, Tensor
from barellm.runtime import rates

Mix = tuple[int, int, int]  # of eight vectors that an op moves: how many it reads, writes, updates in place
HALVES = ("bf16", "fp16")  # dtypes that machines may multiply faster than fp32
NAMED: dict[str, Mix] = {"copy": (4, 4, 0), "update": (0, 0, 8), "read": (8, 0, 0)}


class Bench(Protocol):
    """The measurements that a backend makes of its machine: FLOP/s of `dtype` matmuls, and bytes/s of a mix. Where it has a text
    `machine`, its rates are kept by that (`runtime/rates.py`)."""

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
    """The rates of a machine, measured unless `source` says otherwise. `flops` has the FLOP/s of matmuls by the dtype of their
    operands, with the operands in registers. `bandwidth` has the bytes/s that are read and written (an update counts twice) by mix.
    A rate that is asked for and not there yet is measured, on the CPU in 0.1 s (dtype) or 0.2 s (mix)."""

    flops: dict[str, float]
    bandwidth: dict[Mix, float]
    opened: Callable[[], Bench] = field(default=partial(open_bench, "cpu"))
    source: str = "measured"

    def operations(self, op: Op) -> float:
        """Seconds of the op's arithmetic. Matmuls and attention run at the peak of their operands' dtype."""
        return sum(o.flops() / self.peak(dtype_of_products(o)) for o in primitives(op))

    def peak(self, dtype: str) -> float:
        """FLOP/s of matmuls of `dtype`."""
        if dtype not in self.flops:
            self._measured(lambda bench: self.flops.update({dtype: kept(bench, dtype)}))
        return self.flops[dtype]

    def traffic(self, op: Op) -> float:
        """Seconds to move the bytes that must move, at the bandwidth of this mix of reads and writes."""
        mix = mix_of(op)
        if mix not in self.bandwidth:
            self.measure([mix])
        return op.bytes() / self.bandwidth[mix]

    def measure(self, mixes: Iterable[Mix]) -> None:
        """The bandwidths of `mixes`, where they are not there yet."""
        if missing := [mix for mix in dict.fromkeys(mixes) if mix not in self.bandwidth]:
            self._measured(lambda bench: self.bandwidth.update({mix: kept(bench, mix) for mix in missing}))

    def again(self) -> None:
        """Measure all known rates once more and keep the higher ones, for comparisons under the current conditions."""

        def each(bench: Bench) -> None:
            for dtype, rate in self.flops.items():
                self.flops[dtype] = max(rate, bench.peak(dtype))
            for mix, rate in self.bandwidth.items():
                self.bandwidth[mix] = max(rate, bench.bandwidth(mix))

        self._measured(each)

    def _measured(self, work: Callable[[Bench], None]) -> None:
        bench = self.opened()
        try:
            work(bench)
        finally:
            bench.close()

    def seconds(self, op: Op) -> float:
        """The roofline: max(operations / peak, bytes / bandwidth)."""
        return max(self.operations(op), self.traffic(op))

    def to_json(self) -> dict[str, Any]:
        names = {mix: name for name, mix in NAMED.items()}
        return {
            "from": self.source,
            "flops": self.flops,
            "bandwidth": {names[m]: rate for m, rate in self.bandwidth.items() if m in names},
            "mixes": [{"read": m[0], "write": m[1], "update": m[2], "rate": r} for m, r in self.bandwidth.items()],
        }


def kept(bench: Bench, what: str | Mix, *, renew: bool = False) -> float:
    """The rate of a dtype or a mix, as it is kept for the machine."""

    def measure() -> float:
        return bench.peak(what) if isinstance(what, str) else bench.bandwidth(what)

    machine = getattr(bench, "machine", "")
    return rates.rate(machine, name_of(what), measure, renew=renew).value if machine else measure()


def name_of(what: str | Mix) -> str:
    """bf16, copy, or a mix as 5 read, 3 written, 0 updated."""
    if isinstance(what, str):
        return what
    return {mix: name for name, mix in NAMED.items()}.get(what, f"{what[0]} read, {what[1]} written, {what[2]} updated")


def mix_of(op: Op) -> Mix:
    """How an op's memory traffic splits into (read, written, updated in place), in eighths: the classes of measured rates."""
    # An embedding reads and updates as many rows as there are tokens: no more bytes than its largest activation counts.
    outputs = set(op.outputs.values())
    updated = {t for name, t in op.outputs.items() if t in op.inputs.values() or op.modes.get(name) == "add"}
    largest = max((t.nbytes for t in (*op.inputs.values(), *outputs) if t.dims), default=0)
    limit = largest if op.name.startswith("embedding") else 1 << 62
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
    """The 16-bit dtype whose operands the op multiplies, or "fp8", else "fp32": everything outside matmuls is computed in fp32."""
    operands: list[Tensor] = list(op.inputs.values())
    if op.product and any(t.dtype in LARGEST for t in operands):
        return "fp8"
    return next((t.dtype for t in operands if t.dtype in HALVES), "fp32") if op.product else "fp32"


@cache
def measured_ceiling(*, device: str = "cpu", threads: int | None = None) -> Ceiling:
    """Measured once a machine: on a CPU the peaks take 1 s, bandwidth 3 s and 256 MiB for a moment. `threads`: not all."""
    opened = partial(open_bench, device, threads)
    bench = opened()
    try:
        flops = {dtype: kept(bench, dtype) for dtype in ("fp32", "bf16")}
        return Ceiling(flops, {mix: kept(bench, mix) for mix in NAMED.values()}, opened)
    finally:
        bench.close()
