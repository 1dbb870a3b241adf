"""SwiGLU and its gradient. Shapes: gate, up, y, dy, dgate, dup (rows, F). Rows have any stride: gate and up are
often the two halves of one fused GEMM, and their gradients those of its gradient.
"""

from __future__ import annotations

from typing import Any

from barellm.cpu.kernel import KernelBuilder, kernel
from barellm.cpu.kernels.loops import Vectors, foreach_row, shape_of, whole_cache_lines
from barellm.cpu.lang import Value
from barellm.cpu.lang.vector import silu, silu_and_slope
from barellm.program.ops.base import Op


def constants_of(op: Op) -> dict[str, Any]:
    """Constants of these kernels: F columns; `strides`: (name, row stride in elements) of each operand; `lines`: whether the rows
    of all results are whole cache lines."""
    tensors = op.outputs | op.inputs
    strides = tuple((name, t.row_stride) for name, t in tensors.items())
    return {"F": int(op.gate.shape[-1]), "strides": strides, "lines": whole_cache_lines(op), **shape_of(op.gate)}


@kernel("swiglu", constants=constants_of, views="gate up y")
def swiglu(k: KernelBuilder, y, gate, up, *, F, strides, lines, dims, inner, mode_y) -> None:
    """y = silu(gate) up."""
    stride = dict(strides)

    def vectors(row: Value) -> Vectors:
        g, u = gate.at(row * stride["gate"]), up.at(row * stride["up"])
        return lambda c, mask: [silu(k, g.load(c, mask), y.dtype) * u.load(c, mask)]

    foreach_row(k, k.num_elements(dims) * inner, F, [(y, stride["y"], mode_y)], vectors, lines=lines)


@kernel("swiglu_backward", constants=constants_of, views="gate up dy dgate dup")
def swiglu_backward(
    k: KernelBuilder, dgate, dup, dy, gate, up, *, F, strides, lines, dims, inner, mode_dgate, mode_dup
) -> None:
    """dgate = dy up silu'(gate), dup = dy silu(gate)."""
    stride = dict(strides)

    def vectors(row: Value) -> Vectors:
        d, g, u = (p.at(row * stride[name]) for p, name in ((dy, "dy"), (gate, "gate"), (up, "up")))

        def gradients(c: Any, mask: Value | None) -> list[Value]:
            value, slope = silu_and_slope(k, g.load(c, mask), dgate.dtype)
            by = d.load(c, mask)
            return [by * u.load(c, mask) * slope, by * value]

        return gradients

    outs = [(dgate, stride["dgate"], mode_dgate), (dup, stride["dup"], mode_dup)]
    foreach_row(k, k.num_elements(dims) * inner, F, outs, vectors, lines=lines)
