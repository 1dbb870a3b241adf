"""Add, rescale, cast, zeros, bias, activations and their gradients, last row. Shapes: any, row-major; C is the last axis.

Flat kernels see elements, the others rows. A result that leaves the caches is written past them."""

from typing import Any

from barellm.cpu.kernel import Lowering, Op, batch_and_seq, kernel, lowering
from barellm.cpu.kernels import loops
from barellm.cpu.kernels.numbers import bits, number
from barellm.cpu.kernels.pointwise.activations import EMITTERS
from barellm.program.ops.pointwise.elementwise import ACTIVATIONS
from barellm.program.tensor import Span


@kernel("add", constants=lambda op: loops.flat(op.y))
def add(k, y, a, b, *, dims, width, mode_y) -> None:
    for i, mask, put in loops.elementwise(k, k.num_elements(dims) * width, y, unroll=4, mode=mode_y):
        put(a.load(i, mask) + b.load(i, mask))


def rescale(k, y, x, factor, *, dims, width, mode) -> None:
    multiplier = k.to(number(k, factor), "float")
    for i, mask, put in loops.elementwise(k, k.num_elements(dims) * width, y, unroll=4, mode=mode):
        put(x.load(i, mask) * multiplier)


@lowering("rescale", starts="y")
def lower_rescale(op: Op, c: Lowering) -> None:
    """Layers have factors of their own, and share the code."""
    c.call(rescale, {"y": op.y, "x": op.x, "factor": bits(op.forward)}, {**loops.flat(op.y), "mode": op.modes["y"]}, writes="y")


def columns_or_flat(op: Op) -> dict[str, Any]:
    """Compile-time constants of a kernel whose result may be a view: `columns` = (columns, row stride in elements, whether rows
    fill cache lines); None for a contiguous result, whose elements are flat."""
    y = op.y
    columns = None if y.base is y or isinstance(y, Span) else (int(y.shape[-1]), y.row_stride, loops.whole_cache_lines(op))
    return {"columns": columns, **loops.shape_of(y), **loops.flat(y)}


@kernel("cast", constants=columns_or_flat, views="y", spans="x y")
def cast(k, y, x, *, columns, inner, dims, width, mode_y) -> None:
    """y = x, converted to the dtype of y, which may be a view (`columns_or_flat`); stored or added (mode_y)."""
    if columns is None:
        for i, mask, put in loops.elementwise(k, k.num_elements(dims) * width, y, unroll=4, mode=mode_y):
            put(x.load(i, mask))
        return
    C, stride, lines = columns
    for row, vectors in loops.write_rows(k, k.num_elements(dims) * inner, C, [(y, stride, mode_y)], lines=lines):
        src = x.at(row * C)
        for c, mask, put in vectors:
            put(src.load(c, mask))


@kernel("zeros", constants=columns_or_flat, views="y")
def zeros(k, y, *, columns, inner, dims, width, mode_y) -> None:
    zero = k.to(0.0, k.vec)
    if columns is None:
        for _, _, put in loops.elementwise(k, k.num_elements(dims) * width, y, mode=mode_y):
            put(zero)
        return
    C, stride, lines = columns
    for _, vectors in loops.write_rows(k, k.num_elements(dims) * inner, C, [(y, stride, mode_y)], lines=lines):
        for _, _, put in vectors:
            put(zero)


def activation(k, y, x, *, name, dims, width, mode_y) -> None:
    for i, mask, put in loops.elementwise(k, k.num_elements(dims) * width, y, mode=mode_y):
        put(EMITTERS[name].value(k, x.load(i, mask), "fp32"))


def activation_backward(k, dx, dy, x, *, name, dims, width, mode_dx) -> None:
    for i, mask, put in loops.elementwise(k, k.num_elements(dims) * width, dx, mode=mode_dx):
        put(dy.load(i, mask) * EMITTERS[name].slope(k, x.load(i, mask), "fp32"))


for _name in EMITTERS:
    _ops = ACTIVATIONS[_name]
    kernel(_ops.forward.name, constants=lambda op, name=_name: {"name": name, **loops.flat(op.y)})(activation)
    kernel(_ops.backward.name, constants=lambda op, name=_name: {"name": name, **loops.flat(op.dx)})(activation_backward)


@kernel("bias", constants=lambda op: {"C": int(op.bias.shape[0]), **loops.shape_of(op.y)})
def bias(k, y, x, bias, *, C, dims, inner, mode_y) -> None:
    with k.parallel_range(k.num_elements(dims) * inner, loops.row_grain(C)) as (begin, end), k.loop(begin, end) as row:
        dst, src = y.at(row * C), x.at(row * C)
        for c, mask, _ in loops.columns(k, C):
            dst.store(loops.accumulate(k, dst, c, mask, src.load(c, mask) + bias.load(c, mask), mode_y), c, mask)


@kernel("last_row", constants=lambda op: {"C": int(op.x.shape[-1]), **batch_and_seq(op.x)})
def last_row(k, y, x, *, C, batch, seq, mode_y) -> None:
    """y (batch, 1, C) = x (batch, seq, C) at the last position."""
    seq = k.size(seq)
    with k.parallel_for(k.size(batch)) as b:
        dst, src = y.at(b * C), x.at(((b + 1) * seq - 1) * C)
        for c, mask, _ in loops.columns(k, C):
            dst.store(loops.accumulate(k, dst, c, mask, src.load(c, mask), mode_y), c, mask)
