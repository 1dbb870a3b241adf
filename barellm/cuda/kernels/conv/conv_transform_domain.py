"""Winograd's convolution (winograd.py): tiles and filters are transformed, multiplied by a batched GEMM with one batch for each
position of the transform, and transformed back.

The output is cut into tiles of m x m, each of which sees n x n pixels, n = m + the filter's size - 1. Four steps:

    u[position, row, channel]     filter transform
    v[position, channel, tile]    input transform of every tile
    gemm_out = u v                `batched_gemm`, one GEMM for each position
    y                             output transform

The last three alternate over passes of so many tiles that what one writes is still in L2 when the next reads it. For wgrad the
tiles of dy, m x m, are the filters, and the filter's size is the result's: both operands are transformed by tiles, and the GEMMs
sum over tiles, with split-K. Everything is fp32, whatever images are stored in: 8 bits of a fraction are too few for the
transforms.

`rows` and `channels` are those of one group: for fprop K / groups and C / groups, for dgrad the other way round. `batch`: one
position and one group of the batched GEMM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from barellm.cuda import gemm_config
from barellm.cuda.kernel import Count, Lowering, Sizes
from barellm.cuda.kernels.conv.conv_gather import images_of
from barellm.cuda.lang import DeviceFunction, device, tl
from barellm.program.integers import ceil_div, round_up
from barellm.program.tensor import Tensor

PASS = 6 << 20  # elements of a pass's tiles and products: 24 MB of fp32, about half of an H100's L2
BLOCK = 128  # a pass has a multiple of so many tiles, and a GEMM as many columns


@device
def batched_gemm(
    out, a, b, first, count, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, DEPTH: tl.constexpr,
    TF32: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One (BM, BN) tile of one batch of the batched GEMM. Grid: tiles, batches, split-K slices.

    fprop, dgrad (CHUNK None): out (batches, ROWS, COLUMNS) = a (batches, ROWS, DEPTH) b (batches, DEPTH, COLUMNS). COLUMNS are
        tiles, a multiple of BN, of which the grid covers the first `count`.
    wgrad: out (slices, batches, ROWS, COLUMNS) = a (batches, ROWS, DEPTH) b^T (batches, COLUMNS, DEPTH). DEPTH is tiles, CHUNK of
        them for each slice, of which the first `count` are summed. Passes but the first (`first` > 0) add to out."""
    m = tl.program_id(0) % tl.cdiv(ROWS, BM) * BM + tl.arange(0, BM)
    n = tl.program_id(0) // tl.cdiv(ROWS, BM) * BN + tl.arange(0, BN)
    batch, slice = tl.program_id(1).to(tl.int64), tl.program_id(2)
    a += batch * (ROWS * DEPTH)
    b += batch * (COLUMNS * DEPTH)
    begin, end = 0, DEPTH
    if CHUNK is not None:
        begin, end = slice * CHUNK, min((slice + 1) * CHUNK, count)
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(begin, end, BK):
        k = k0 + tl.arange(0, BK)
        k_in = k < DEPTH
        a_block = tl.load(a + m[:, None] * DEPTH + k[None, :], mask=(m < ROWS)[:, None] & k_in[None, :], other=0.0)
        if CHUNK is None:
            b_block = tl.load(b + k[:, None] * COLUMNS + n[None, :], mask=k_in[:, None], other=0.0)
        else:
            mask = (n < COLUMNS)[None, :] & k_in[:, None]
            b_block = tl.load(b + n[None, :] * DEPTH + k[:, None], mask=mask, other=0.0)
        acc = tl.dot(a_block, b_block, acc, input_precision="tf32" if TF32 else "ieee")
    offset = (slice.to(tl.int64) * tl.num_programs(1) + batch) * (ROWS * COLUMNS) + m[:, None] * COLUMNS + n[None, :]
    mask = (m < ROWS)[:, None] & (n < COLUMNS)[None, :]
    if CHUNK is not None:
        acc += tl.load(out + offset, mask=mask & (first > 0), other=0.0)
    tl.store(out + offset, acc, mask=mask)


@dataclass(frozen=True)
class TransformKernel:
    """A transform's kernel, with the `constants` that only this algorithm has. `block`: tiles or filters of one program."""

    function: DeviceFunction
    constants: dict[str, Any]
    block: int


@dataclass(frozen=True)
class Algorithm:
    """An algorithm of filters of `size` = (R, S) in tiles of m x m, with `positions` of the transform domain: the kernels, by their
    first operands, that transform the filters, or for wgrad the tiles of dy; the tiles of x; and the result."""

    m: int
    size: tuple[int, int]
    positions: int
    filters: TransformKernel  # u, a, ...; for wgrad v, dy, ...
    tiles: TransformKernel  # v, x, ...
    result: TransformKernel  # y, gemm_out, ...; for wgrad dw, gemm_out, ...


