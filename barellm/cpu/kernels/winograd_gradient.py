"""The gradient of 3 x 3 filters by Winograd's F(3x3, 2x2) and F(3x3, 4x4): the tiles of the output's gradient are the filters.

Both operands are transformed as the forward pass transforms its tiles (winograd.py), lanes along tiles. For each position the
gradient is then a product over all tiles, whose sums stay in registers until their lanes are added. The tiles that are transformed
at a time are added up in order.
"""

from __future__ import annotations

from typing import Any

from barellm.cpu.kernel import KernelBuilder, Lowering
from barellm.cpu.kernels.conv_gradient import TILES
from barellm.cpu.kernels.conv_lines import Grid
from barellm.cpu.kernels.loops import put_added
from barellm.cpu.kernels.winograd import append_transform, tile_of_products
from barellm.cpu.kernels.winograd_transform import both_ways
from barellm.cpu.lang import Value
from barellm.program.integers import ceil_div
from barellm.program.winograd import filter_matrix, input_matrix, output_matrix
from barellm.runtime.lowering import part

BLOCKS = 48  # of tiles that are transformed and multiplied at a time: part of what the bits depend on
ROWS, COLUMNS = 48, 64  # of a claim's gradient at a position: what it reads of so many blocks stays in the second cache


def winograd_gradient_product(
    k: KernelBuilder, products, dy, x, first, limit, *, dims, count: int, groups: int, rows: int, columns: int, positions: int,
    outputs: tuple[int, int], span: int,
) -> None:  # fmt: skip
    """products (positions, groups rows, columns) = dy (blocks, groups, positions, rows, span) x (..., columns, span)^T, summed over
    blocks and span; added to what is there but for the first blocks."""
    total = k.num_elements(dims, count) * (outputs[0] * outputs[1])
    blocks = k.max(k.min(k.ceil_div(total, span) - first, limit), 0)
    again = k.int(first) > 0
    high, wide = (2, 4) if not k.isa.fma else TILES[k.isa.registers]
    down, across = ceil_div(rows, ROWS), ceil_div(columns, COLUMNS)

    with k.parallel_for(groups * positions * (down * across)) as unit:
        column0, rest = unit % across * COLUMNS, unit // across
        row0, rest = rest % down * ROWS, rest // down
        position, group = rest % positions, rest // positions
        row1, column1 = k.min(row0 + ROWS, rows), k.min(column0 + COLUMNS, columns)
        plane = group * positions + position

        def tile(row: Value, column: Value, high: int, wide: int) -> None:
            acc = [[k.var_vec(0.0) for _ in range(wide)] for _ in range(high)]
            with k.loop(0, blocks) as block:
                at = block * (groups * positions) + plane
                left, right = dy.at((at * rows + row) * span), x.at((at * columns + column) * span)
                for v in range(0, span, k.lanes):
                    factors = [left.load(r * span + v) for r in range(high)]
                    for c in range(wide):
                        seen = right.load(c * span + v)
                        for r, factor in enumerate(factors):
                            acc[r][c].value = k.fma(factor, seen, acc[r][c].value)
            for r, line in enumerate(acc):
                for c, var in enumerate(line):
                    to = products.at(((position * groups + group) * rows + row + r) * columns + column + c)
                    to.put(k.select(again, to.get(), 0.0) + k.sum(var.value))

        whole_row, whole_column = row1 - (row1 - row0) % high, column1 - (column1 - column0) % wide
        for begin, end, step in ((column0, whole_column, wide), (whole_column, column1, 1)):
            with k.loop(begin, end, step) as column:
                with k.loop(row0, whole_row, high) as row:
                    tile(row, column, high, step)
                with k.loop(whole_row, row1) as row:
                    tile(row, column, 1, step)


def winograd_gradient_output(k: KernelBuilder, dw, products, *, size: int, m: int, flip: bool, mode: str) -> None:
    """dw (size, 3, 3) = A^T products A, of products (positions, size). `flip`: filters are read from their end."""
    n, A = m + 2, output_matrix(3, m)
    with k.parallel_range(ceil_div(size, k.lanes), 8) as (begin, end), k.loop(begin, end) as block:
        first = block * k.lanes
        mask = k.mask_first(size - first) if size % k.lanes else None
        square = [[products.load((i * n + j) * size + first, mask) for j in range(n)] for i in range(n)]
        made = [v for row in both_ways(k, A, square) for v in row]
        for t, v in enumerate(reversed(made) if flip else made):
            for lane in range(k.lanes):
                with k.when(first + lane < size):
                    put_added(k, dw, (first + lane) * 9 + t, k.lane(v, lane), mode)


def append_winograd_gradient(
    c: Lowering,
    *,
    m: int,
    dw: Any,
    dy: Any,
    x: Any,
    grid: Grid,
    groups: int,
    mode: str,
    dims: tuple[str, ...],
    count: int,
) -> None:
    """`grid`: what the direct convolution sees of x."""
    rows, columns, n = int(dy.shape[1]) // groups, grid.channels, m + 2
    P, Q = grid.outputs
    outputs = ceil_div(P, m), ceil_div(Q, m)
    offset = min(grid.rows), min(grid.columns)
    of_x = Grid(
        grid.size, columns, outputs, (m, m), tuple(offset[0] + i for i in range(n)), tuple(offset[1] + i for i in range(n)),
        grid.reflect,
    )  # fmt: skip
    of_dy = Grid((P, Q), rows, outputs, (m, m), tuple(range(m)), tuple(range(m)))
    span = tile_of_products(c.isa).nr(c.isa)
    blocks = ceil_div(int(x.shape[0]) * outputs[0] * outputs[1], span)
    limit = min(blocks, BLOCKS)
    made = {
        name: (part(c.workspace(name, 4 * limit * groups * n * n * channels * span)), "fp32")
        for name, channels in (("dy tiles", rows), ("x tiles", columns))
    }
    products = part(c.workspace("products", 4 * n * n * groups * rows * columns)), "fp32"
    images: dict[str, Any] = {"dims": dims, "count": count, "groups": groups, "span": span}
    for first in range(0, blocks, limit):
        where = {"first": first, "limit": limit}
        append_transform(c, made["dy tiles"], dy, grid=of_dy, matrix=filter_matrix(3, m), **images, **where)
        append_transform(c, made["x tiles"], x, grid=of_x, matrix=input_matrix(n), **images, **where)
        sizes = {"rows": rows, "columns": columns, "positions": n * n, "outputs": outputs, **images}
        operands = {"products": products, "dy": made["dy tiles"], "x": made["x tiles"], **where}
        c.call(winograd_gradient_product, operands, sizes, writes="products")
    flip = grid.rows[0] > grid.rows[1]
    sizes = {"size": groups * rows * columns, "m": m, "flip": flip, "mode": mode}
    c.call(winograd_gradient_output, {"dw": dw, "products": products}, sizes, writes="dw")
