"""Convolutions with 3 x 3 filters by Winograd's F(2x2, 3x3) and F(4x4, 3x3): 2.25 and 4 times fewer products (program/winograd.py).

The output is cut into tiles of m x m, each of which sees n x n pixels, n = m + 2. Three steps, each over n^2 *positions*:

    U[position, k, c]      of every filter                                    `winograd_filters`, once
    V[position, c, tile]   of every tile that a channel sees                  `winograd_input`, for some tiles at a time
    M = U V and then y     one product for each position, and the outputs     `winograd_product`, for the same tiles

Lanes are tiles (of filters: channels), so that a transform is arithmetic between whole vectors. Tiles go in blocks as wide as a
register tile; a claim multiplies a group of blocks with some of the filters, whose M stays in the second cache until y is made of
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import lcm
from typing import Any

from barellm.cpu.gemm_config import Tile, tiles
from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder, Lowering
from barellm.cpu.kernels.conv_lines import Grid, strided
from barellm.cpu.kernels.conv_panel import Panel, panel_nbytes, panel_pitch
from barellm.cpu.kernels.loops import put_added
from barellm.cpu.kernels.winograd_transform import both_ways
from barellm.cpu.lang import Pointer, Value
from barellm.cpu.lang.vector import transpose_groups
from barellm.program.integers import ceil_div, round_up
from barellm.program.winograd import Matrix, filter_matrix, input_matrix, output_matrix
from barellm.runtime.lowering import part

DEPTH = 128  # of a product at a time, whose sums are added: with a block of tiles it takes a quarter of the first cache
GROUP_BYTES = 6 << 20  # of V that the claims of a group share in the third cache
V_BYTES = 24 << 20  # of V that are made at a time
M_BYTES = 1 << 18  # of M that a claim has in the second cache
CHUNK = 8  # channels that a claim of the input's transform does
RUN = 512  # tiles of a claim of it, at most


@dataclass(frozen=True)
class Form:
    """A convolution by F(m x m, 3 x 3). `grid` says which pixels each tile sees; of its `outputs`, tiles, the last may reach beyond
    the `size` of the result. `group` blocks of tiles share what a claim reads, `filters` is what it has of the result's
    channels."""

    m: int
    grid: Grid
    size: tuple[int, int]
    groups: int
    rows: int
    tile: Tile
    group: int
    filters: int

    @property
    def n(self) -> int:
        return self.m + 2

    @property
    def positions(self) -> int:
        return self.n * self.n

    @property
    def channels(self) -> int:
        return self.grid.channels

    def tiles(self, images: int) -> int:
        return images * self.grid.outputs[0] * self.grid.outputs[1]


def form_of(isa: ISA, m: int, x: Grid, offset: tuple[int, int], size: tuple[int, int], groups: int, rows: int) -> Form:
    """`x`: what the direct convolution sees; `offset`: of the first pixel under the filter."""
    n = m + 2
    grid = Grid(
        x.size, x.channels, (ceil_div(size[0], m), ceil_div(size[1], m)), (m, m),
        tuple(offset[0] + i for i in range(n)), tuple(offset[1] + i for i in range(n)), x.reflect,
    )  # fmt: skip
    tile = tile_of_products(isa)
    span = tile.nr(isa)
    group = max(1, min(8, GROUP_BYTES // (4 * n * n * x.channels * span)))
    filters = max(1, M_BYTES // (4 * n * n * group * span) // tile.mr) * tile.mr
    filters = round_up(ceil_div(rows, ceil_div(rows, filters)), tile.mr)
    return Form(m, grid, size, groups, rows, tile, group, filters)


def tile_of_products(isa: ISA) -> Tile:
    """The register tile of the products over positions, two vectors wide: so many tiles of an image make a block."""
    return next(t for t in tiles(isa, "fp32") if t.vectors == 2)


def winograd_filters(
    k: KernelBuilder, u, w, *, count: int, rows: int, depth: int, step: int, row_step: int, flip: bool, m: int
) -> None:
    """u (positions, count rows, depth) = G w G^T, lanes along the depth; `count` groups. Filter (group, row, depth) begins at
    element group rows depth 9 + row row_step + depth step of w; `flip`: it is read from its end."""
    G, n = filter_matrix(m, 3), m + 2
    taps = range(8, -1, -1) if flip else range(9)
    size = count * rows * depth
    blocks = ceil_div(depth, k.lanes)
    with k.parallel_range(count * rows * blocks, 16) as (begin, end), k.loop(begin, end) as unit:
        line, first = unit // blocks, unit % blocks * k.lanes
        first = k.min(first, max(depth - k.lanes, 0))  # the last vector does some again
        of = w.at(line // rows * (rows * depth * 9) + line % rows * row_step + first * step)
        if depth >= k.lanes:
            taken = [strided(k, of.at(t), step) for t in taps]
        else:
            taken = [k.to(0.0, k.vec) for _ in taps]
            for i in range(depth):
                taken = [
                    k.op(k.vec, f"insertelement {v.typed}, {of.at(t).get(i * step).typed}, i64 {i}")
                    for t, v in zip(taps, taken, strict=True)
                ]
        made = both_ways(k, G, [taken[i : i + 3] for i in range(0, 9, 3)])
        to = u.at(line * depth + first)
        mask = None if depth >= k.lanes else k.mask_first(depth)
        for position, v in enumerate(made[i][j] for i in range(n) for j in range(n)):
            to.store(v, position * size, mask)


def winograd_input(
    k: KernelBuilder, v, x, first, limit, *, dims, count: int, groups: int, grid: Grid, matrix: tuple[tuple[float, ...], ...],
    span: int,
) -> None:  # fmt: skip
    """v (blocks, groups, positions, channels, span) = matrix d matrix^T, of the blocks of tiles [first, first + limit): zero where
    there is no tile. A claim has as many blocks as are whole rows of tiles, of some channels."""
    n, seen, C = len(matrix), len(grid.rows), grid.channels
    of = {"dims": dims, "count": count, "groups": groups, "grid": grid, "span": span, "most": RUN}
    with each_channel(k, x, first, limit, **of) as r:
        r.panel.pack(r.channel, r.channel + 1, pixels=r.rows * grid.outputs[1], zeros=span // k.lanes)
        with k.loop(0, r.many) as block:
            to = v.at((((r.begin + block) * groups + r.group) * (n * n) * C + r.channel) * span)
            at = r.panel.at.at(r.skip + block * span)
            for lanes in range(0, span, k.lanes):
                d = [[at.at((i * seen + j) * r.panel.pitch).load(lanes) for j in range(seen)] for i in range(seen)]
                for position, value in enumerate(x for row in both_ways(k, matrix, d) for x in row):
                    to.store(value, position * (C * span) + lanes)


@dataclass(frozen=True)
class Run:
    """The blocks of tiles [begin, begin + many) of a group, counted from the first, and one of their channels. They lie in `rows`
    rows of tiles, of which the first has `skip` tiles of the block before; `panel` is about those rows."""

    panel: Panel
    group: Value
    begin: Value
    many: Value
    rows: Value
    skip: Value
    channel: Value


@contextmanager
def each_channel(
    k: KernelBuilder,
    x: Pointer,
    first: Any,
    limit: Any,
    *,
    dims,
    count: int,
    groups: int,
    grid: Grid,
    span: int,
    most: int,
) -> Iterator[Run]:
    """The body of a transform of the blocks of tiles [first, first + limit) of x, for each run of blocks and each channel. A claim
    has as many blocks as are whole rows of tiles, at most about `most` tiles, of some channels."""
    TW = grid.outputs[1]
    run, lines, pitch = run_of(grid, span, k.lanes, most)
    panel = Panel(k, grid, x, k.thread_scratch(), lines, TW, pitch, groups)
    total = k.num_elements(dims, count) * (grid.outputs[0] * TW)
    blocks = k.max(k.min(k.ceil_div(total, span) - first, limit), 0)
    chunks = ceil_div(grid.channels, CHUNK)
    with k.parallel_for(k.ceil_div(blocks, run) * (groups * chunks)) as unit:
        chunk, rest = unit % chunks, unit // chunks
        group, begin = rest % groups, rest // groups * run
        many = k.min(blocks - begin, run)
        tile = (first + begin) * span
        line = tile // TW
        rows = k.ceil_div(k.min(tile + many * span, total), TW) - line
        panel.move(group, line, rows, 0)
        skip = tile - line * TW  # tiles of the first line that belong to the block before
        with k.loop(chunk * CHUNK, k.min((chunk + 1) * CHUNK, grid.channels)) as channel:
            yield Run(panel, group, begin, many, rows, skip, channel)


def run_of(grid: Grid, span: int, lanes: int, most: int = RUN) -> tuple[int, int, int]:
    """(blocks of a claim of a transform, rows of tiles that it may touch, elements from a position of its panel to the next)."""
    TW = grid.outputs[1]
    run = max(1, min(lcm(span, TW), most) // span)
    lines = ceil_div(run * span - 1, TW) + 1
    return run, lines, panel_pitch(lines * TW + span, lanes)


def append_transform(
    c: Lowering,
    v: Any,
    x: Any,
    *,
    grid: Grid,
    groups: int,
    matrix: Matrix,
    span: int,
    first: int,
    limit: int,
    dims,
    count: int,
) -> None:
    """What the tiles of x that `grid` sees are transformed to."""
    _, lines, pitch = run_of(grid, span, c.isa.lanes)
    c.thread_scratch(panel_nbytes(c.isa, grid, lines, grid.outputs[1], pitch, 1))
    sizes = {
        "grid": grid,
        "groups": groups,
        "matrix": tuple(map(tuple, matrix)),
        "span": span,
        "dims": dims,
        "count": count,
    }
    c.call(winograd_input, {"v": v, "x": x, "first": first, "limit": limit}, sizes, writes="v")


def winograd_product(k: KernelBuilder, y, u, v, first, limit, *, dims, count: int, form: Form, mode: str) -> None:
    """y (N, groups rows, H, W), of the tiles in blocks [first, first + limit), from u and v."""
    n, A, width = form.n, output_matrix(form.m, 3), form.group * form.tile.nr(k.isa)
    products = k.thread_scratch()
    squares = products.bytes(4 * n * n * form.filters * width)

    def finish(of: Pointer, tile: Value, there: Value, channel: Value) -> None:
        square = [[of.load((i * n + j) * (form.filters * width)) for j in range(n)] for i in range(n)]
        write_squares(k, y, squares, both_ways(k, A, square), tile, there, channel, form, mode)

    multiply_positions(k, u, v, first, limit, products, finish, dims=dims, count=count, form=form, positions=n * n)


def multiply_positions(
    k: KernelBuilder, u: Pointer, v: Pointer, first: Value, limit: Value, products: Pointer, finish: Callable[..., None], *,
    dims, count: int, form: Form, positions: int,
) -> None:  # fmt: skip
    """One product for each position, for the blocks of tiles [first, first + limit). A claim's `products` (positions, filters,
    tiles) are in its scratch; finish(where, tile, there, channel) makes outputs of those of one channel and a vector of tiles, of
    which `there` exist."""
    span, (TH, TW), C = form.tile.nr(k.isa), form.grid.outputs, form.channels
    total = k.num_elements(dims, count) * (TH * TW)
    blocks = k.max(k.min(k.ceil_div(total, span) - first, limit), 0)
    batches, parts_of_rows = k.ceil_div(blocks, form.group), ceil_div(form.rows, form.filters)
    width, size = form.group * span, form.groups * form.rows * C
    with k.parallel_for(batches * (form.groups * parts_of_rows)) as unit:
        row_part, rest = unit % parts_of_rows, unit // parts_of_rows
        group, begin = rest % form.groups, rest // form.groups * form.group
        many = k.min(blocks - begin, form.group)
        row0 = row_part * form.filters
        row1 = k.min(row0 + form.filters, form.rows)
        with k.loop(0, positions) as position, k.loop(0, C, DEPTH) as c, k.loop(0, many) as block:
            deep = k.min(C - c, DEPTH)
            right = v.at((((begin + block) * form.groups + group) * positions + position) * (C * span) + c * span)

            def multiply(row: Value, tile: Tile, c=c, deep=deep, right=right, position=position, block=block) -> None:
                left = u.at(position * size + (group * form.rows + row) * C + c)
                to = products.at(((position * form.filters) + (row - row0)) * width + block * span)
                product_tile(k, tile, left, C, right, span, deep, to, width, again=c > 0 if C > DEPTH else None)

            rest = form.rows % form.tile.mr
            whole = k.min(row1, form.rows - rest)
            with k.loop(row0, whole, form.tile.mr) as row:
                multiply(row, form.tile)
            if rest:
                with k.when(row1 > form.rows - rest):
                    multiply(k.int(form.rows - rest), Tile(rest, form.tile.vectors))
        with k.loop(0, many * span, k.lanes) as t:
            tile = (first + begin) * span + t
            there = k.max(k.min(total - tile, k.lanes), 0)
            with k.loop(row0, row1) as row:
                finish(products.at((row - row0) * width + t), tile, there, group * form.rows + row)


def product_tile(
    k: KernelBuilder, tile: Tile, left: Pointer, stride: int, right: Pointer, pitch: int, deep: Value, to: Pointer, width: int,
    *, again: Value | None,
) -> None:  # fmt: skip
    """A tile of `to`, whose rows lie `width` elements apart, = left (rows, deep) right (deep, vectors); added where `again`."""
    acc = [[k.var_vec(0.0) for _ in range(tile.vectors)] for _ in range(tile.mr)]
    lines = [left.at(r * stride) for r in range(tile.mr)]
    with k.loop(0, deep) as d:
        vectors = [right.at(d * pitch).load(j * k.lanes) for j in range(tile.vectors)]
        for p, line in zip(lines, acc, strict=True):
            factor = k.splat(p.get(d))
            for var, vector in zip(line, vectors, strict=True):
                var.value = k.fma(factor, vector, var.value)
    for r, line in enumerate(acc):
        for j, var in enumerate(line):
            before = 0.0 if again is None else k.select(again, to.load(r * width + j * k.lanes), 0.0)
            to.store(var.value + before, r * width + j * k.lanes)


def write_squares(
    k: KernelBuilder, y: Pointer, squares: Pointer, made: list[list[Value]], tile: Value, there: Value, channel: Value, form: Form,
    mode: str,
) -> None:  # fmt: skip
    """m x m outputs of a lane's tile each, [i][j], to the images; `there`: so many lanes are tiles."""
    m, (H, W), (TH, TW), lanes = form.m, form.size, form.grid.outputs, k.lanes
    rows_apart = m * 4  # a square of m rows of 4, of which m count
    zero = k.to(0.0, k.vec)
    for i, row in enumerate(made):
        columns = transpose_groups(k, [*row, *[zero] * (4 - m)])
        for j, four in enumerate(columns):  # tiles j, j + 4, ...
            for g in range(lanes // 4):
                quad = k.shuffle(four, None, list(range(4 * g, 4 * g + 4)))
                at = squares.at((4 * g + j) * rows_apart + i * 4)
                k.line(f"store {quad.typed}, ptr {at.ref}, align 16")
    with k.loop(0, there) as lane:
        t = tile + lane
        image, ty, tx = t // (TH * TW), t % (TH * TW) // TW * m, t % TW * m
        of = squares.at(lane * rows_apart)
        to = y.at(((image * (form.groups * form.rows) + channel) * H + ty) * W + tx)
        whole = (ty + m <= H) & (tx + m <= W)
        plain = y.dtype == "fp32" and mode == "store"
        if plain:
            with k.when(whole):
                for i in range(m):
                    four = k.op(f"<{m} x float>", f"load <{m} x float>, ptr {of.at(i * 4).ref}, align 4")
                    k.line(f"store {four.typed}, ptr {to.at(i * W).ref}, align 4")
        with k.otherwise(whole) if plain else k.when(k.const(1, "i1")):
            _write_part(k, of, to, k.min(H - ty, m), k.min(W - tx, m), W, mode)


def _write_part(k: KernelBuilder, of: Pointer, to: Pointer, rows: Value, columns: Value, W: int, mode: str) -> None:
    """The pixels of a square that are in the image, one by one."""
    with k.loop(0, rows) as i, k.loop(0, columns) as j:
        put_added(k, to, i * W + j, of.get(i * 4 + j), mode)


def write_pixels(
    k: KernelBuilder,
    y: Pointer,
    line: Pointer,
    tile: Value,
    there: Value,
    channel: Value,
    form: Form,
    i: Value,
    mode: str,
) -> None:
    """Row i of each lane's tile, (m, lanes), to the images."""
    m, (H, W), (TH, TW) = form.m, form.size, form.grid.outputs
    with k.loop(0, there) as lane:
        t = tile + lane
        image, ty, tx = t // (TH * TW), t % (TH * TW) // TW * m + i, t % TW * m
        to = y.at(((image * (form.groups * form.rows) + channel) * H + ty) * W + tx)
        with k.loop(0, k.select(ty < H, k.min(W - tx, m), 0)) as j:
            put_added(k, to, j, line.get(j * k.lanes + lane), mode)


def append_winograd(
    c: Lowering, *, m: int, out: Any, w: Any, x: Any, grid: Grid, size: tuple[int, int], groups: int, rows: int, turned: bool,
    flip: bool, offset: tuple[int, int], mode: str, dims: tuple[str, ...], count: int,
) -> None:  # fmt: skip
    """`turned`: filters (groups depth, rows, 3, 3) instead of (groups rows, depth, 3, 3), as the input's gradient reads them."""
    form = form_of(c.isa, m, grid, offset, size, groups, rows)
    span, C = form.tile.nr(c.isa), form.channels
    u = part(c.workspace("filters", 4 * form.positions * groups * rows * C + 64)), "fp32"
    steps = {"step": 9 * rows, "row_step": 9} if turned else {"step": 9, "row_step": 9 * C}
    c.call(
        winograd_filters,
        {"u": u, "w": w},
        {"count": groups, "rows": rows, "depth": C, "flip": flip, "m": m, **steps},
        writes="u",
    )
    blocks = ceil_div(form.tiles(int(x.shape[0])), span)
    block_bytes = 4 * groups * form.positions * C * span
    limit = round_up(max(1, min(blocks, V_BYTES // block_bytes)), form.group)
    v = part(c.workspace("tiles", limit * block_bytes)), "fp32"
    width = form.group * span
    c.thread_scratch(4 * form.positions * form.filters * width + 4 * 16 * c.isa.lanes)
    images = {"dims": dims, "count": count, "form": form}
    for first in range(0, blocks, limit):
        where = {"first": first, "limit": limit}
        append_transform(
            c,
            v,
            x,
            grid=form.grid,
            groups=groups,
            matrix=input_matrix(form.n),
            span=span,
            dims=dims,
            count=count,
            **where,
        )
        c.call(winograd_product, {"y": out, "u": u, "v": v, **where}, {**images, "mode": mode}, writes="y")
