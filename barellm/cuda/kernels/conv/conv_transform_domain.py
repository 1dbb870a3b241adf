"""Convolutions over positions: what algorithms share that transform tiles, multiply and transform back (winograd.py, conv_fft.py).

The output is cut into tiles of m x m, each of which sees n x n pixels, n = m + the filter's size - 1. Four steps:

    u[position, row, channel]     of every filter
    v[position, channel, tile]    of every tile that a channel sees
    products = u v                one product for each position                    `multiply_positions`
    y                             of what all positions have

The last three take turns over passes of so many tiles that what one writes is still in the second cache when the next reads it.
For the gradient of the filters the tiles of dy, m x m, are the filters, and the filter's size is the result's: both operands are
transformed by tiles, and products sum over tiles, in parts that are added in order. Everything is fp32, whatever images are
stored in: 8 bits of a fraction are too few for the transforms.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from barellm.cuda import choices
from barellm.cuda.kernel import Count, Lowering, Sizes
from barellm.cuda.kernels.conv.conv_gather import images_of
from barellm.cuda.lang import DeviceFunction, device, tl
from barellm.program.integers import ceil_div, round_up
from barellm.program.tensor import Tensor

PASS = 6 << 20  # numbers of a pass's operands and products: 24 MB, about half of an H100's second cache
BLOCK = 128  # tiles of which a pass has a multiple, and so a product columns


@device
def batched_gemm(
    out, a, b, first, count, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, DEPTH: tl.constexpr,
    TF32: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of one position's and group's product, of a (.., ROWS, DEPTH): with CHUNK None out (.., ROWS, COLUMNS) = a b, with
    `count` columns that matter, of a multiple of BN. Otherwise out (part, .., ROWS, COLUMNS) = a b^T, where a part has CHUNK of the
    depth, of which `count` matter; it is added to what is there but for the first pass."""
    m = tl.program_id(0) % tl.cdiv(ROWS, BM) * BM + tl.arange(0, BM)
    n = tl.program_id(0) // tl.cdiv(ROWS, BM) * BN + tl.arange(0, BN)
    batch, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    a += batch * (ROWS * DEPTH)
    b += batch * (COLUMNS * DEPTH)
    begin, end = 0, DEPTH
    if CHUNK is not None:
        begin, end = part * CHUNK, min((part + 1) * CHUNK, count)
    acc = tl.zeros((BM, BN), tl.float32)
    for at in range(begin, end, BK):
        k = at + tl.arange(0, BK)
        in_depth = k < DEPTH
        left = tl.load(a + m[:, None] * DEPTH + k[None, :], mask=(m < ROWS)[:, None] & in_depth[None, :], other=0.0)
        if CHUNK is None:
            right = tl.load(b + k[:, None] * COLUMNS + n[None, :], mask=in_depth[:, None], other=0.0)
        else:
            mask = (n < COLUMNS)[None, :] & in_depth[:, None]
            right = tl.load(b + n[None, :] * DEPTH + k[:, None], mask=mask, other=0.0)
        acc = tl.dot(left, right, acc, input_precision="tf32" if TF32 else "ieee")
    to = (part.to(tl.int64) * tl.num_programs(1) + batch) * (ROWS * COLUMNS) + m[:, None] * COLUMNS + n[None, :]
    mask = (m < ROWS)[:, None] & (n < COLUMNS)[None, :]
    if CHUNK is not None:
        acc += tl.load(out + to, mask=mask & (first > 0), other=0.0)
    tl.store(out + to, acc, mask=mask)


@dataclass(frozen=True)
class TransformKernel:
    """A kernel of an algorithm: its constants and operands that others lack, and how many tiles or filters a program does."""

    function: DeviceFunction
    constants: dict[str, Any]
    block: int
    warps: int = 4
    operands: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FpropAlgorithm:
    """An algorithm for y, or dx, of tiles of m x m and filters of `size`."""

    m: int
    size: tuple[int, int]
    positions: int
    filters: TransformKernel  # u, a, ...
    tiles: TransformKernel  # v, x, ...
    images: TransformKernel  # y, products, ...


