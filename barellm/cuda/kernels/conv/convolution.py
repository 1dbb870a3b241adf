"""Convolution by implicit GEMM: fprop, dgrad and wgrad as GEMMs whose right operand is gathered through indices (conv_gather.py).

fprop and dgrad: out (rows, pixels) = filters (rows, depth) gathered x (depth, pixels), for each group. `rows` (M) are the output
channels of a group, CHANNELS its input channels (in dgrad the other way round); a depth is (channel, r, s), a pixel (image, row,
column of the output). wgrad: dw (rows, depth) = dy (rows, pixels) gathered x^T, with split-K over the pixels.

Tuples of constants: GATHER (conv_gather.py), and

    FILTER  where a filter's element lies: strides of group, row and channel, offset of the first tap, strides of r and s; so dgrad
            reads the same filters flipped, and a phase of a stride some of their taps
    OUTPUT  where a pixel (i, j) goes: height and width of out, first row and column, row and column step"""

from __future__ import annotations

from typing import Any

from barellm.cuda import gemm_config
from barellm.cuda.kernel import MODES, Lowering, lowering, mode
from barellm.cuda.kernels.common import store_or_add
from barellm.cuda.kernels.conv.conv_gather import first_and_step, gather_constants, gather_pixels, images_of
from barellm.cuda.kernels.gemm.split_k import SplitK, reduce_splits
from barellm.cuda.lang import device, tl
from barellm.program.integers import ceil_div
from barellm.program.ops.convolution import Conv2d, Conv2dDw, Conv2dDx, phases
from barellm.program.tensor import Tensor

ROWS, PIXELS, DEPTH = 64, 64, 32  # a tile of the result (M, N), and of K for each step


@device
def conv_implicit_gemm(
    out, a, x, images, scalars, GROUPS: tl.constexpr, M: tl.constexpr, CHANNELS: tl.constexpr, GATHER: tl.constexpr,
    FILTER: tl.constexpr, OUTPUT: tl.constexpr, MODE: tl.constexpr, TF32: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """One (BM, BN) tile of rows and pixels of a group (axis 1 of the grid) of out (N, GROUPS * M, OUT_H, OUT_W), from filters `a`
    and x (N, GROUPS * CHANNELS, H, W). The tiles of one block of pixels follow each other: they read the same of x."""
    P: tl.constexpr = GATHER[2]
    Q: tl.constexpr = GATHER[3]
    R: tl.constexpr = GATHER[4]
    S: tl.constexpr = GATHER[5]
    m = tl.program_id(0) % tl.cdiv(M, BM) * BM + tl.arange(0, BM)
    pixel = tl.program_id(0) // tl.cdiv(M, BM) * BN + tl.arange(0, BN)
    group = tl.program_id(1)
    image, i, j = pixel // (P * Q), pixel % (P * Q) // Q, pixel % Q
    live = pixel < images * (P * Q)
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, CHANNELS * R * S, BK):
        d = k0 + tl.arange(0, BK)
        depth_in = d < CHANNELS * R * S
        tap = d % (R * S)  # r * S + s
        filter_offset = d // (R * S) * FILTER[2] + FILTER[3] + tap // S * FILTER[4] + tap % S * FILTER[5]
        filter_block = tl.load(
            a + group * FILTER[0] + m[:, None] * FILTER[1] + filter_offset[None, :],
            mask=(m < M)[:, None] & depth_in[None, :],
            other=0.0,
        )
        pixels = gather_pixels(
            x, image[None, :], i[None, :], j[None, :], d[:, None], live[None, :] & depth_in[:, None], group, GROUPS,
            CHANNELS, GATHER,
        )  # fmt: skip
        acc = tl.dot(filter_block.to(pixels.dtype), pixels, acc, input_precision="tf32" if TF32 else "ieee")
    plane = (image.to(tl.int64)[None, :] * GROUPS + group) * M + m[:, None]
    offset = plane * (OUTPUT[0] * OUTPUT[1]) + ((i * OUTPUT[4] + OUTPUT[2]) * OUTPUT[1] + j * OUTPUT[5] + OUTPUT[3])[None, :]
    store_or_add(out + offset, (m < M)[:, None] & live[None, :], acc, scalars, MODE)


