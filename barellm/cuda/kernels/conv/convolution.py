"""Convolution and its gradients as products whose right operand is read through indices: no copy of the image is made.

Forward and input gradient: out (rows, pixels) = filters (rows, depth) seen (depth, pixels), for each group. A depth is (channel,
row, column of the filter), a pixel (image, row, column of the output). A filter's element lies at row A_ROW + channel A_CHANNEL +
A_FIRST + (its row) A_R + (its column) A_S. So the gradient reads the same filters the other way round, and a phase of a stride some
of them.
Weight gradient: dw (rows, depth) = dy (rows, pixels) seen^T, in parts of the pixels that are added in order.
"""

from __future__ import annotations

from typing import Any

from barellm.cuda import choices
from barellm.cuda.kernel import MODES, Lowering, lowering, mode
from barellm.cuda.kernels.common import store_or_add
from barellm.cuda.kernels.conv import conv_fft, winograd
from barellm.cuda.kernels.conv.conv_gather import gather_constants, gather_pixels, images_of, step_of
from barellm.cuda.kernels.conv.conv_transform_domain import (
    FpropAlgorithm,
    WgradAlgorithm,
    append_forward,
    append_gradient,
)
from barellm.cuda.kernels.gemm.split_k import SplitK, reduce_splits
from barellm.cuda.lang import device, tl
from barellm.program.integers import ceil_div
from barellm.program.ops.convolution import Conv2d, Conv2dDw, Conv2dDx, phases
from barellm.program.tensor import Tensor

ROWS, PIXELS, DEPTH = 64, 64, 32  # of a tile


