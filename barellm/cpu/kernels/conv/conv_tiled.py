"""What convolutions over tiles share, Winograd's and FFT's: the loops of their transforms, their GEMMs and their calls.

The output is cut into tiles of m x m, each of which sees n x n pixels. A transform makes numbers at some *positions* of a tile, of
which each is multiplied by itself:

    U[position, k, c]      filter transform, once
    V[position, c, tile]   input transform, for some tiles at a time
    M = U V, then y        batched GEMM (a GEMM for each position), for the same tiles; the output transform is its epilogue

Lanes are tiles (of filters: channels), so that a transform is arithmetic between whole vectors. Tiles go in blocks as wide as a
register tile; a work item multiplies a group of blocks with some of the filters, and their M stays in L2 until the output
transform.

In a filter gradient (wgrad) dy's tiles are the filters. Both operands are transformed with lanes along tiles; for each position
the gradient is then a GEMM whose K dimension is all tiles. Its sums stay in registers until their lanes are added. The K blocks,
tiles that are transformed at a time, are accumulated in order."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import lcm, prod
from typing import Any

from barellm.cpu.gemm_config import Tile, tiles
from barellm.cpu.kernel import ISA, Lowering, Value, part
from barellm.cpu.kernels.conv import conv_wgrad
from barellm.cpu.kernels.conv.im2col import ConvGeometry, Im2colPanel, Images, panel_nbytes, panel_pitch
from barellm.cpu.kernels.gemm.microkernel import broadcast_a, microkernel, row_tiles
from barellm.program.integers import ceil_div, round_up

KC = 128  # channels of a K block: with a block of tiles it takes a quarter of L1
V_BYTES = 24 << 20  # of V that are transformed at a time
CHUNK = 8  # channels of a work item of the input transform
MC, NC = 48, 64  # rows and columns of a work item of wgrad at a position: what it reads of a K block stays in L2


@dataclass(frozen=True)
class TileAlgorithm:
    """A convolution algorithm over tiles of m x m outputs, which see n x n pixels, with GEMMs at so many `positions`. `filters`,
    `inputs`, `gemm` and `wgrad` are its kernels; `own` are the constants of all but the input transform, which has `of_x` or, for
    dy of a wgrad, `of_dy`, and work items of at most `run` tiles. Scratch in vectors: `rows` of each transform, `epilogue` of the
    GEMM's. `most_bytes` of M are in a work item, in groups of at most `group_bytes` of V."""

    m: int
    n: int
    positions: int
    filters: Callable[..., None]
    inputs: Callable[..., None]
    gemm: Callable[..., None]
    wgrad: Callable[..., None]
    own: dict[str, Any]
    of_x: dict[str, Any]
    of_dy: dict[str, Any]
    run: int
    rows: int
    epilogue: int
    most_bytes: int
    group_bytes: int
    wgrad_kc: int  # blocks of tiles of a K block of wgrad, which are the order of summation; 0: as many as V_BYTES hold


@dataclass(frozen=True)
class TiledConv:
    """A convolution over tiles of m x m outputs. `geometry` says which pixels each tile sees; of the tiles, its outputs, the last
    may reach beyond the `size` of the result. A work item has `group` blocks of tiles and `filters` output channels. `filters` is a
    multiple of `tile`'s MR, and `tile`'s NR is the number of tiles in a block."""

    m: int
    geometry: ConvGeometry
    size: tuple[int, int]
    tile: Tile
    group: int
    filters: int


def gemm_tile(isa: ISA) -> Tile:
    """The register tile of the batched GEMM, two vectors wide: its tile_n is the number of image tiles in a block."""
    return next(t for t in tiles(isa, "fp32") if t.vectors == 2)


@dataclass(frozen=True)
class TileRun:
    """One channel of block `begin` + `block` of the tiles of a group, counted from `first` of `for_each_block`. `panel` has the
    pixels of the tiles of the blocks from `begin` on, after `skip` tiles of the block before."""

    panel: Im2colPanel
    group: Value
    begin: Value
    skip: Value
    channel: Value
    block: Value