@device
def conv_wgrad(
    out, dy, x, images, chunk, scalars, GROUPS: tl.constexpr, M: tl.constexpr, CHANNELS: tl.constexpr, GATHER: tl.constexpr,
    TF32: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One (BM, BN) tile of a group's dw (M, CHANNELS * R * S) over one split-K slice of `chunk` pixels: out (slices, GROUPS * M,
    CHANNELS * R * S), from dy (N, GROUPS * M, P, Q) and x. Grid: tiles, groups, slices."""
    P: tl.constexpr = GATHER[2]
    Q: tl.constexpr = GATHER[3]
    R: tl.constexpr = GATHER[4]
    S: tl.constexpr = GATHER[5]
    m = tl.program_id(0) % tl.cdiv(M, BM) * BM + tl.arange(0, BM)
    d = tl.program_id(0) // tl.cdiv(M, BM) * BN + tl.arange(0, BN)
    group, slice = tl.program_id(1), tl.program_id(2)
    total = images * (P * Q)
    acc = tl.zeros((BM, BN), tl.float32)
    for pixel0 in range(slice * chunk, min((slice + 1) * chunk, total), BK):
        pixel = pixel0 + tl.arange(0, BK)
        live = pixel < min((slice + 1) * chunk, total)
        image, i, j = pixel // (P * Q), pixel % (P * Q) // Q, pixel % Q
        plane = (image.to(tl.int64)[None, :] * GROUPS + group) * M + m[:, None]
        gradients = tl.load(dy + plane * (P * Q) + (pixel % (P * Q))[None, :], mask=(m < M)[:, None] & live[None, :], other=0.0)
        pixels = gather_pixels(
            x, image[:, None], i[:, None], j[:, None], d[None, :], live[:, None] & (d < CHANNELS * R * S)[None, :], group, GROUPS,
            CHANNELS, GATHER,
        )  # fmt: skip
        acc = tl.dot(gradients, pixels, acc, input_precision="tf32" if TF32 else "ieee")
    offset = (((slice * GROUPS + group) * M + m[:, None]).to(tl.int64)) * (CHANNELS * R * S) + d[None, :]
    tl.store(out + offset, acc, mask=(m < M)[:, None] & (d < CHANNELS * R * S)[None, :])


@device
def fold_reflected(
    dx, padded, n, scalars, H: tl.constexpr, W: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of reflection padding: dx (n, H, W) = the sums of the elements of `padded` (n, H + 2 TOP, W + 2 LEFT), the
    gradient of the padded image, that are copies of a pixel: itself, and its mirror images at up to two edges of each axis."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n.to(tl.int64) * (H * W)
    plane, y, x = at // (H * W), at % (H * W) // W, at % W
    total = tl.zeros((BLOCK,), tl.float32)
    for row in tl.static_range(3):
        for column in tl.static_range(3):
            i, rows_in = padded_place(y, row, H, TOP)
            j, columns_in = padded_place(x, column, W, LEFT)
            place = (plane * (H + 2 * TOP) + i) * (W + 2 * LEFT) + j
            total += tl.load(padded + place, mask=mask & rows_in & columns_in, other=0.0)
    store_or_add(dx + at, mask, total, scalars, MODE)


@device
def padded_place(at, NUMBER: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr):
    """The place in a padded axis, SIZE + 2 PAD long, of pixel `at` (NUMBER 0) or of its mirror image before (1) or behind (2) the
    image; and whether there is one."""
    if NUMBER == 0:
        place, exists = at + PAD, at >= 0
    elif NUMBER == 1:
        place, exists = PAD - at, (at > 0) & (at <= PAD)
    else:
        place, exists = PAD + 2 * (SIZE - 1) - at, (at < SIZE - 1) & (at >= SIZE - 1 - PAD)
    return place, exists


def check_algorithm(algorithm: str) -> None:
    """ValueError for Winograd's and Fourier transforms, which the CPU has (docs/decisions/059, 060)."""
    if algorithm not in ("auto", "direct"):
        raise ValueError(f"algorithm is {algorithm!r}, on cuda expected auto or direct")