@dataclass(frozen=True)
class WgradAlgorithm:
    """An algorithm for dw of `size`, of tiles of dy of m x m."""

    m: int
    size: tuple[int, int]
    positions: int
    dy: TransformKernel
    x: TransformKernel
    filters: TransformKernel  # dw, products, ...


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
    def room(self) -> int:
        return min(self.whole, round_up(self.most, BLOCK))

    @property
    def passes(self) -> list[Pass]:
        return [Pass(self.tiles, first, self.room) for first in range(0, self.most, self.room)]

    @classmethod
    def of(cls, plan: FpropAlgorithm | WgradAlgorithm, images: Tensor, size: tuple[int, int], channels: int) -> Tiling:
        """Of pixels of `size`; `channels`: of all that is made for a tile."""
        rows, columns = ceil_div(size[0], plan.m), ceil_div(size[1], plan.m)
        whole = max(PASS // (plan.positions * channels) // BLOCK, 1) * BLOCK
        return cls(
            plan.m, rows, columns, images_of(images, rows * columns), int(images.shape[0]) * rows * columns, whole
        )


def rising(constants: dict[str, Any], axis: str, taps: int) -> tuple[int, bool]:
    """The first offset of `taps` that are one apart, and whether they come in falling order."""
    first, step = constants[f"{axis}_FIRST"], constants[f"{axis}_STEP"]
    assert abs(step) == (taps > 1), constants
    return min(first, first + (taps - 1) * step), step < 0


def append_tiles(
    c: Lowering, step: TransformKernel, v: Tensor, x: Tensor, tiling: Tiling, of: Pass, multiple: int, *, top: int = 0,
    left: int = 0, reflect: bool = False,
) -> None:  # fmt: skip
    """Append v (positions, channels, room), of one pass, with zeros up to a multiple of tiles. Tile (i, j) of an image begins at
    (i m + top, j m + left)."""
    channels = int(x.shape[1])
    constants = {
        "CHANNELS": channels,
        "H": int(x.shape[2]),
        "W": int(x.shape[3]),
        "TOP": top,
        "LEFT": left,
        "REFLECT": reflect,
    }
    constants |= {"TH": tiling.rows, "TW": tiling.columns, "STEP": tiling.m, "ROOM": tiling.room, "BLOCK": step.block}
    c.launch(
        step.function, {"v": v, "x": x, "first": of.first, "count": of, **step.operands}, step.constants | constants,
        warps=step.warps, writes="v", grid=lambda s: (ceil_div(round_up(of(s), multiple), step.block), channels),
    )  # fmt: skip


def product_constants(
    c: Lowering, rows: int, columns: int, depth: int, batches: int
) -> tuple[dict[str, Any], dict[str, int]]:
    """The constants of a product of `batches` at a time, and how to launch it."""
    t = choices.tile("nn", rows, columns * batches, depth, "tf32" if c.target.tf32 else "fp32", c.target.arch)
    constants = {"ROWS": rows, "TF32": c.target.tf32 or None, "BM": t.rows, "BN": t.cols, "BK": t.depth}
    return constants, {"warps": t.warps, "stages": t.stages}


def append_forward(
    c: Lowering, plan: FpropAlgorithm, *, out: Any, a: Tensor, x: Tensor, rows: int, constants: dict[str, Any]
) -> None:
    """`constants`: of `conv_product`, whose place this takes."""
    groups, channels, size = constants["GROUPS"], constants["CHANNELS"], (constants["OUT_H"], constants["OUT_W"])
    (top, high), (left, wide) = (rising(constants, n, taps) for n, taps in zip(("R", "S"), plan.size, strict=True))
    strides = {n: constants[n] for n in ("A_GROUP", "A_ROW", "A_CHANNEL", "A_FIRST", "A_R", "A_S")}
    for axis, falling, taps in (("A_R", high, plan.size[0]), ("A_S", wide, plan.size[1])):
        if falling:
            strides |= {"A_FIRST": strides["A_FIRST"] + (taps - 1) * strides[axis], axis: -strides[axis]}
    tiling = Tiling.of(plan, x, size, groups * (channels + rows))
    positions, room = plan.positions, tiling.room
    u = c.scratch("filters", (positions, groups * rows, channels))
    v = c.scratch("tiles", (positions, groups * channels, room))
    products = c.scratch("products", (positions, groups * rows, room))
    sizes = {"GROUPS": groups, "ROWS": rows, "CHANNELS": channels, "BLOCK": plan.filters.block}
    c.launch(
        plan.filters.function, {"u": u, "a": a, **plan.filters.operands}, plan.filters.constants | sizes | strides,
        warps=plan.filters.warps, writes="u", grid=lambda s: (ceil_div(groups * rows * channels, plan.filters.block),),
    )  # fmt: skip
    fixed, how = product_constants(c, rows, room, channels, positions * groups)
    fixed |= {"COLUMNS": room, "DEPTH": channels, "CHUNK": None}
    to = {"CHANNELS": groups * rows, "H": size[0], "W": size[1], "TH": tiling.rows, "TW": tiling.columns, "ROOM": room}
    to |= {"MODE": constants["MODE"], "BLOCK": plan.images.block}
    for of in tiling.passes:
        where = {"first": of.first, "count": of}
        append_tiles(c, plan.tiles, v, x, tiling, of, fixed["BN"], top=top, left=left, reflect=constants["REFLECT"])
        c.launch(
            batched_gemm, {"out": products, "a": u, "b": v, **where}, fixed, **how, writes="out",
            grid=lambda s, of=of: (ceil_div(rows, fixed["BM"]) * ceil_div(of(s), fixed["BN"]), positions * groups),
        )  # fmt: skip
        c.launch(
            plan.images.function, {"y": out, "products": products, **where, **plan.images.operands}, plan.images.constants | to,
            warps=plan.images.warps, grid=lambda s, of=of: (ceil_div(of(s), plan.images.block), groups * rows), writes="y",
        )  # fmt: skip


def append_gradient(
    c: Lowering, plan: WgradAlgorithm, *, dw: Tensor, dy: Tensor, x: Tensor, constants: dict[str, Any], mode: int
) -> None:
    """`constants`: of `conv_weight_gradient`, whose place this takes."""
    groups, rows, channels = constants["GROUPS"], constants["M"], constants["CHANNELS"]
    (top, high), (left, wide) = (rising(constants, n, taps) for n, taps in zip(("R", "S"), plan.size, strict=True))
    tiling = Tiling.of(plan, x, (constants["P"], constants["Q"]), groups * (channels + rows))
    positions, room = plan.positions, tiling.room
    fixed, how = product_constants(c, rows, channels, tiling.whole, positions * groups)
    tiles = ceil_div(rows, fixed["BM"]) * ceil_div(channels, fixed["BN"])
    chunk = round_up(ceil_div(tiling.whole, choices.splits(tiles * positions * groups, tiling.whole)), BLOCK)
    parts = ceil_div(room, chunk)
    made = {name: c.scratch(f"{name} tiles", (positions, int(t.shape[1]), room)) for name, t in (("dy", dy), ("x", x))}
    products = c.scratch("products", (parts, positions, groups * rows, channels))
    fixed |= {"COLUMNS": channels, "DEPTH": room, "CHUNK": chunk}
    for of in tiling.passes:
        append_tiles(c, plan.dy, made["dy"], dy, tiling, of, fixed["BK"])
        append_tiles(c, plan.x, made["x"], x, tiling, of, fixed["BK"], top=top, left=left, reflect=constants["REFLECT"])
        c.launch(
            batched_gemm, {"out": products, "a": made["dy"], "b": made["x"], "first": of.first, "count": of}, fixed, **how,
            grid=lambda s, of=of: (tiles, positions * groups, parts if of(s) else 0), writes="out",
        )  # fmt: skip
    size = groups * rows * channels
    c.launch(
        plan.filters.function, {"dw": dw, "products": products, **plan.filters.operands},
        plan.filters.constants | {"PARTS": parts, "SIZE": size, "FLIP": high or wide, "MODE": mode, "BLOCK": plan.filters.block},
        warps=plan.filters.warps, grid=lambda s: (ceil_div(size, plan.filters.block),), writes="dw",
    )  # fmt: skip