@contextmanager
def for_each_block(k, x, first, limit, *, images: Images, geometry: ConvGeometry, tile_n: int, most: int) -> Iterator[TileRun]:
    """The parallel loop of an input transform over blocks of `tile_n` tiles, numbers [first, first + limit) of all x's, x (N,
    groups channels, H, W): its body is emitted once, for one block and one channel, whose pixels are packed as an Im2colPanel, at
    the begin of the thread's scratch (`panel_bytes`), which the next channel overwrites. A work item is CHUNK channels of a group,
    of as many blocks as are complete rows of tiles, at most about `most` tiles; its body may write what is its block's and
    channel's only. `geometry`: of the tiles, whose outputs are (TH, TW) tiles of an image. Tiles behind the last of all have zeros
    for pixels."""
    TW, groups = geometry.output_size[1], geometry.groups
    run, lines, pitch = run_shape(geometry, tile_n, k.lanes, most)  # blocks of an item, its rows of tiles, elements of a depth
    panel = Im2colPanel(k, geometry, x, k.thread_scratch(), lines, TW, pitch)
    total = k.num_elements(*images) * (geometry.output_size[0] * TW)  # tiles of all images
    blocks = k.max(k.min(k.ceil_div(total, tile_n) - first, limit), 0)  # of this call that exist
    chunks = ceil_div(geometry.channels, CHUNK)
    with k.parallel_for(k.ceil_div(blocks, run) * (groups * chunks)) as item:
        chunk, rest = item % chunks, item // chunks
        group, begin = rest % groups, rest // groups * run
        num_blocks = k.min(blocks - begin, run)
        tile = (first + begin) * tile_n  # the item's first tile
        line = tile // TW  # and the row of tiles that has it, of all images'
        rows = k.ceil_div(k.min(tile + num_blocks * tile_n, total), TW) - line
        panel.seek(group, line, rows, 0)
        skip = tile - line * TW  # tiles of the first line that belong to the block before
        with k.loop(chunk * CHUNK, k.min((chunk + 1) * CHUNK, geometry.channels)) as channel:
            panel.pack(channel, channel + 1, pixels=rows * TW, zero_vectors=tile_n // k.lanes)
            with k.loop(0, num_blocks) as block:
                yield TileRun(panel, group, begin, skip, channel, block)


def run_shape(geometry: ConvGeometry, tile_n: int, lanes: int, most: int) -> tuple[int, int, int]:
    """(blocks of a work item of a transform, rows of tiles that it may touch, its panel's pitch)."""
    TW = geometry.output_size[1]
    run = max(1, min(lcm(tile_n, TW), most) // tile_n)
    lines = ceil_div(run * tile_n - 1, TW) + 1
    return run, lines, panel_pitch(lines * TW + tile_n, lanes)


def panel_bytes(isa: ISA, geometry: ConvGeometry, tile_n: int, most: int) -> int:
    """Bytes of the panel of a work item of an input transform, which is first in its scratch."""
    _, lines, pitch = run_shape(geometry, tile_n, isa.lanes, most)
    return panel_nbytes(isa, geometry, lines, geometry.output_size[1], pitch, 1)


def batched_gemm(k, u, v, first, limit, products, epilogue: Callable[..., None], *, images: Images, conv: TiledConv,
        positions: int) -> None:  # fmt: skip
    """One GEMM for each position, for the blocks of tiles [first, first + limit): products = u (positions, groups rows, C) @ v
    (blocks, groups, positions, C, tile_n), fp32, which the filter and input transforms wrote. A work item is a group of blocks x
    `conv.filters` output channels; its `products` [position][filter][tile] are in scratch. epilogue(products, tile, num_tiles,
    channel) makes outputs of those of one output channel and a vector of tiles from `tile` on, of which `num_tiles` exist."""
    tile_n, (TH, TW) = conv.tile.nr(k.isa), conv.geometry.output_size
    C, rows, groups = conv.geometry.channels, conv.geometry.rows, conv.geometry.groups
    total = k.num_elements(*images) * (TH * TW)
    blocks = k.max(k.min(k.ceil_div(total, tile_n) - first, limit), 0)
    batches, row_blocks = k.ceil_div(blocks, conv.group), ceil_div(rows, conv.filters)
    width, size = conv.group * tile_n, groups * rows * C  # tiles of a row of `products`, elements of a position of u
    with k.parallel_for(batches * (groups * row_blocks)) as item:
        row_block, rest = item % row_blocks, item // row_blocks
        group, begin = rest % groups, rest // groups * conv.group
        num_blocks = k.min(blocks - begin, conv.group)
        row0 = row_block * conv.filters
        row1 = k.min(row0 + conv.filters, rows)
        with k.loop(0, positions) as position, k.loop(0, C, KC) as c, k.loop(0, num_blocks) as block:
            depth = k.min(C - c, KC)  # of this K block: products wait in scratch from one to the next
            right = v.at((((begin + block) * groups + group) * positions + position) * (C * tile_n) + c * tile_n)
            full = k.min(row1, rows - rows % conv.tile.mr)  # end of the full register tiles
            for row, tile in row_tiles(k, row0, full, row1, rows, conv.tile):
                left = u.at(position * size + (group * rows + row) * C + c)
                dst = products.at(((position * conv.filters) + (row - row0)) * width + block * tile_n)
                load_a, _ = broadcast_a(k, left, list(range(tile.mr)), False, depth=C, stride=C)
                for r, sums in enumerate(microkernel(k, tile, load_a, right, depth, False)):
                    for lane, value in zip(range(0, tile_n, k.lanes), sums, strict=True):
                        at = r * width + lane
                        previous = k.select(c > 0, dst.load(at), 0.0) if C > KC else 0.0  # the K blocks' before
                        dst.store(value + previous, at)

        # The epilogue: the outputs of each channel, a vector of tiles at a time.
        with k.loop(0, num_blocks * tile_n, k.lanes) as t:
            tile = (first + begin) * tile_n + t
            num_tiles = k.max(k.min(total - tile, k.lanes), 0)
            with k.loop(row0, row1) as row:
                epilogue(products.at((row - row0) * width + t), tile, num_tiles, group * rows + row)


def tiled_wgrad_gemm(k, products, dy, x, first, limit, *, images: Images, geometry: ConvGeometry, positions: int,
        tile_n: int) -> None:  # fmt: skip
    """The kernel: products (positions, groups rows, columns) fp32 = dy (blocks, groups, positions, rows, tile_n) @ x (blocks,
    groups, positions, columns, tile_n)^T, both written by input transforms, summed over blocks and tile_n; plus the old products
    but for the first K block of blocks [first, first + limit). `columns`: a group's input channels."""
    groups, rows, columns = geometry.groups, geometry.rows, geometry.channels
    total = k.num_elements(*images) * (geometry.output_size[0] * geometry.output_size[1])
    blocks = k.max(k.min(k.ceil_div(total, tile_n) - first, limit), 0)
    add_previous = k.int(first) > 0  # calls before this one began the sums
    row_blocks, column_blocks = ceil_div(rows, MC), ceil_div(columns, NC)

    with k.parallel_for(groups * positions * (row_blocks * column_blocks)) as item:
        column0, rest = item % column_blocks * NC, item // column_blocks
        row0, rest = rest % row_blocks * MC, rest // row_blocks
        position, group = rest % positions, rest // positions
        row1, column1 = k.min(row0 + MC, rows), k.min(column0 + NC, columns)
        plane = group * positions + position  # which of a block's GEMMs
        for row, column, num_rows, num_columns in conv_wgrad.register_tiles(k, (row0, row1), (column0, column1)):
            # Lanes are tiles, added at the end.
            acc = [[k.var_vec(0.0) for _ in range(num_columns)] for _ in range(num_rows)]
            with k.loop(0, blocks) as block:
                at = block * (groups * positions) + plane
                left, right = dy.at((at * rows + row) * tile_n), x.at((at * columns + column) * tile_n)
                for v in range(0, tile_n, k.lanes):
                    a = [left.load(r * tile_n + v) for r in range(num_rows)]
                    conv_wgrad.multiply_lanes(k, acc, a, (right.load(c * tile_n + v) for c in range(num_columns)))
            for r, line in enumerate(acc):
                for c, var in enumerate(line):
                    dst = products.at(((position * groups + group) * rows + row + r) * columns + column + c)
                    dst.put(k.select(add_previous, dst.get(), 0.0) + k.sum(var.value))


def append_input_transform(c: Lowering, how: TileAlgorithm, v, x, constants: dict[str, Any], geometry: ConvGeometry,
        where: dict[str, int], **sizes) -> None:  # fmt: skip
    """Append the call of an input transform, v = that of the tiles of x that `geometry` sees, for the blocks of tiles `where`:
    {first, limit}. `x`: images, or dy for a wgrad; `constants`: `how.of_x` or `how.of_dy`; `sizes`: images, tile_n."""
    c.thread_scratch(panel_bytes(c.isa, geometry, sizes["tile_n"], how.run) + 4 * how.rows * c.isa.lanes)
    c.call(how.inputs, {"v": v, "x": x, **where}, {"geometry": geometry, **constants, **sizes}, writes="v")


def append_tiled(c: Lowering, how: TileAlgorithm, *, out, w, x, geometry: ConvGeometry, transposed: bool, mode: str,
        images: Images) -> None:  # fmt: skip
    """Append the calls of a convolution of x to `out`: the filter transform once, then for as many blocks of tiles as V_BYTES hold
    the input transform and the GEMMs. `geometry`: of the direct convolution; `transposed`: filters (groups depth, rows, R, S)
    instead of (groups rows, depth, R, S), as dgrad reads them. `mode`: of `out`, as in loops.py. Workspaces hold U of all filters,
    and V of `limit` blocks of tiles."""
    C, groups, rows, taps, tile = geometry.channels, geometry.groups, geometry.rows, geometry.taps, gemm_tile(c.isa)
    tile_n = tile.nr(c.isa)
    group = max(1, min(8, how.group_bytes // (4 * how.positions * C * tile_n)))  # blocks of a work item
    filters = max(1, how.most_bytes // (4 * how.positions * group * tile_n) // tile.mr) * tile.mr
    filters = round_up(ceil_div(rows, ceil_div(rows, filters)), tile.mr)
    conv = TiledConv(how.m, geometry.tiled(how.m, how.n), geometry.output_size, tile, group, filters)
    u = part(c.workspace("filters", 4 * how.positions * groups * rows * C + 64)), "fp32"
    steps = {"step": taps * rows, "row_step": taps} if transposed else {"step": taps, "row_step": taps * C}
    constants = {"count": groups, "rows": rows, "depth": C, "flip": geometry.flipped, **steps, **how.own}
    c.call(how.filters, {"u": u, "w": w}, constants, writes="u")
    blocks = ceil_div(int(x.shape[0]) * prod(conv.geometry.output_size), tile_n)
    block_bytes = 4 * groups * how.positions * C * tile_n  # of V for a block of tiles
    limit = round_up(max(1, min(blocks, V_BYTES // block_bytes)), group)
    v = part(c.workspace("tiles", limit * block_bytes)), "fp32"
    c.thread_scratch(4 * how.positions * filters * group * tile_n + 4 * how.epilogue * c.isa.lanes)
    for first in range(0, blocks, limit):
        where = {"first": first, "limit": limit}
        append_input_transform(c, how, v, x, how.of_x, conv.geometry, where, images=images, tile_n=tile_n)
        c.call(how.gemm, {"y": out, "u": u, "v": v, **where}, {"images": images, "conv": conv, "mode": mode, **how.own}, writes="y")


def append_tiled_wgrad(c: Lowering, how: TileAlgorithm, *, dw, dy, x, geometry: ConvGeometry, mode: str, images: Images) -> None:
    """Append the calls of a filter gradient: for each K block of tiles both input transforms and the GEMMs, then the output
    transform. `geometry`: of the direct forward convolution."""
    groups, rows, columns = geometry.groups, geometry.rows, geometry.channels
    of_x, of_dy = geometry.tiled(how.m, how.n), geometry.pixelwise().tiled(how.m, how.m)
    tile_n = gemm_tile(c.isa).nr(c.isa)
    blocks = ceil_div(int(x.shape[0]) * prod(of_x.output_size), tile_n)
    plane_bytes = 4 * groups * how.positions * tile_n  # of a block of tiles and a channel
    limit = max(1, min(blocks, how.wgrad_kc or V_BYTES // (plane_bytes * max(rows, columns))))
    sizes: dict[str, Any] = {"images": images, "tile_n": tile_n}
    operands = (("dy", dy, how.of_dy, of_dy), ("x", x, how.of_x, of_x))
    tiles_of = {n: (part(c.workspace(f"{n} tiles", limit * plane_bytes * seen.channels)), "fp32") for n, _, _, seen in operands}
    products = part(c.workspace("products", 4 * how.positions * groups * rows * columns)), "fp32"
    for first in range(0, blocks, limit):
        where = {"first": first, "limit": limit}
        for name, t, own, seen in operands:
            append_input_transform(c, how, tiles_of[name], t, own, seen, where, **sizes)
        constants = {**sizes, "geometry": of_x, "positions": how.positions}
        c.call(tiled_wgrad_gemm, {"products": products, **tiles_of, **where}, constants, writes="products")
    constants = {"size": groups * rows * columns, "flip": geometry.flipped, "mode": mode, **how.own}
    c.call(how.wgrad, {"dw": dw, "products": products}, constants, writes="dw")
