"""The gradient of large filters by Fourier transforms: the tiles of the output's gradient are the filters.

A tile of m x m pixels of dy, m = F + 1 - R, sees F x F pixels of the image. Both are transformed (conv_fft.py), lanes along tiles,
and for each of the 3 F (F / 2 + 1) planes the gradient is a product over all tiles (winograd_gradient.py). What the first R x S
pixels of its inverse transform hold is the sum over tiles of dy times the pixels that each element of the filter multiplied.
"""

from __future__ import annotations

from typing import Any

from barellm.cpu.kernel import KernelBuilder, Lowering
from barellm.cpu.kernels.conv_fft import Complex, fft_input, half, input_nbytes, size_of, transform
from barellm.cpu.kernels.conv_lines import Grid
from barellm.cpu.kernels.loops import put_added
from barellm.cpu.kernels.winograd import V_BYTES, tile_of_products
from barellm.cpu.kernels.winograd_gradient import winograd_gradient_product
from barellm.program.integers import ceil_div
from barellm.runtime.lowering import part


def fft_gradient_output(
    k: KernelBuilder, dw, products, *, size: int, F: int, R: int, S: int, flip: bool, mode: str
) -> None:
    """dw (size, R, S) from products (planes, size), lanes along `size`. `flip`: filters are read from their end."""
    pitch, buffer = 2 * half(F) * k.lanes, k.thread_scratch()
    with k.parallel_range(ceil_div(size, k.lanes), 8) as (begin, end), k.loop(begin, end) as block:
        first = block * k.lanes
        mask = k.mask_first(size - first) if size % k.lanes else None
        with k.loop(0, half(F)) as column:
            x: list[Complex] = []
            for i in range(F):
                plane = (column + i * half(F)) * 3
                k1, k2, k3 = (products.load((plane + n) * size + first, mask) for n in range(3))
                x.append((k1 - k3, k1 + k2))
            for i, (re, im) in enumerate(transform(k, x, 1)[:R]):
                to = buffer.at(i * pitch + column * (2 * k.lanes))
                to.store(re)
                to.store(im, k.lanes)
        with k.loop(0, R) as r:
            at = buffer.at(r * pitch)
            known: list[Complex] = [(at.load(2 * f * k.lanes), at.load((2 * f + 1) * k.lanes)) for f in range(half(F))]
            x = known + [(re, -im if im is not None else None) for re, im in known[-2:0:-1]]
            row = R - 1 - r if flip else r
            for s, (re, _) in enumerate(transform(k, x, 1)[:S]):
                made, column = re * (1.0 / (F * F)), S - 1 - s if flip else s
                for lane in range(k.lanes):
                    with k.when(first + lane < size):
                        put_added(k, dw, (first + lane) * (R * S) + row * S + column, k.lane(made, lane), mode)


def append_fft_gradient(
    c: Lowering, *, dw: Any, dy: Any, x: Any, grid: Grid, groups: int, mode: str, dims: tuple[str, ...], count: int
) -> None:
    """`grid`: what the direct convolution sees of x."""
    rows, columns, R, S = int(dy.shape[1]) // groups, grid.channels, len(grid.rows), len(grid.columns)
    F = size_of(R, S)
    m, planes = F + 1 - max(R, S), 3 * F * half(F)
    P, Q = grid.outputs
    outputs, offset = (ceil_div(P, m), ceil_div(Q, m)), (min(grid.rows), min(grid.columns))
    of_x = Grid(
        grid.size, columns, outputs, (m, m), tuple(offset[0] + i for i in range(F)), tuple(offset[1] + i for i in range(F)),
        grid.reflect,
    )  # fmt: skip
    of_dy = Grid((P, Q), rows, outputs, (m, m), tuple(range(m)), tuple(range(m)))
    span = tile_of_products(c.isa).nr(c.isa)
    blocks = ceil_div(int(x.shape[0]) * outputs[0] * outputs[1], span)
    # Tiles that are transformed and multiplied at a time: part of what the bits depend on.
    limit = max(1, min(blocks, V_BYTES // (4 * groups * planes * max(rows, columns) * span)))
    operands = (("x tiles", x, of_x, False), ("dy tiles", dy, of_dy, True))
    made = {
        name: (part(c.workspace(name, 4 * limit * groups * planes * seen.channels * span)), "fp32")
        for name, _, seen, _ in operands
    }
    products = part(c.workspace("products", 4 * planes * groups * rows * columns)), "fp32"
    images: dict[str, Any] = {"dims": dims, "count": count, "groups": groups, "span": span}
    buffer = 4 * F * 2 * half(F) * c.isa.lanes
    c.thread_scratch(buffer + max(input_nbytes(c.isa, seen, span) for _, _, seen, _ in operands))
    for first in range(0, blocks, limit):
        where = {"first": first, "limit": limit}
        for name, of, seen, filters in operands:
            c.call(
                fft_input, {"v": made[name], "x": of, **where}, {**images, "grid": seen, "F": F, "filters": filters}, writes="v"
            )  # fmt: skip
        sizes = {"rows": rows, "columns": columns, "positions": planes, "outputs": outputs, **images}
        tensors = {"products": products, "dy": made["dy tiles"], "x": made["x tiles"], **where}
        c.call(winograd_gradient_product, tensors, sizes, writes="products")
    flip = grid.rows[:2] != tuple(sorted(grid.rows[:2])) or grid.columns[:2] != tuple(sorted(grid.columns[:2]))
    sizes = {"size": groups * rows * columns, "F": F, "R": R, "S": S, "flip": flip, "mode": mode}
    c.call(fft_gradient_output, {"dw": dw, "products": products}, sizes, writes="dw")
