"""Convolutions with 3 x 3 filters by Winograd's F(2x2, 3x3) and F(4x4, 3x3): 2.25 and 4 times fewer products (program/winograd.py).

The output is cut into tiles of m x m, each of which sees n x n pixels, n = m + 2. Four steps, over n^2 *positions*:

    u[position, row, channel]     of every filter                                  `winograd_filters`, once
    v[position, channel, tile]    of every tile that a channel sees                `winograd_tiles`
    products = u v                one product for each position                    `winograd_product`
    y                             of what all positions have                       `winograd_images`

The last three take turns over passes of so many tiles that what one writes is still in the second cache when the next reads it.
For the gradient of the filters the tiles of dy, m x m, are the filters of F(3x3, m x m): both operands are transformed by
`winograd_tiles`, products sum over tiles, in parts that are added in order, and `winograd_gradient` makes 3 x 3 numbers of them.
Everything is fp32, whatever images are stored in: 8 bits of a fraction are too few for the transforms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from barellm.cuda import choices
from barellm.cuda.kernel import Count, Lowering, Sizes
from barellm.cuda.kernels.common import keep
from barellm.cuda.kernels.conv_pixels import images_of, mirrored
from barellm.cuda.lang import device, tl
from barellm.program.integers import ceil_div, round_up
from barellm.program.tensor import Tensor
from barellm.program.winograd import Matrix, filter_matrix, input_matrix, output_matrix

PASS = 6 << 20  # numbers of a pass's operands and products: 24 MB, about half of an H100's second cache
BLOCK = (
    128  # tiles, or filters, of a program of a transform; a pass has a multiple of it, and so of a product's columns
)


@device
def element(MATRIX: tl.constexpr, ROW: tl.constexpr, v):
    """Element ROW of MATRIX v."""
    total = tl.zeros_like(v[0])
    for i in tl.static_range(len(v)):
        if MATRIX[ROW][i] == 1.0:
            total += v[i]
        elif MATRIX[ROW][i] != 0.0:
            total += v[i] * MATRIX[ROW][i]
    return total


@device
def both_ways(MATRIX: tl.constexpr, square):
    """MATRIX square MATRIX^T of as many squares as a tensor has elements; a square is a tuple of tensors, row by row."""
    SIZE: tl.constexpr = len(MATRIX[0])
    MADE: tl.constexpr = len(MATRIX)
    half = ()
    for i in tl.static_range(MADE):
        for j in tl.static_range(SIZE):
            half += (element(MATRIX, i, square[j::SIZE]),)
    made = ()
    for i in tl.static_range(MADE):
        for j in tl.static_range(MADE):
            made += (element(MATRIX, j, half[i * SIZE : i * SIZE + SIZE]),)
    return made


@device
def winograd_filters(
    u, a, MATRIX: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, A_GROUP: tl.constexpr,
    A_ROW: tl.constexpr, A_CHANNEL: tl.constexpr, A_FIRST: tl.constexpr, A_R: tl.constexpr, A_S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """u (positions, GROUPS ROWS, CHANNELS) = MATRIX g MATRIX^T."""
    SIZE: tl.constexpr = GROUPS * ROWS * CHANNELS
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = at // CHANNELS
    of = a + row // ROWS * A_GROUP + row % ROWS * A_ROW + at % CHANNELS * A_CHANNEL + A_FIRST
    taps = ()
    for r in tl.static_range(3):
        for s in tl.static_range(3):
            taps += (tl.load(of + r * A_R + s * A_S, mask=at < SIZE, other=0.0).to(tl.float32),)
    made = both_ways(MATRIX, taps)
    for position in tl.static_range(len(made)):
        tl.store(u + position * SIZE + at, made[position], mask=at < SIZE)


@device
def winograd_tiles(
    v, x, first, count, MATRIX: tl.constexpr, CHANNELS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, TH: tl.constexpr,
    TW: tl.constexpr, STEP: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, REFLECT: tl.constexpr, ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """v (positions, CHANNELS, ROOM) = MATRIX d MATRIX^T of the tiles [first, first + count) of x (N, CHANNELS, H, W), and zeros up
    to a whole block. Tile (i, j) of an image begins at the pixel (i STEP + TOP, j STEP + LEFT)."""
    SIZE: tl.constexpr = len(MATRIX[0])
    at, channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    tile = first + at
    plane = (tile // (TH * TW)).to(tl.int64) * CHANNELS + channel
    top, left = tile % (TH * TW) // TW * STEP + TOP, tile % TW * STEP + LEFT
    seen = ()
    for i in tl.static_range(SIZE):
        for j in tl.static_range(SIZE):
            row, column = top + i, left + j
            if REFLECT:
                row, column = mirrored(row, H), mirrored(column, W)
            inside = (at < count) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
            seen += (tl.load(x + plane * (H * W) + row * W + column, mask=inside, other=0.0).to(tl.float32),)
    made = both_ways(MATRIX, seen)
    for position in tl.static_range(len(made)):
        tl.store(v + (position * CHANNELS + channel) * ROOM + at, made[position])


@device
def winograd_product(
    out, a, b, first, count, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, DEPTH: tl.constexpr,
    TF32: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of one position's and group's product, of a (.., ROWS, DEPTH): with CHUNK None out (.., ROWS, COLUMNS) = a b, with
    `count` columns that matter, of a multiple of BN. Otherwise out (part, .., ROWS, COLUMNS) = a b^T, where a part has CHUNK of the
    depth, of which `count` matter; it is added to what is there but for the first pass."""
    m = tl.program_id(0) % tl.cdiv(ROWS, BM) * BM + tl.arange(0, BM)
    n = tl.program_id(0) // tl.cdiv(ROWS, BM) * BN + tl.arange(0, BN)
    batch, part = tl.program_id(1), tl.program_id(2)
    begin, end = 0, DEPTH
    if CHUNK is not None:
        begin, end = part * CHUNK, min((part + 1) * CHUNK, count)
    acc = tl.zeros((BM, BN), tl.float32)
    for at in range(begin, end, BK):
        k = at + tl.arange(0, BK)
        in_depth = k < DEPTH
        left = tl.load(
            a + (batch * ROWS + m)[:, None] * DEPTH + k[None, :],
            mask=(m < ROWS)[:, None] & in_depth[None, :],
            other=0.0,
        )
        if CHUNK is None:
            right = tl.load(b + (batch * DEPTH + k)[:, None] * COLUMNS + n[None, :], mask=in_depth[:, None], other=0.0)
        else:
            right = tl.load(
                b + (batch * COLUMNS + n)[None, :] * DEPTH + k[:, None],
                mask=(n < COLUMNS)[None, :] & in_depth[:, None], other=0.0,
            )  # fmt: skip
        acc = tl.dot(left, right, acc, input_precision="tf32" if TF32 else "ieee")
    to = (part.to(tl.int64) * tl.num_programs(1) + batch) * (ROWS * COLUMNS) + m[:, None] * COLUMNS + n[None, :]
    mask = (m < ROWS)[:, None] & (n < COLUMNS)[None, :]
    if CHUNK is not None:
        acc += tl.load(out + to, mask=mask & (first > 0), other=0.0)
    tl.store(out + to, acc, mask=mask)