@dataclass(frozen=True)
class Pass:
    """A `Size`: how many tiles of the pass [first, first + room) a run has."""

    tiles: Count
    first: int
    pass_tiles: int

    def __call__(self, sizes: Sizes) -> int:
        return max(min(self.tiles(sizes) - self.first, self.pass_tiles), 0)


@dataclass(frozen=True)
class Tiling:
    """How images are cut into tiles of m x m outputs, `rows` x `columns` of them for each image, and all `tiles` of a run, at
    max_tiles `max_tiles`, into passes. `full_pass`: tiles of a full pass. It does not depend on the batch, so the order of wgrad's
    sums, which it decides, does not either."""

    m: int
    rows: int
    columns: int
    tiles: Count
    max_tiles: int
    full_pass: int

    @property
    def pass_tiles(self) -> int:
        """The tiles for which buffers have room: those of a full pass, or all if they are fewer."""
        return min(self.full_pass, round_up(self.max_tiles, BLOCK))

    @property
    def passes(self) -> list[Pass]:
        """The passes of the longest run; shorter runs leave the last ones empty."""
        return [Pass(self.tiles, first, self.pass_tiles) for first in range(0, self.max_tiles, self.pass_tiles)]

    @classmethod
    def of(cls, plan: Algorithm, images: Tensor, size: tuple[int, int], channels: int) -> Tiling:
        """The tiling of `images` (N, ...) with outputs of `size` = (P, Q). `channels`: of a tile's operands and products together,
        which decide how many tiles a pass of PASS elements has."""
        rows, columns = ceil_div(size[0], plan.m), ceil_div(size[1], plan.m)
        full_pass = max(PASS // (plan.positions * channels) // BLOCK, 1) * BLOCK
        return cls(plan.m, rows, columns, images_of(images, rows * columns), int(images.shape[0]) * rows * columns, full_pass)


def lowest_offset(constants: dict[str, Any], axis: str, taps: int) -> tuple[int, bool]:
    """The lowest offset of an axis ("R" or "S") of `taps` adjacent taps, and whether they are in descending order (flipped)."""
    first, step = constants[f"{axis}_FIRST"], constants[f"{axis}_STEP"]
    assert abs(step) == (taps > 1), constants
    return min(first, first + (taps - 1) * step), step < 0


def append_tiles(
    c: Lowering, step: TransformKernel, v: Tensor, x: Tensor, tiling: Tiling, of: Pass, multiple: int, *, top: int = 0,
    left: int = 0, reflect: bool = False,
) -> None:  # fmt: skip
    """Append the input transform `step` of one pass: v (positions, channels, room) of x (N, channels, H, W), with zeros up to the
    next `multiple` of tiles. Tile (i, j) of an image begins at the pixel (i m + top, j m + left)."""
    channels = int(x.shape[1])
    constants = {"CHANNELS": channels, "H": int(x.shape[2]), "W": int(x.shape[3])}
    constants |= {"TOP": top, "LEFT": left, "REFLECT": reflect, "BLOCK": step.block}
    constants |= {"TH": tiling.rows, "TW": tiling.columns, "STEP": tiling.m, "PASS_TILES": tiling.pass_tiles}
    c.launch(
        step.function, {"v": v, "x": x, "first": of.first, "count": of}, step.constants | constants,
        writes="v", grid=lambda s: (ceil_div(round_up(of(s), multiple), step.block), channels),
    )  # fmt: skip


def batched_gemm_constants(c: Lowering, rows: int, columns: int, depth: int, batches: int) -> tuple[dict[str, Any], dict[str, int]]:
    """The constants of `batched_gemm` for `batches` GEMMs (rows, depth) (depth, columns), and its launch options. The configuration
    is that of one GEMM of all their columns."""
    kind = "tf32" if c.target.tf32 else "fp32"
    t = gemm_config.select_config("nn", rows, columns * batches, depth, kind, c.target.arch)
    constants = {"ROWS": rows, "TF32": c.target.tf32 or None, "BM": t.tile_m, "BN": t.tile_n, "BK": t.tile_k}
    return constants, {"warps": t.num_warps, "stages": t.num_stages}


def append_fprop(c: Lowering, plan: Algorithm, *, out: Any, a: Tensor, x: Tensor, rows: int, constants: dict[str, Any]) -> None:
    """Append fprop or dgrad in the transform domain: the filter transform of `a`, then for each pass the input transform of x, the
    batched GEMM and the output transform. `rows`: of one group of `out` (N, groups * rows, OUT_H, OUT_W); `constants`: those of
    `conv_implicit_gemm` (convolution.py), whose place this takes."""
    groups, channels, size = constants["GROUPS"], constants["CHANNELS"], (constants["OUT_H"], constants["OUT_W"])
    top, flip_r = lowest_offset(constants, "R", plan.size[0])
    left, flip_s = lowest_offset(constants, "S", plan.size[1])
    strides = {n: constants[n] for n in ("A_GROUP", "A_ROW", "A_CHANNEL", "A_FIRST", "A_R", "A_S")}
    for axis, flip, taps in (("A_R", flip_r, plan.size[0]), ("A_S", flip_s, plan.size[1])):
        if flip:  # read the filter from its last tap backwards, so that offsets in the image ascend
            strides |= {"A_FIRST": strides["A_FIRST"] + (taps - 1) * strides[axis], axis: -strides[axis]}
    tiling = Tiling.of(plan, x, size, groups * (channels + rows))
    positions, pass_tiles = plan.positions, tiling.pass_tiles
    u = c.scratch("filters", (positions, groups * rows, channels))
    v = c.scratch("tiles", (positions, groups * channels, pass_tiles))
    gemm_out = c.scratch("products", (positions, groups * rows, pass_tiles))
    sizes = {"GROUPS": groups, "ROWS": rows, "CHANNELS": channels, "BLOCK": plan.filters.block}
    c.launch(
        plan.filters.function, {"u": u, "a": a}, plan.filters.constants | sizes | strides,
        writes="u", grid=lambda s: (ceil_div(groups * rows * channels, plan.filters.block),),
    )  # fmt: skip
    fixed, options = batched_gemm_constants(c, rows, pass_tiles, channels, positions * groups)
    fixed |= {"COLUMNS": pass_tiles, "DEPTH": channels, "CHUNK": None}
    images = {"CHANNELS": groups * rows, "H": size[0], "W": size[1], "TH": tiling.rows, "TW": tiling.columns}
    images |= {"PASS_TILES": pass_tiles, "MODE": constants["MODE"], "BLOCK": plan.result.block}
    for of in tiling.passes:
        where = {"first": of.first, "count": of}
        append_tiles(c, plan.tiles, v, x, tiling, of, fixed["BN"], top=top, left=left, reflect=constants["REFLECT"])
        c.launch(
            batched_gemm, {"out": gemm_out, "a": u, "b": v, **where}, fixed, **options, writes="out",
            grid=lambda s, of=of: (ceil_div(rows, fixed["BM"]) * ceil_div(of(s), fixed["BN"]), positions * groups),
        )  # fmt: skip
        c.launch(
            plan.result.function, {"y": out, "gemm_out": gemm_out, **where}, plan.result.constants | images,
            grid=lambda s, of=of: (ceil_div(of(s), plan.result.block), groups * rows), writes="y",
        )  # fmt: skip


def append_wgrad(c: Lowering, plan: Algorithm, *, dw: Tensor, dy: Tensor, x: Tensor, constants: dict[str, Any], mode: int) -> None:
    """Append wgrad in the transform domain: for each pass the transforms of dy and x and the batched GEMM, which adds up the
    passes; then the transform of the result, which adds up the split-K slices. `constants`: those of `conv_wgrad` (convolution.py),
    whose place this takes."""
    groups, rows, channels = constants["GROUPS"], constants["M"], constants["CHANNELS"]
    reflect = constants["REFLECT"]
    top, flip_r = lowest_offset(constants, "R", plan.size[0])
    left, flip_s = lowest_offset(constants, "S", plan.size[1])
    tiling = Tiling.of(plan, x, (constants["P"], constants["Q"]), groups * (channels + rows))
    positions, pass_tiles = plan.positions, tiling.pass_tiles
    fixed, options = batched_gemm_constants(c, rows, channels, tiling.full_pass, positions * groups)
    tiles = ceil_div(rows, fixed["BM"]) * ceil_div(channels, fixed["BN"])  # of one batch's result
    splits = gemm_config.num_splits(tiles * positions * groups, tiling.full_pass)
    chunk = round_up(ceil_div(tiling.full_pass, splits), BLOCK)  # tiles of a split-K slice
    slices = ceil_div(pass_tiles, chunk)
    dy_tiles = c.scratch("dy tiles", (positions, int(dy.shape[1]), pass_tiles))
    x_tiles = c.scratch("x tiles", (positions, int(x.shape[1]), pass_tiles))
    gemm_out = c.scratch("products", (slices, positions, groups * rows, channels))
    fixed |= {"COLUMNS": channels, "DEPTH": pass_tiles, "CHUNK": chunk}
    for of in tiling.passes:
        append_tiles(c, plan.filters, dy_tiles, dy, tiling, of, fixed["BK"])
        append_tiles(c, plan.tiles, x_tiles, x, tiling, of, fixed["BK"], top=top, left=left, reflect=reflect)
        operands = {"out": gemm_out, "a": dy_tiles, "b": x_tiles, "first": of.first, "count": of}
        c.launch(
            batched_gemm, operands, fixed, **options,
            grid=lambda s, of=of: (tiles, positions * groups, slices if of(s) else 0), writes="out",
        )  # fmt: skip
    filters, output = groups * rows * channels, plan.result
    sizes = {"SLICES": slices, "FILTERS": filters, "BLOCK": output.block}
    c.launch(
        output.function, {"dw": dw, "gemm_out": gemm_out},
        output.constants | sizes | {"FLIP": flip_r or flip_s, "MODE": mode},
        grid=lambda s: (ceil_div(filters, output.block),), writes="dw",
    )  # fmt: skip