GATHER = ("H", "W", "P", "Q", "R", "S", "R_FIRST", "R_STEP", "S_FIRST", "S_STEP", "STRIDE_H", "STRIDE_W", "REFLECT")
FILTER = ("A_GROUP", "A_ROW", "A_CHANNEL", "A_FIRST", "A_R", "A_S")
OUTPUT = ("OUT_H", "OUT_W", "FIRST_H", "FIRST_W", "STEP_H", "STEP_W")


def grouped(constants: dict[str, Any]) -> dict[str, Any]:
    """The constants of a launch, with those named in GATHER, FILTER and OUTPUT as the tuples that the kernels take."""
    names = {"GATHER": GATHER, "FILTER": FILTER, "OUTPUT": OUTPUT}
    groups = {name: tuple(constants[n] for n in names[name]) for name in names if names[name][0] in constants}
    return groups | {name: value for name, value in constants.items() if name not in GATHER + FILTER + OUTPUT}


def append_conv(c: Lowering, *, algorithm: str, out: Any, a: Tensor, x: Tensor, rows: int, constants: dict[str, Any]) -> None:
    """Append one fprop or dgrad: out from filters `a` and x, `rows` output channels of each group. `constants`: those of
    `conv_implicit_gemm` by their names in GATHER, FILTER and OUTPUT, without the tile's."""
    check_algorithm(algorithm)
    pixels = images_of(x, constants["P"] * constants["Q"])
    constants |= {"M": rows, "TF32": c.target.tf32 or None, "BM": ROWS, "BN": PIXELS, "BK": DEPTH}
    constants = grouped(constants)
    c.launch(
        conv_implicit_gemm, {"out": out, "a": a, "x": x, "images": images_of(x)}, constants,
        grid=lambda s: (ceil_div(pixels(s), PIXELS) * ceil_div(rows, ROWS), constants["GROUPS"]), writes="out",
    )  # fmt: skip