@device
def winograd_images(
    y, products, first, count, scalars, MATRIX: tl.constexpr, CHANNELS: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    TH: tl.constexpr, TW: tl.constexpr, ROOM: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of the tiles [first, first + count), what lies in the images y (N, CHANNELS, H, W)."""
    SIZE: tl.constexpr = len(MATRIX[0])
    STEP: tl.constexpr = len(MATRIX)
    at, channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    tile, there = first + at, at < count
    square = ()
    for position in tl.static_range(SIZE * SIZE):
        square += (tl.load(products + (position * CHANNELS + channel) * ROOM + at, mask=there, other=0.0),)
    made = both_ways(MATRIX, square)
    plane = (tile // (TH * TW)).to(tl.int64) * CHANNELS + channel
    top, left = tile % (TH * TW) // TW * STEP, tile % TW * STEP
    for i in tl.static_range(STEP):
        for j in tl.static_range(STEP):
            row, column = top + i, left + j
            to = y + plane * (H * W) + row * W + column
            keep(to, there & (row < H) & (column < W), made[i * STEP + j], scalars, MODE)


@device
def winograd_gradient(
    dw, products, scalars, MATRIX: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr, FLIP: tl.constexpr, MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """dw (SIZE, 3, 3) of the sum over parts of products (PARTS, positions, SIZE). FLIP: filters are read from their end."""
    POSITIONS: tl.constexpr = len(MATRIX[0]) * len(MATRIX[0])
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    square = ()
    for position in tl.static_range(POSITIONS):
        total = tl.zeros((BLOCK,), tl.float32)
        for part in range(PARTS):
            total += tl.load(products + (part * POSITIONS + position) * SIZE + at, mask=at < SIZE, other=0.0)
        square += (total,)
    made = both_ways(MATRIX, square)
    for tap in tl.static_range(9):
        keep(dw + at * 9 + (8 - tap if FLIP else tap), at < SIZE, made[tap], scalars, MODE)


@dataclass(frozen=True)
class Pass:
    """A `Size`: how many of the tiles [first, first + room) there are."""

    tiles: Count
    first: int
    room: int

    def __call__(self, sizes: Sizes) -> int:
        return max(min(self.tiles(sizes) - self.first, self.room), 0)


@dataclass(frozen=True)
class Tiling:
    """How images are cut into tiles, and tiles into passes of `room`. `whole`: the same where there are tiles enough, on which the
    order of sums depends."""

    m: int
    rows: int
    columns: int
    tiles: Count
    most: int
    whole: int

    @property
    def n(self) -> int:
        return self.m + 2

    @property
    def room(self) -> int:
        return min(self.whole, round_up(self.most, BLOCK))

    @property
    def passes(self) -> list[Pass]:
        return [Pass(self.tiles, first, self.room) for first in range(0, self.most, self.room)]

    @classmethod
    def of(cls, m: int, images: Tensor, size: tuple[int, int], channels: int) -> Tiling:
        """Of pixels of `size`; `channels`: of all that is made for a tile."""
        rows, columns = ceil_div(size[0], m), ceil_div(size[1], m)
        whole = max(PASS // ((m + 2) ** 2 * channels) // BLOCK, 1) * BLOCK
        return cls(m, rows, columns, images_of(images, rows * columns), int(images.shape[0]) * rows * columns, whole)


def tile_of(algorithm: str) -> int:
    """The m of Winograd's tiles, 0 for the direct algorithm. "auto" is that: nobody has compared the two on a GPU yet."""
    return int(algorithm[-1]) if algorithm.startswith("winograd") else 0


def matrix(values: Matrix) -> tuple[tuple[float, ...], ...]:
    """A matrix as a constant of the code."""
    return tuple(map(tuple, values))


def rising(constants: dict[str, Any], axis: str) -> tuple[int, bool]:
    """The first offset of three that are one apart, and whether they come in falling order."""
    first, step = constants[f"{axis}_FIRST"], constants[f"{axis}_STEP"]
    assert abs(step) == 1, constants
    return min(first, first + 2 * step), step < 0


def append_tiles(c: Lowering, v: Tensor, x: Tensor, tiling: Tiling, of: Pass, values: Matrix, **constants: Any) -> None:
    """Append v (positions, channels, room), of one pass. `constants`: of `winograd_tiles`, those that tell where tiles begin."""
    channels = int(x.shape[1])
    constants |= {"MATRIX": matrix(values), "CHANNELS": channels, "H": int(x.shape[2]), "W": int(x.shape[3])}
    constants |= {"TH": tiling.rows, "TW": tiling.columns, "STEP": tiling.m, "ROOM": tiling.room, "BLOCK": BLOCK}
    c.launch(
        winograd_tiles, {"v": v, "x": x, "first": of.first, "count": of}, constants,
        grid=lambda s: (ceil_div(of(s), BLOCK), channels), writes="v",
    )  # fmt: skip


def product_constants(
    c: Lowering, rows: int, columns: int, depth: int, batches: int
) -> tuple[dict[str, Any], dict[str, int]]:
    """The constants of a product of `batches` at a time, and how to launch it."""
    t = choices.tile("nn", rows, columns * batches, depth, "tf32" if c.target.tf32 else "fp32", c.target.arch)
    constants = {"ROWS": rows, "TF32": c.target.tf32 or None, "BM": t.rows, "BN": t.cols, "BK": t.depth}
    return constants, {"warps": t.warps, "stages": t.stages}


def append_winograd(
    c: Lowering, *, m: int, out: Any, a: Tensor, x: Tensor, rows: int, constants: dict[str, Any]
) -> None:
    """`constants`: of `conv_product`, whose place this takes."""
    groups, channels, size = constants["GROUPS"], constants["CHANNELS"], (constants["OUT_H"], constants["OUT_W"])
    (top, high), (left, wide) = rising(constants, "R"), rising(constants, "S")
    strides = {n: constants[n] for n in ("A_GROUP", "A_ROW", "A_CHANNEL", "A_FIRST", "A_R", "A_S")}
    for axis, falling in (("A_R", high), ("A_S", wide)):
        if falling:
            strides |= {"A_FIRST": strides["A_FIRST"] + 2 * strides[axis], axis: -strides[axis]}
    tiling = Tiling.of(m, x, size, groups * (channels + rows))
    n, room = tiling.n, tiling.room
    u = c.scratch("filters", (n * n, groups * rows, channels))
    v = c.scratch("tiles", (n * n, groups * channels, room))
    products = c.scratch("products", (n * n, groups * rows, room))
    sizes = {"GROUPS": groups, "ROWS": rows, "CHANNELS": channels, "BLOCK": BLOCK}
    c.launch(
        winograd_filters, {"u": u, "a": a}, {"MATRIX": matrix(filter_matrix(m, 3)), **sizes, **strides},
        grid=lambda s: (ceil_div(groups * rows * channels, BLOCK),), writes="u",
    )  # fmt: skip
    fixed, how = product_constants(c, rows, room, channels, n * n * groups)
    fixed |= {"COLUMNS": room, "DEPTH": channels, "CHUNK": None}
    to = {"CHANNELS": groups * rows, "H": size[0], "W": size[1], "TH": tiling.rows, "TW": tiling.columns, "ROOM": room}
    to |= {"MATRIX": matrix(output_matrix(m, 3)), "MODE": constants["MODE"], "BLOCK": BLOCK}
    for of in tiling.passes:
        where = {"first": of.first, "count": of}
        append_tiles(c, v, x, tiling, of, input_matrix(n), TOP=top, LEFT=left, REFLECT=constants["REFLECT"])
        c.launch(
            winograd_product, {"out": products, "a": u, "b": v, **where}, fixed, **how, writes="out",
            grid=lambda s, of=of: (ceil_div(rows, fixed["BM"]) * ceil_div(of(s), fixed["BN"]), n * n * groups),
        )  # fmt: skip
        c.launch(
            winograd_images, {"y": out, "products": products, **where}, to, writes="y",
            grid=lambda s, of=of: (ceil_div(of(s), BLOCK), groups * rows),
        )  # fmt: skip


def append_winograd_gradient(
    c: Lowering, *, m: int, dw: Tensor, dy: Tensor, x: Tensor, constants: dict[str, Any], mode: int
) -> None:
    """`constants`: of `conv_weight_gradient`, whose place this takes."""
    groups, rows, channels = constants["GROUPS"], constants["M"], constants["CHANNELS"]
    (top, falling), (left, _) = rising(constants, "R"), rising(constants, "S")
    tiling = Tiling.of(m, x, (constants["P"], constants["Q"]), groups * (channels + rows))
    n, room = tiling.n, tiling.room
    fixed, how = product_constants(c, rows, channels, tiling.whole, n * n * groups)
    tiles = ceil_div(rows, fixed["BM"]) * ceil_div(channels, fixed["BN"])
    chunk = round_up(ceil_div(tiling.whole, choices.splits(tiles * n * n * groups, tiling.whole)), BLOCK)
    parts = ceil_div(room, chunk)
    made = {name: c.scratch(f"{name} tiles", (n * n, int(t.shape[1]), room)) for name, t in (("dy", dy), ("x", x))}
    products = c.scratch("products", (parts, n * n, groups * rows, channels))
    fixed |= {"COLUMNS": channels, "DEPTH": room, "CHUNK": chunk}
    for of in tiling.passes:
        append_tiles(c, made["dy"], dy, tiling, of, filter_matrix(3, m), TOP=0, LEFT=0, REFLECT=False)
        append_tiles(c, made["x"], x, tiling, of, input_matrix(n), TOP=top, LEFT=left, REFLECT=constants["REFLECT"])
        c.launch(
            winograd_product, {"out": products, "a": made["dy"], "b": made["x"], "first": of.first, "count": of}, fixed, **how,
            grid=lambda s, of=of: (tiles, n * n * groups, parts if of(s) else 0), writes="out",
        )  # fmt: skip
    size = groups * rows * channels
    c.launch(
        winograd_gradient, {"dw": dw, "products": products},
        {"MATRIX": matrix(output_matrix(3, m)), "PARTS": parts, "SIZE": size, "FLIP": falling, "MODE": mode, "BLOCK": BLOCK},
        grid=lambda s: (ceil_div(size, BLOCK),), writes="dw",
    )  # fmt: skip
