"""Filter gradient (wgrad) of 3 x 3 filters by Winograd's F(3x3, 2x2) and F(3x3, 4x4): dy's tiles are the filters.

Both operands are transformed as the forward pass transforms its tiles (winograd.py), lanes along tiles. For each position the
gradient is then a GEMM whose K dimension is all tiles; its sums stay in registers until their lanes are added. The K blocks, tiles
that are transformed at a time, are accumulated in order."""

from typing import Any

from barellm.cpu.kernel import KernelBuilder, Lowering, Value, part
from barellm.cpu.kernels.conv import conv_wgrad, im2col, winograd, winograd_transform
from barellm.cpu.kernels.loops import accumulate_scalar
from barellm.program.integers import ceil_div
from barellm.program.winograd import filter_matrix, input_matrix, output_matrix

KC = 48  # blocks of tiles of a K block: they are the order of summation
MC, NC = 48, 64  # rows and columns of a work item at a position: what it reads of a K block stays in L2


def winograd_wgrad_gemm(
    k: KernelBuilder, products, dy, x, first, limit, *, dims, count: int, groups: int, rows: int, columns: int, positions: int,
    outputs: tuple[int, int], tile_n: int,
) -> None:  # fmt: skip
    """products (positions, groups rows, columns) = dy (blocks, groups, positions, rows, tile_n) @ x (blocks, groups, positions,
    columns, tile_n)^T, summed over blocks and tile_n; plus the old products but for the first K block of blocks [first, first +
    limit). `rows`: output channels, `columns`: input channels of a group; `outputs`: tiles of an image."""
    total = k.num_elements(dims, count) * (outputs[0] * outputs[1])
    blocks = k.max(k.min(k.ceil_div(total, tile_n) - first, limit), 0)
    add_previous = k.int(first) > 0
    tile_m, columns_of_tile = conv_wgrad.tile_shape(k.isa)
    row_blocks, column_blocks = ceil_div(rows, MC), ceil_div(columns, NC)

    with k.parallel_for(groups * positions * (row_blocks * column_blocks)) as item:
        column0, rest = item % column_blocks * NC, item // column_blocks
        row0, rest = rest % row_blocks * MC, rest // row_blocks
        position, group = rest % positions, rest // positions
        row1, column1 = k.min(row0 + MC, rows), k.min(column0 + NC, columns)
        plane = group * positions + position

        def micro_kernel(row: Value, column: Value, num_rows: int, num_columns: int) -> None:
            """The elements of products from (row, column) on, num_rows x num_columns: lanes are tiles, added at the end."""
            acc = [[k.var_vec(0.0) for _ in range(num_columns)] for _ in range(num_rows)]
            with k.loop(0, blocks) as block:
                at = block * (groups * positions) + plane
                left, right = dy.at((at * rows + row) * tile_n), x.at((at * columns + column) * tile_n)
                for v in range(0, tile_n, k.lanes):
                    a = [left.load(r * tile_n + v) for r in range(num_rows)]
                    for c in range(num_columns):
                        b_vector = right.load(c * tile_n + v)
                        for r, a_vector in enumerate(a):
                            acc[r][c].value = k.fma(a_vector, b_vector, acc[r][c].value)
            for r, line in enumerate(acc):
                for c, var in enumerate(line):
                    dst = products.at(((position * groups + group) * rows + row + r) * columns + column + c)
                    dst.put(k.select(add_previous, dst.get(), 0.0) + k.sum(var.value))

        # Whole register tiles, then the rows and columns that remain, one by one.
        full_rows, full_columns = row1 - (row1 - row0) % tile_m, column1 - (column1 - column0) % columns_of_tile
        for begin, end, step in ((column0, full_columns, columns_of_tile), (full_columns, column1, 1)):
            with k.loop(begin, end, step) as column:
                with k.loop(row0, full_rows, tile_m) as row:
                    micro_kernel(row, column, tile_m, step)
                with k.loop(full_rows, row1) as row:
                    micro_kernel(row, column, 1, step)


def winograd_wgrad_output(k: KernelBuilder, dw, products, *, size: int, m: int, flip: bool, mode: str) -> None:
    """dw (size, 3, 3) = A^T products A, of products (positions, size). `flip`: filters are read from their end."""
    n, A = m + 2, output_matrix(3, m)
    with k.parallel_range(ceil_div(size, k.lanes), 8) as (begin, end), k.loop(begin, end) as block:
        first = block * k.lanes
        mask = k.mask_first(size - first) if size % k.lanes else None
        square = [[products.load((i * n + j) * size + first, mask) for j in range(n)] for i in range(n)]
        taps = [v for row in winograd_transform.both_ways(k, A, square) for v in row]
        for t, v in enumerate(reversed(taps) if flip else taps):
            for lane in range(k.lanes):
                with k.when(first + lane < size):
                    accumulate_scalar(k, dw, (first + lane) * 9 + t, k.lane(v, lane), mode)


def append_winograd_wgrad(
    c: Lowering, *, m: int, dw: Any, dy: Any, x: Any, geometry: im2col.ConvGeometry, groups: int, mode: str, dims: tuple[str, ...],
    count: int,
) -> None:  # fmt: skip
    """Append the calls of F(3 x 3, m x m): for each K block of tiles both input transforms and the GEMMs, then the output
    transform. `geometry`: of the direct forward convolution."""
    rows, columns, n = int(dy.shape[1]) // groups, geometry.channels, m + 2
    P, Q = geometry.output_size
    outputs = ceil_div(P, m), ceil_div(Q, m)
    offset = min(geometry.row_offsets), min(geometry.column_offsets)
    of_x = im2col.ConvGeometry(
        geometry.input_size, columns, outputs, (m, m), tuple(offset[0] + i for i in range(n)),
        tuple(offset[1] + i for i in range(n)), geometry.reflect,
    )  # fmt: skip
    of_dy = im2col.ConvGeometry((P, Q), rows, outputs, (m, m), tuple(range(m)), tuple(range(m)))
    tile_n = winograd.gemm_tile(c.isa).nr(c.isa)
    blocks = ceil_div(int(x.shape[0]) * outputs[0] * outputs[1], tile_n)
    limit = min(blocks, KC)
    transformed = {
        name: (part(c.workspace(name, 4 * limit * groups * n * n * channels * tile_n)), "fp32")
        for name, channels in (("dy tiles", rows), ("x tiles", columns))
    }
    products = part(c.workspace("products", 4 * n * n * groups * rows * columns)), "fp32"
    images: dict[str, Any] = {"dims": dims, "count": count, "groups": groups, "tile_n": tile_n}
    for first in range(0, blocks, limit):
        where = {"first": first, "limit": limit}
        winograd.append_input_transform(
            c, transformed["dy tiles"], dy, geometry=of_dy, matrix=filter_matrix(3, m), **images, **where
        )
        winograd.append_input_transform(c, transformed["x tiles"], x, geometry=of_x, matrix=input_matrix(n), **images, **where)
        sizes = {"rows": rows, "columns": columns, "positions": n * n, "outputs": outputs, **images}
        operands = {"products": products, "dy": transformed["dy tiles"], "x": transformed["x tiles"], **where}
        c.call(winograd_wgrad_gemm, operands, sizes, writes="products")
    sizes = {"size": groups * rows * columns, "m": m, "flip": geometry.flipped, "mode": mode}
    c.call(winograd_wgrad_output, {"dw": dw, "products": products}, sizes, writes="dw")