@lowering("conv2d", starts="y")
def lower_conv2d(op: Conv2d, c: Lowering) -> None:
    """fprop: filters (K, C / groups, R, S) as they lie, outputs one after the other."""
    K, C, R, S = (int(n) for n in op.w.shape)
    H, W = (int(n) for n in op.x.shape[2:])
    P, Q = op.output_size(H, W, R, S)
    constants = gather_constants((H, W), (P, Q), *op.offsets(R, S), op.stride, op.reflect)
    constants |= {"GROUPS": op.groups, "CHANNELS": C, "A_GROUP": K // op.groups * C * R * S, "A_ROW": C * R * S}
    constants |= {"A_CHANNEL": R * S, "A_FIRST": 0, "A_R": S, "A_S": 1}
    constants |= {"OUT_H": P, "OUT_W": Q, "FIRST_H": 0, "FIRST_W": 0, "STEP_H": 1, "STEP_W": 1}
    constants |= {"MODE": mode(op, "y")}
    append_conv(c, algorithm=op.algorithm, out=op.y, a=op.w, x=op.x, rows=K // op.groups, constants=constants)


@lowering("conv2d_dx", starts="dx")
def lower_conv2d_dx(op: Conv2dDx, c: Lowering) -> None:
    """dgrad: one convolution of dy with flipped filters for each phase of a stride, stride_h * stride_w in all: the pixels (y, x)
    of dx modulo the strides, which only some of the taps reach. With reflect padding out is the gradient of the padded image, which
    `fold_reflected` adds up."""
    K, C, R, S = (int(n) for n in op.w.shape)
    (H, W), (top, left) = op.size, op.padding
    (row_offsets, column_offsets), out, out_mode = op.offsets(R, S), op.dx, mode(op, "dx")
    if op.reflect:
        H, W = H + 2 * top, W + 2 * left
        row_offsets, column_offsets = tuple(r + top for r in row_offsets), tuple(s + left for s in column_offsets)
        out, out_mode = c.scratch("padded", (int(op.dy.shape[0]), op.groups * C, H, W)), MODES["store"]
    source = (int(op.dy.shape[2]), int(op.dy.shape[3]))
    for y, (P, rows, row_at) in enumerate(phases(row_offsets, op.stride[0], H)):
        for x, (Q, columns, column_at) in enumerate(phases(column_offsets, op.stride[1], W)):
            none = not (rows and columns)
            constants = gather_constants(source, (P, Q), row_at, column_at, (1, 1), False)
            if none:  # no output reads these pixels: a GEMM of depth 0 writes zeros
                constants |= {"R": 1, "S": 1}
            (r, r_step), (s, s_step) = first_and_step(rows), first_and_step(columns)
            constants |= {"GROUPS": op.groups, "CHANNELS": 0 if none else K // op.groups}
            constants |= {"A_GROUP": K // op.groups * C * R * S, "A_ROW": R * S, "A_CHANNEL": C * R * S}  # rows: channels
            constants |= {"A_FIRST": r * S + s, "A_R": r_step * S, "A_S": s_step}
            constants |= {"OUT_H": H, "OUT_W": W, "FIRST_H": y, "FIRST_W": x}
            constants |= {"STEP_H": op.stride[0], "STEP_W": op.stride[1], "MODE": out_mode}
            append_conv(c, algorithm=op.algorithm, out=out, a=op.w, x=op.dy, rows=C, constants=constants)
    if op.reflect:
        planes = images_of(op.dy, op.groups * C)
        sizes = {"H": op.size[0], "W": op.size[1], "TOP": top, "LEFT": left, "MODE": mode(op, "dx"), "BLOCK": 256}
        c.launch(
            fold_reflected, {"dx": op.dx, "padded": out, "n": planes}, sizes,
            grid=lambda s: (ceil_div(planes(s) * op.size[0] * op.size[1], 256),), writes="dx",
        )  # fmt: skip


@lowering("conv2d_dw", starts="dw")
def lower_conv2d_dw(op: Conv2dDw, c: Lowering) -> None:
    """wgrad, with split-K over the pixels: partial sums of slices, added in order."""
    (R, S), groups = op.size, op.groups
    K, C, H, W = int(op.dy.shape[1]) // groups, int(op.x.shape[1]) // groups, int(op.x.shape[2]), int(op.x.shape[3])
    P, Q = (int(n) for n in op.dy.shape[2:])
    tile_n = PIXELS if op.x.dtype != "fp32" else PIXELS // 2  # fp32 GEMMs hold their operands in registers
    constants = gather_constants((H, W), (P, Q), *op.offsets(R, S), op.stride, op.reflect)
    constants |= {"GROUPS": groups, "M": K, "CHANNELS": C}
    check_algorithm(op.algorithm)
    constants = grouped(constants | {"TF32": c.target.tf32 or None, "BM": ROWS, "BN": tile_n, "BK": DEPTH})
    tiles = ceil_div(K, ROWS) * ceil_div(C * R * S, tile_n)
    split = SplitK(images_of(op.x, P * Q), tiles * groups)
    slices = gemm_config.max_splits(tiles * groups, int(op.x.shape[0]) * P * Q)
    partials = c.scratch("partials", (slices, op.dw.size))
    c.launch(
        conv_wgrad, {"out": partials, "dy": op.dy, "x": op.x, "images": images_of(op.x), "chunk": split}, constants,
        grid=lambda s: (tiles, groups, split.count(s)), writes="out",
    )  # fmt: skip
    reduce_splits(c, op.dw, partials, split.count, op.dw.size, mode(op, "dw"))
