"""Convolutions with 3 x 3 filters by Winograd's F(2x2, 3x3) and F(4x4, 3x3): 2.25 and 4 times fewer multiplications
(program/winograd.py).

The output is cut into tiles of m x m, each of which sees n x n pixels, n = m + 2. Three steps, each over n^2 *positions*:

    U[position, k, c]      filter transform                             `winograd_filters`, once
    V[position, c, tile]   input transform                              `winograd_input`, for some tiles at a time
    M = U V, then y        batched GEMM (a GEMM for each position)      `winograd_gemm`, for the same tiles; the output transform
                                                                        is its epilogue

Lanes are tiles (of filters: channels), so that a transform is arithmetic between whole vectors. Tiles go in blocks as wide as a
register tile; a work item multiplies a group of blocks with some of the filters, and their M stays in L2 until the output
transform."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import lcm
from typing import Any

from barellm.cpu.gemm_config import Tile, tiles
from barellm.cpu.kernel import ISA, KernelBuilder, Lowering, Pointer, Value, part
from barellm.cpu.kernels.conv.im2col import ConvGeometry, Im2colPanel, load_strided, panel_nbytes, panel_pitch
from barellm.cpu.kernels.conv.winograd_transform import both_ways
from barellm.cpu.kernels.loops import accumulate_scalar
from barellm.cpu.lang.vector import transpose_groups
from barellm.program.integers import ceil_div, round_up
from barellm.program.winograd import Matrix, filter_matrix, input_matrix, output_matrix

KC = 128  # channels of a K block: with a block of tiles it takes a quarter of L1
GROUP_BYTES = 6 << 20  # of V that the work items of a group share in L3
V_BYTES = 24 << 20  # of V that are transformed at a time
M_BYTES = 1 << 18  # of M that a work item has in L2
CHUNK = 8  # channels of a work item of the input transform
RUN = 512  # tiles of a work item of it, at most


@dataclass(frozen=True)
class WinogradConv:
    """A convolution by F(m x m, 3 x 3). `geometry` says which pixels each tile sees; of the tiles, its outputs, the last may reach
    beyond the `size` of the result. A work item has `group` blocks of tiles and `filters` output channels."""

    m: int
    geometry: ConvGeometry
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
        return self.geometry.channels

    def tiles(self, images: int) -> int:
        return images * self.geometry.output_size[0] * self.geometry.output_size[1]


def winograd_conv(
    isa: ISA, m: int, x: ConvGeometry, offset: tuple[int, int], size: tuple[int, int], groups: int, rows: int
) -> WinogradConv:
    """The tiling of F(m x m, 3 x 3) for a result of `size` pixels and `rows` output channels of a group. `x`: the geometry of the
    direct convolution; `offset`: of the filter's first tap, in rows and columns."""
    n = m + 2
    geometry = ConvGeometry(
        x.input_size, x.channels, (ceil_div(size[0], m), ceil_div(size[1], m)), (m, m),
        tuple(offset[0] + i for i in range(n)), tuple(offset[1] + i for i in range(n)), x.reflect,
    )  # fmt: skip
    tile = gemm_tile(isa)
    tile_n = tile.nr(isa)
    group = max(1, min(8, GROUP_BYTES // (4 * n * n * x.channels * tile_n)))
    filters = max(1, M_BYTES // (4 * n * n * group * tile_n) // tile.mr) * tile.mr
    filters = round_up(ceil_div(rows, ceil_div(rows, filters)), tile.mr)
    return WinogradConv(m, geometry, size, groups, rows, tile, group, filters)


def gemm_tile(isa: ISA) -> Tile:
    """The register tile of the batched GEMM, two vectors wide: its tile_n is the number of image tiles in a block."""
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
    with k.parallel_range(count * rows * blocks, 16) as (begin, end), k.loop(begin, end) as item:
        line, first = item // blocks, item % blocks * k.lanes
        first = k.min(first, max(depth - k.lanes, 0))  # the last vector overlaps the one before
        src = w.at(line // rows * (rows * depth * 9) + line % rows * row_step + first * step)
        if depth >= k.lanes:
            vectors = [load_strided(k, src.at(t), step) for t in taps]
        else:
            vectors = [k.to(0.0, k.vec) for _ in taps]
            for i in range(depth):
                vectors = [
                    k.op(k.vec, f"insertelement {v.typed}, {src.at(t).get(i * step).typed}, i64 {i}")
                    for t, v in zip(taps, vectors, strict=True)
                ]
        transformed = both_ways(k, G, [vectors[i : i + 3] for i in range(0, 9, 3)])
        dst = u.at(line * depth + first)
        mask = None if depth >= k.lanes else k.mask_first(depth)
        for position, v in enumerate(transformed[i][j] for i in range(n) for j in range(n)):
            dst.store(v, position * size, mask)


def winograd_input(
    k: KernelBuilder, v, x, first, limit, *, dims, count: int, groups: int, geometry: ConvGeometry,
    matrix: tuple[tuple[float, ...], ...], tile_n: int,
) -> None:  # fmt: skip
    """v (blocks, groups, positions, channels, tile_n) = matrix d matrix^T, where d are the pixels of x that a tile sees
    (`geometry`), of the blocks of tiles [first, first + limit); zero for tiles that do not exist. There are `count` images for each
    of the run-time sizes `dims`."""
    n, window, C = len(matrix), len(geometry.row_offsets), geometry.channels
    sizes = {"dims": dims, "count": count, "groups": groups, "geometry": geometry, "tile_n": tile_n, "most": RUN}
    with for_each_channel(k, x, first, limit, **sizes) as r:
        r.panel.pack(r.channel, r.channel + 1, pixels=r.rows * geometry.output_size[1], zero_vectors=tile_n // k.lanes)
        with k.loop(0, r.num_blocks) as block:
            dst = v.at((((r.begin + block) * groups + r.group) * (n * n) * C + r.channel) * tile_n)
            at = r.panel.at.at(r.skip + block * tile_n)
            for lanes in range(0, tile_n, k.lanes):
                d = [[at.at((i * window + j) * r.panel.pitch).load(lanes) for j in range(window)] for i in range(window)]
                for position, value in enumerate(x for row in both_ways(k, matrix, d) for x in row):
                    dst.store(value, position * (C * tile_n) + lanes)


@dataclass(frozen=True)
class TileRun:
    """The blocks of tiles [begin, begin + num_blocks) of a group, counted from `first` of `for_each_channel`, and one of their
    channels. They lie in `rows` rows of tiles, of which the first has `skip` tiles of the block before; `panel` is about those
    rows."""

    panel: Im2colPanel
    group: Value
    begin: Value
    num_blocks: Value
    rows: Value
    skip: Value
    channel: Value


@contextmanager
def for_each_channel(
    k: KernelBuilder, x: Pointer, first: Any, limit: Any, *, dims, count: int, groups: int, geometry: ConvGeometry,
    tile_n: int, most: int,
) -> Iterator[TileRun]:  # fmt: skip
    """The parallel loop of an input transform over the blocks of tiles [first, first + limit) of x: its body is emitted once, for a
    run of blocks and one channel. A work item is CHUNK channels of as many blocks as are complete rows of tiles, at most about
    `most` tiles."""
    TW = geometry.output_size[1]
    run, lines, pitch = run_shape(geometry, tile_n, k.lanes, most)
    panel = Im2colPanel(k, geometry, x, k.thread_scratch(), lines, TW, pitch, groups)
    total = k.num_elements(dims, count) * (geometry.output_size[0] * TW)
    blocks = k.max(k.min(k.ceil_div(total, tile_n) - first, limit), 0)
    chunks = ceil_div(geometry.channels, CHUNK)
    with k.parallel_for(k.ceil_div(blocks, run) * (groups * chunks)) as item:
        chunk, rest = item % chunks, item // chunks
        group, begin = rest % groups, rest // groups * run
        num_blocks = k.min(blocks - begin, run)
        tile = (first + begin) * tile_n
        line = tile // TW
        rows = k.ceil_div(k.min(tile + num_blocks * tile_n, total), TW) - line
        panel.seek(group, line, rows, 0)
        skip = tile - line * TW  # tiles of the first line that belong to the block before
        with k.loop(chunk * CHUNK, k.min((chunk + 1) * CHUNK, geometry.channels)) as channel:
            yield TileRun(panel, group, begin, num_blocks, rows, skip, channel)


def run_shape(geometry: ConvGeometry, tile_n: int, lanes: int, most: int = RUN) -> tuple[int, int, int]:
    """(blocks of a work item of a transform, rows of tiles that it may touch, elements from a position of its panel to the
    next)."""
    TW = geometry.output_size[1]
    run = max(1, min(lcm(tile_n, TW), most) // tile_n)
    lines = ceil_div(run * tile_n - 1, TW) + 1
    return run, lines, panel_pitch(lines * TW + tile_n, lanes)


def append_input_transform(
    c: Lowering, v: Any, x: Any, *, geometry: ConvGeometry, groups: int, matrix: Matrix, tile_n: int, first: int,
    limit: int, dims, count: int,
) -> None:  # fmt: skip
    """Append the call of `winograd_input`: v = the transform of the tiles of x that `geometry` sees, blocks [first, first +
    limit)."""
    _, lines, pitch = run_shape(geometry, tile_n, c.isa.lanes)
    c.thread_scratch(panel_nbytes(c.isa, geometry, lines, geometry.output_size[1], pitch, 1))
    sizes = {
        "geometry": geometry, "groups": groups, "matrix": tuple(map(tuple, matrix)), "tile_n": tile_n, "dims": dims,
        "count": count,
    }  # fmt: skip
    c.call(winograd_input, {"v": v, "x": x, "first": first, "limit": limit}, sizes, writes="v")


def winograd_gemm(k: KernelBuilder, y, u, v, first, limit, *, dims, count: int, conv: WinogradConv, mode: str) -> None:
    """y (N, groups rows, H, W) = A^T (u v) A of the tiles in blocks [first, first + limit), with u from `winograd_filters` and v
    from `winograd_input`: the batched GEMM with the output transform as its epilogue."""
    n, A, width = conv.n, output_matrix(conv.m, 3), conv.group * conv.tile.nr(k.isa)
    products = k.thread_scratch()
    squares = products.bytes(4 * n * n * conv.filters * width)

    def output_transform(src: Pointer, tile: Value, num_tiles: Value, channel: Value) -> None:
        square = [[src.load((i * n + j) * (conv.filters * width)) for j in range(n)] for i in range(n)]
        store_tiles(k, y, squares, both_ways(k, A, square), tile, num_tiles, channel, conv, mode)

    batched_gemm(k, u, v, first, limit, products, output_transform, dims=dims, count=count, conv=conv, positions=n * n)


def batched_gemm(
    k: KernelBuilder, u: Pointer, v: Pointer, first: Value, limit: Value, products: Pointer, epilogue: Callable[..., None], *,
    dims, count: int, conv: WinogradConv, positions: int,
) -> None:  # fmt: skip
    """One GEMM for each position, for the blocks of tiles [first, first + limit): products = u (positions, groups rows, C) @ v
    (blocks, groups, positions, C, tile_n). A work item is a group of blocks x `conv.filters` output channels; its `products`
    (positions, filters, tiles) are in scratch. epilogue(products, tile, num_tiles, channel) makes outputs of those of one output
    channel and a vector of tiles from `tile` on, of which `num_tiles` exist."""
    tile_n, (TH, TW), C = conv.tile.nr(k.isa), conv.geometry.output_size, conv.channels
    total = k.num_elements(dims, count) * (TH * TW)
    blocks = k.max(k.min(k.ceil_div(total, tile_n) - first, limit), 0)
    batches, row_blocks = k.ceil_div(blocks, conv.group), ceil_div(conv.rows, conv.filters)
    width, size = conv.group * tile_n, conv.groups * conv.rows * C
    with k.parallel_for(batches * (conv.groups * row_blocks)) as item:
        row_block, rest = item % row_blocks, item // row_blocks
        group, begin = rest % conv.groups, rest // conv.groups * conv.group
        num_blocks = k.min(blocks - begin, conv.group)
        row0 = row_block * conv.filters
        row1 = k.min(row0 + conv.filters, conv.rows)
        with k.loop(0, positions) as position, k.loop(0, C, KC) as c, k.loop(0, num_blocks) as block:
            depth = k.min(C - c, KC)
            right = v.at((((begin + block) * conv.groups + group) * positions + position) * (C * tile_n) + c * tile_n)

            def multiply(row: Value, tile: Tile, c=c, depth=depth, right=right, position=position, block=block) -> None:
                left = u.at(position * size + (group * conv.rows + row) * C + c)
                dst = products.at(((position * conv.filters) + (row - row0)) * width + block * tile_n)
                micro_kernel(k, tile, left, C, right, tile_n, depth, dst, width, add_previous=c > 0 if C > KC else None)

            tail = conv.rows % conv.tile.mr  # rows of the last, partial tile
            full = k.min(row1, conv.rows - tail)
            with k.loop(row0, full, conv.tile.mr) as row:
                multiply(row, conv.tile)
            if tail:
                with k.when(row1 > conv.rows - tail):
                    multiply(k.int(conv.rows - tail), Tile(tail, conv.tile.vectors))
        with k.loop(0, num_blocks * tile_n, k.lanes) as t:
            tile = (first + begin) * tile_n + t
            num_tiles = k.max(k.min(total - tile, k.lanes), 0)
            with k.loop(row0, row1) as row:
                epilogue(products.at((row - row0) * width + t), tile, num_tiles, group * conv.rows + row)


def micro_kernel(
    k: KernelBuilder, tile: Tile, left: Pointer, stride: int, right: Pointer, pitch: int, depth: Value, dst: Pointer, width: int,
    *, add_previous: Value | None,
) -> None:  # fmt: skip
    """dst (tile.mr, tile.vectors * lanes), row stride `width`, = left (tile.mr, depth), row stride `stride`, @ right (depth,
    tile.vectors * lanes), row stride `pitch`; plus the old dst where `add_previous` (i1; None: never). Strides in elements."""
    acc = [[k.var_vec(0.0) for _ in range(tile.vectors)] for _ in range(tile.mr)]
    lines = [left.at(r * stride) for r in range(tile.mr)]
    with k.loop(0, depth) as d:
        vectors = [right.at(d * pitch).load(j * k.lanes) for j in range(tile.vectors)]
        for p, line in zip(lines, acc, strict=True):
            factor = k.splat(p.get(d))
            for var, vector in zip(line, vectors, strict=True):
                var.value = k.fma(factor, vector, var.value)
    for r, line in enumerate(acc):
        for j, var in enumerate(line):
            before = 0.0 if add_previous is None else k.select(add_previous, dst.load(r * width + j * k.lanes), 0.0)
            dst.store(var.value + before, r * width + j * k.lanes)


def store_tiles(
    k: KernelBuilder, y: Pointer, squares: Pointer, outputs: list[list[Value]], tile: Value, num_tiles: Value, channel: Value,
    conv: WinogradConv, mode: str,
) -> None:  # fmt: skip
    """Write the m x m outputs[i][j] of each lane's tile, from number `tile` on, to image plane `channel` of y; the first
    `num_tiles` lanes are tiles. They are transposed through `squares` in scratch, [tile][m][4]; then each tile's rows are stored,
    as vectors of m where it lies in the image whole."""
    m, (H, W), (TH, TW), lanes = conv.m, conv.size, conv.geometry.output_size, k.lanes
    tile_stride = m * 4  # a tile has m rows of 4, of which m are used
    zero = k.to(0.0, k.vec)
    for i, row in enumerate(outputs):
        columns = transpose_groups(k, [*row, *[zero] * (4 - m)])
        for j, four in enumerate(columns):  # tiles j, j + 4, ...
            for g in range(lanes // 4):
                quad = k.shuffle(four, None, list(range(4 * g, 4 * g + 4)))
                at = squares.at((4 * g + j) * tile_stride + i * 4)
                k.line(f"store {quad.typed}, ptr {at.ref}, align 16")
    with k.loop(0, num_tiles) as lane:
        t = tile + lane
        image, ty, tx = t // (TH * TW), t % (TH * TW) // TW * m, t % TW * m
        src = squares.at(lane * tile_stride)
        dst = y.at(((image * (conv.groups * conv.rows) + channel) * H + ty) * W + tx)
        whole = (ty + m <= H) & (tx + m <= W)
        plain = y.dtype == "fp32" and mode == "store"
        if plain:
            with k.when(whole):
                for i in range(m):
                    four = k.op(f"<{m} x float>", f"load <{m} x float>, ptr {src.at(i * 4).ref}, align 4")
                    k.line(f"store {four.typed}, ptr {dst.at(i * W).ref}, align 4")
        with k.otherwise(whole) if plain else k.when(k.const(1, "i1")):
            _store_clipped(k, src, dst, k.min(H - ty, m), k.min(W - tx, m), W, mode)


def _store_clipped(k: KernelBuilder, src: Pointer, dst: Pointer, rows: Value, columns: Value, W: int, mode: str) -> None:
    """The pixels of a tile that are in the image, one by one."""
    with k.loop(0, rows) as i, k.loop(0, columns) as j:
        accumulate_scalar(k, dst, i * W + j, src.get(i * 4 + j), mode)


def store_tile_rows(
    k: KernelBuilder, y: Pointer, line: Pointer, tile: Value, num_tiles: Value, channel: Value, conv: WinogradConv,
    i: Value, mode: str,
) -> None:  # fmt: skip
    """Write row i of each lane's tile of m x m outputs, `line` (m, lanes), to image plane `channel` of y; the first `num_tiles`
    lanes are the tiles from number `tile` on."""
    m, (H, W), (TH, TW) = conv.m, conv.size, conv.geometry.output_size
    with k.loop(0, num_tiles) as lane:
        t = tile + lane
        image, ty, tx = t // (TH * TW), t % (TH * TW) // TW * m + i, t % TW * m
        dst = y.at(((image * (conv.groups * conv.rows) + channel) * H + ty) * W + tx)
        with k.loop(0, k.select(ty < H, k.min(W - tx, m), 0)) as j:
            accumulate_scalar(k, dst, j, line.get(j * k.lanes + lane), mode)


def append_winograd(
    c: Lowering, *, m: int, out: Any, w: Any, x: Any, geometry: ConvGeometry, size: tuple[int, int], groups: int, rows: int,
    transposed: bool, flip: bool, offset: tuple[int, int], mode: str, dims: tuple[str, ...], count: int,
) -> None:  # fmt: skip
    """Append the calls of F(m x m, 3 x 3) of x to `out`, whose images have `size` pixels: the filter transform once, then for as
    many blocks of tiles as V_BYTES hold the input transform and the GEMMs. `geometry`: of the direct convolution; `transposed`:
    filters (groups depth, rows, 3, 3) instead of (groups rows, depth, 3, 3), as dgrad reads them; `flip`: each is read from its
    end."""
    conv = winograd_conv(c.isa, m, geometry, offset, size, groups, rows)
    tile_n, C = conv.tile.nr(c.isa), conv.channels
    u = part(c.workspace("filters", 4 * conv.positions * groups * rows * C + 64)), "fp32"
    steps = {"step": 9 * rows, "row_step": 9} if transposed else {"step": 9, "row_step": 9 * C}
    c.call(
        winograd_filters, {"u": u, "w": w}, {"count": groups, "rows": rows, "depth": C, "flip": flip, "m": m, **steps}, writes="u"
    )
    blocks = ceil_div(conv.tiles(int(x.shape[0])), tile_n)
    block_bytes = 4 * groups * conv.positions * C * tile_n
    limit = round_up(max(1, min(blocks, V_BYTES // block_bytes)), conv.group)
    v = part(c.workspace("tiles", limit * block_bytes)), "fp32"
    width = conv.group * tile_n
    c.thread_scratch(4 * conv.positions * conv.filters * width + 4 * 16 * c.isa.lanes)
    images = {"dims": dims, "count": count, "conv": conv}
    for first in range(0, blocks, limit):
        where = {"first": first, "limit": limit}
        append_input_transform(
            c, v, x, geometry=conv.geometry, groups=groups, matrix=input_matrix(conv.n), tile_n=tile_n, dims=dims,
            count=count, **where,
        )  # fmt: skip
        c.call(winograd_gemm, {"y": out, "u": u, "v": v, **where}, {**images, "mode": mode}, writes="y")