@device
def conv_implicit_gemm(
    out, a, x, images, scalars, GROUPS: tl.constexpr, M: tl.constexpr, CHANNELS: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    P: tl.constexpr, Q: tl.constexpr, R: tl.constexpr, S: tl.constexpr, R_FIRST: tl.constexpr, R_STEP: tl.constexpr,
    S_FIRST: tl.constexpr, S_STEP: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, REFLECT: tl.constexpr,
    A_GROUP: tl.constexpr, A_ROW: tl.constexpr, A_CHANNEL: tl.constexpr, A_FIRST: tl.constexpr, A_R: tl.constexpr,
    A_S: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr, FIRST_H: tl.constexpr, FIRST_W: tl.constexpr,
    STEP_H: tl.constexpr, STEP_W: tl.constexpr, MODE: tl.constexpr, TF32: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """One tile of rows and pixels of a group. The tiles of one block of pixels follow each other: they read the same of x."""
    m = tl.program_id(0) % tl.cdiv(M, BM) * BM + tl.arange(0, BM)
    pixel = tl.program_id(0) // tl.cdiv(M, BM) * BN + tl.arange(0, BN)
    group = tl.program_id(1)
    image, i, j = pixel // (P * Q), pixel % (P * Q) // Q, pixel % Q
    there = pixel < images * (P * Q)
    acc = tl.zeros((BM, BN), tl.float32)
    for first in range(0, CHANNELS * R * S, BK):
        d = first + tl.arange(0, BK)
        in_depth = d < CHANNELS * R * S
        tap = d % (R * S)
        at = d // (R * S) * A_CHANNEL + A_FIRST + tap // S * A_R + tap % S * A_S
        filters = tl.load(
            a + group * A_GROUP + m[:, None] * A_ROW + at[None, :], mask=(m < M)[:, None] & in_depth[None, :], other=0.0
        )
        pixels = gather_pixels(
            x, image[None, :], i[None, :], j[None, :], d[:, None], there[None, :] & in_depth[:, None], group, GROUPS, CHANNELS, H,
            W, R, S, R_FIRST, R_STEP, S_FIRST, S_STEP, STRIDE_H, STRIDE_W, REFLECT,
        )  # fmt: skip
        acc = tl.dot(filters.to(pixels.dtype), pixels, acc, input_precision="tf32" if TF32 else "ieee")
    plane = (image.to(tl.int64)[None, :] * GROUPS + group) * M + m[:, None]
    to = plane * (OUT_H * OUT_W) + ((i * STEP_H + FIRST_H) * OUT_W + j * STEP_W + FIRST_W)[None, :]
    store_or_add(out + to, (m < M)[:, None] & there[None, :], acc, scalars, MODE)


@device
def conv_wgrad(
    out, dy, x, images, chunk, scalars, GROUPS: tl.constexpr, M: tl.constexpr, CHANNELS: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, R: tl.constexpr, S: tl.constexpr, R_FIRST: tl.constexpr,
    R_STEP: tl.constexpr, S_FIRST: tl.constexpr, S_STEP: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    REFLECT: tl.constexpr, TF32: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of a group's dw, of one part of the pixels: part s writes the s-th (GROUPS M, CHANNELS R S) of out."""
    m = tl.program_id(0) % tl.cdiv(M, BM) * BM + tl.arange(0, BM)
    d = tl.program_id(0) // tl.cdiv(M, BM) * BN + tl.arange(0, BN)
    group, part = tl.program_id(1), tl.program_id(2)
    total = images * (P * Q)
    acc = tl.zeros((BM, BN), tl.float32)
    for first in range(part * chunk, min((part + 1) * chunk, total), BK):
        pixel = first + tl.arange(0, BK)
        there = pixel < min((part + 1) * chunk, total)
        image, i, j = pixel // (P * Q), pixel % (P * Q) // Q, pixel % Q
        plane = (image.to(tl.int64)[None, :] * GROUPS + group) * M + m[:, None]
        gradients = tl.load(
            dy + plane * (P * Q) + (pixel % (P * Q))[None, :], mask=(m < M)[:, None] & there[None, :], other=0.0
        )
        pixels = gather_pixels(
            x, image[:, None], i[:, None], j[:, None], d[None, :], there[:, None] & (d < CHANNELS * R * S)[None, :], group, GROUPS,
            CHANNELS, H, W, R, S, R_FIRST, R_STEP, S_FIRST, S_STEP, STRIDE_H, STRIDE_W, REFLECT,
        )  # fmt: skip
        acc = tl.dot(gradients, pixels, acc, input_precision="tf32" if TF32 else "ieee")
    to = (((part * GROUPS + group) * M + m[:, None]).to(tl.int64)) * (CHANNELS * R * S) + d[None, :]
    tl.store(out + to, acc, mask=(m < M)[:, None] & (d < CHANNELS * R * S)[None, :])


@device
def fold_reflected(
    dx, padded, n, scalars, H: tl.constexpr, W: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """dx (planes, H, W): each pixel gets what it and its mirror images in the padded image got."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n.to(tl.int64) * (H * W)
    plane, y, x = at // (H * W), at % (H * W) // W, at % W
    total = tl.zeros((BLOCK,), tl.float32)
    for row in tl.static_range(3):
        for column in tl.static_range(3):
            i, rows_in = image_of(y, row, H, TOP)
            j, columns_in = image_of(x, column, W, LEFT)
            place = (plane * (H + 2 * TOP) + i) * (W + 2 * LEFT) + j
            total += tl.load(padded + place, mask=mask & rows_in & columns_in, other=0.0)
    store_or_add(dx + at, mask, total, scalars, MODE)


@device
def image_of(at, NUMBER: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr):
    """Where a pixel lies in the padded axis (NUMBER 0), or its mirror image before (1) or behind (2) it; whether there is one."""
    if NUMBER == 0:
        place, there = at + PAD, at >= 0
    elif NUMBER == 1:
        place, there = PAD - at, (at > 0) & (at <= PAD)
    else:
        place, there = PAD + 2 * (SIZE - 1) - at, (at < SIZE - 1) & (at >= SIZE - 1 - PAD)
    return place, there


def algorithms(algorithm: str, R: int, S: int) -> tuple[FpropAlgorithm, WgradAlgorithm] | None:
    """The ways over positions, None for the direct algorithm. "auto" is that: nobody has compared them on a GPU yet."""
    if algorithm == "fft":
        return conv_fft.algorithms(R, S)
    return winograd.algorithms(int(algorithm[-1])) if algorithm.startswith("winograd") else None


def append_conv(
    c: Lowering, *, algorithm: str, out: Any, a: Tensor, x: Tensor, rows: int, constants: dict[str, Any]
) -> None:
    """Append one convolution. `constants`: of `conv_product`, but for those of its tile."""
    if found := algorithms(algorithm, constants["R"], constants["S"]):
        append_forward(c, found[0], out=out, a=a, x=x, rows=rows, constants=constants)
        return
    pixels = images_of(x, constants["P"] * constants["Q"])
    constants |= {"M": rows, "TF32": c.target.tf32 or None, "BM": ROWS, "BN": PIXELS, "BK": DEPTH}
    c.launch(
        conv_implicit_gemm, {"out": out, "a": a, "x": x, "images": images_of(x)}, constants,
        grid=lambda s: (ceil_div(pixels(s), PIXELS) * ceil_div(rows, ROWS), constants["GROUPS"]), writes="out",
    )  # fmt: skip


@lowering("conv2d", starts="y")
def lower_conv2d(op: Conv2d, c: Lowering) -> None:
    K, C, R, S = (int(n) for n in op.w.shape)
    H, W = (int(n) for n in op.x.shape[2:])
    P, Q = op.output_size(H, W, R, S)
    constants = gather_constants((H, W), (P, Q), *op.offsets(R, S), op.stride, op.reflect)
    constants |= {"GROUPS": op.groups, "CHANNELS": C, "A_GROUP": K // op.groups * C * R * S, "A_ROW": C * R * S}
    constants |= {
        "A_CHANNEL": R * S,
        "A_FIRST": 0,
        "A_R": S,
        "A_S": 1,
        "OUT_H": P,
        "OUT_W": Q,
        "FIRST_H": 0,
        "FIRST_W": 0,
    }
    constants |= {"STEP_H": 1, "STEP_W": 1, "MODE": mode(op, "y")}
    append_conv(c, algorithm=op.algorithm, out=op.y, a=op.w, x=op.x, rows=K // op.groups, constants=constants)


@lowering("conv2d_dx", starts="dx")
def lower_conv2d_dx(op: Conv2dDx, c: Lowering) -> None:
    """One product for each phase of a stride. Behind a reflected padding lies the gradient of the padded image, which is folded."""
    K, C, R, S = (int(n) for n in op.w.shape)
    (H, W), (top, left) = op.size, op.padding
    (row_offsets, column_offsets), out, how = op.offsets(R, S), op.dx, mode(op, "dx")
    if op.reflect:
        H, W = H + 2 * top, W + 2 * left
        row_offsets, column_offsets = tuple(r + top for r in row_offsets), tuple(s + left for s in column_offsets)
        out, how = c.scratch("padded", (int(op.dy.shape[0]), op.groups * C, H, W)), MODES["store"]
    source = (int(op.dy.shape[2]), int(op.dy.shape[3]))
    for y, (P, rows, row_at) in enumerate(phases(row_offsets, op.stride[0], H)):
        for x, (Q, columns, column_at) in enumerate(phases(column_offsets, op.stride[1], W)):
            none = not (rows and columns)
            constants = gather_constants(source, (P, Q), row_at, column_at, (1, 1), False)
            if none:  # no output saw these pixels: a depth of nothing
                constants |= {"R": 1, "S": 1}
            (r, r_step), (s, s_step) = step_of(rows), step_of(columns)
            constants |= {
                "GROUPS": op.groups,
                "CHANNELS": 0 if none else K // op.groups,
                "A_GROUP": K // op.groups * C * R * S,
            }
            constants |= {
                "A_ROW": R * S,
                "A_CHANNEL": C * R * S,
                "A_FIRST": r * S + s,
                "A_R": r_step * S,
                "A_S": s_step,
            }
            constants |= {
                "OUT_H": H,
                "OUT_W": W,
                "FIRST_H": y,
                "FIRST_W": x,
                "STEP_H": op.stride[0],
                "STEP_W": op.stride[1],
            }
            constants |= {"MODE": how}
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
    (R, S), groups = op.size, op.groups
    K, C, H, W = int(op.dy.shape[1]) // groups, int(op.x.shape[1]) // groups, int(op.x.shape[2]), int(op.x.shape[3])
    P, Q = (int(n) for n in op.dy.shape[2:])
    wide = PIXELS if op.x.dtype != "fp32" else PIXELS // 2  # fp32 products hold their operands in registers
    constants = gather_constants((H, W), (P, Q), *op.offsets(R, S), op.stride, op.reflect)
    constants |= {
        "GROUPS": groups,
        "M": K,
        "CHANNELS": C,
    }
    if found := algorithms(op.algorithm, R, S):
        append_gradient(c, found[1], dw=op.dw, dy=op.dy, x=op.x, constants=constants, mode=mode(op, "dw"))
        return
    constants |= {"TF32": c.target.tf32 or None, "BM": ROWS, "BN": wide, "BK": DEPTH}
    tiles = ceil_div(K, ROWS) * ceil_div(C * R * S, wide)
    split = SplitK(images_of(op.x, P * Q), tiles * groups)
    parts = choices.most_splits(tiles * groups, int(op.x.shape[0]) * P * Q)
    partials = c.scratch("partials", (parts, op.dw.size))
    c.launch(
        conv_wgrad, {"out": partials, "dy": op.dy, "x": op.x, "images": images_of(op.x), "chunk": split}, constants,
        grid=lambda s: (tiles, groups, split.count(s)), writes="out",
    )  # fmt: skip
    reduce_splits(c, op.dw, partials, split.count, op.dw.size, mode(op, "dw"))
