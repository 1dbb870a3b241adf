"""SwiGLU and its gradient. Shapes: gate, up, y, dy, dgate, dup (rows, F). The rows of each lie a stride of its own apart: gate and
up are often the two halves of one product, and their gradients those of its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from barellm.cpu.kernel import KernelBuilder, kernel
from barellm.cpu.kernels.loops import STREAM_BYTES, added, row_grain, shape_of, store_all
from barellm.cpu.lang import Pointer, Value
from barellm.cpu.lang.vector import silu, silu_and_slope
from barellm.program.ops.base import Op

TOGETHER = 2  # vectors of a row that are stored together


def constants_of(op: Op) -> dict[str, Any]:
    """`strides`: of the rows of each operand; `lines`: whether the rows of all results are whole cache lines."""
    tensors = op.outputs | op.inputs
    lines = all(n % 64 == 0 for t in op.outputs.values() for n in (t.first_column, t.row_stride, t.shape[-1]))
    strides = tuple((name, t.row_stride) for name, t in tensors.items())
    return {"F": int(op.gate.shape[-1]), "strides": strides, "lines": lines, **shape_of(op.gate)}


# (column, mask or None) -> what belongs there of each result
Vectors = Callable[[Any, Value | None], list[Value]]


def sweep_rows(
    k: KernelBuilder,
    rows: Value,
    F: int,
    outs: list[tuple[Pointer, int, str]],
    vectors: Callable[[Value], Vectors],
    *,
    lines: bool,
) -> None:
    """Threads claim rows; vectors(row) gives those of the results `outs`, each with its stride and mode. Results that leave the
    caches go past them if all are stored."""
    stored = all(mode == "store" for *_, mode in outs)
    past = rows * sum(F * p.itemsize for p, *_ in outs) > STREAM_BYTES if stored and lines else None
    step = TOGETHER * k.lanes
    whole = F - F % step
    with k.claim(rows, row_grain(F)) as (begin, end), k.loop(begin, end) as row:
        to, of = [p.at(row * stride) for p, stride, _ in outs], vectors(row)

        def written(c: Any, mask: Value | None) -> list[Value]:
            found = zip(to, of(c, mask), outs, strict=True)
            return [added(k, p, c, mask, value, mode) for p, value, (_, _, mode) in found]

        with k.loop(0, whole, step) as c:
            groups = [written(c + j * k.lanes, None) for j in range(TOGETHER)]
            for p, values in zip(to, zip(*groups, strict=True), strict=True):
                store_all(k, p, list(values), c, past)
        for c, mask in k.columns(F - whole):
            for p, value in zip(to, written(whole + c, mask), strict=True):
                p.store(value, whole + c, mask)


@kernel("swiglu", constants=constants_of, views="gate up y")
def swiglu(k: KernelBuilder, y, gate, up, *, F, strides, lines, dims, inner, mode_y) -> None:
    stride = dict(strides)

    def vectors(row: Value) -> Vectors:
        g, u = gate.at(row * stride["gate"]), up.at(row * stride["up"])
        return lambda c, mask: [silu(k, g.load(c, mask), y.dtype) * u.load(c, mask)]

    sweep_rows(k, k.extent(dims) * inner, F, [(y, stride["y"], mode_y)], vectors, lines=lines)


@kernel("swiglu_backward", constants=constants_of, views="gate up dy dgate dup")
def swiglu_backward(
    k: KernelBuilder, dgate, dup, dy, gate, up, *, F, strides, lines, dims, inner, mode_dgate, mode_dup
) -> None:
    stride = dict(strides)

    def vectors(row: Value) -> Vectors:
        d, g, u = (p.at(row * stride[name]) for p, name in ((dy, "dy"), (gate, "gate"), (up, "up")))

        def found(c: Any, mask: Value | None) -> list[Value]:
            value, slope = silu_and_slope(k, g.load(c, mask), dgate.dtype)
            by = d.load(c, mask)
            return [by * u.load(c, mask) * slope, by * value]

        return found

    outs = [(dgate, stride["dgate"], mode_dgate), (dup, stride["dup"], mode_dup)]
    sweep_rows(k, k.extent(dims) * inner, F, outs, vectors, lines=lines)
