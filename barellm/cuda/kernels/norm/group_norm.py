"""GroupNorm (Wu and He 2018) and global average pooling, with their gradients.

Shapes: x, y, dx, dy (N, C, H, W); weight, bias (C); mean, rstd (N, GROUPS) fp32; PIXELS = H W. A row is one group of one image:
GROUP_CHANNELS = C / GROUPS channels, M = GROUP_CHANNELS * PIXELS contiguous elements. A program has one row and reads it BLOCK
elements at a time, again for each sum that needs the one before, out of L2. n: the normalized row (x - mean) rstd; dn = dy
weight."""

from __future__ import annotations

from typing import Any

from barellm.cuda.kernel import Lowering, lowering, mode
from barellm.cuda.kernels.common import MIN_SUM_COLUMNS, pow2, store_or_add
from barellm.cuda.kernels.conv.conv_gather import images_of
from barellm.cuda.lang import device, tl
from barellm.program.integers import ceil_div

MAX_BLOCK = 2048  # elements of a row in registers at a time


@device
def group_norm(
    y, mean, rstd, x, weight, bias, GROUPS: tl.constexpr, GROUP_CHANNELS: tl.constexpr, PIXELS: tl.constexpr, EPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """y = n weight + bias, mean and rstd of one row, read three times: for the mean, the variance, and y."""
    M: tl.constexpr = GROUP_CHANNELS * PIXELS
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, M, BLOCK):
        i = first + column
        total += tl.load(x + row * M + i, mask=i < M, other=0.0).to(tl.float32)
    centre = tl.sum(total, 0) / M
    squares = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, M, BLOCK):
        i = first + column
        d = tl.where(i < M, tl.load(x + row * M + i, mask=i < M, other=0.0).to(tl.float32) - centre, 0.0)
        squares += d * d
    inverse = 1.0 / tl.sqrt(tl.sum(squares, 0) / M + EPS)
    tl.store(mean + row, centre)
    tl.store(rstd + row, inverse)
    for first in range(0, M, BLOCK):
        i = first + column
        channel = row % GROUPS * GROUP_CHANNELS + i // PIXELS
        n = (tl.load(x + row * M + i, mask=i < M, other=0.0).to(tl.float32) - centre) * inverse
        w = tl.load(weight + channel, mask=i < M, other=0.0)
        tl.store(y + row * M + i, n * w + tl.load(bias + channel, mask=i < M, other=0.0), mask=i < M)


@device
def group_norm_dx(
    dx, dy, x, weight, mean, rstd, scalars, GROUPS: tl.constexpr, GROUP_CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
    MODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx = rstd (dn - mean(dn) - n mean(dn n)) of one row, read twice: for the two means, and for dx."""
    M: tl.constexpr = GROUP_CHANNELS * PIXELS
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    centre, inverse = tl.load(mean + row), tl.load(rstd + row)
    dn_sums, dnn_sums = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(0, M, BLOCK):
        n, dn = load_factors(dy, x, weight, row, first + column, centre, inverse, GROUPS, GROUP_CHANNELS, PIXELS)
        dn_sums += dn
        dnn_sums += dn * n
    a, b = tl.sum(dn_sums, 0) / M, tl.sum(dnn_sums, 0) / M
    for first in range(0, M, BLOCK):
        i = first + column
        n, dn = load_factors(dy, x, weight, row, i, centre, inverse, GROUPS, GROUP_CHANNELS, PIXELS)
        store_or_add(dx + row * M + i, i < M, inverse * (dn - a - n * b), scalars, MODE)


@device
def load_factors(dy, x, weight, row, i, centre, inverse, GROUPS: tl.constexpr, GROUP_CHANNELS: tl.constexpr, PIXELS: tl.constexpr):
    """n and dn of the elements i (BLOCK,) of a row; dn is zero beyond it. `centre`, `inverse`: the row's mean and rstd."""
    mask = i < GROUP_CHANNELS * PIXELS
    at = row * (GROUP_CHANNELS * PIXELS) + i
    n = (tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - centre) * inverse
    w = tl.load(weight + row % GROUPS * GROUP_CHANNELS + i // PIXELS, mask=mask, other=0.0)
    return n, tl.load(dy + at, mask=mask, other=0.0).to(tl.float32) * w


@device
def group_norm_dparams(
    dweight, dbias, dy, x, mean, rstd, images, scalars, GROUPS: tl.constexpr, CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
    WEIGHT_MODE: tl.constexpr, BIAS_MODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dweight = sum(dy n) and dbias = sum(dy) of one channel (None where not wanted), over all images in order. CHANNELS: C."""
    channel, column = tl.program_id(0), tl.arange(0, BLOCK)
    dweight_sums, dbias_sums = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for image in range(images):
        row = image * GROUPS + channel // (CHANNELS // GROUPS)
        centre, inverse = tl.load(mean + row), tl.load(rstd + row)
        plane = (tl.cast(image, tl.int64) * CHANNELS + channel) * PIXELS
        for first in range(0, PIXELS, BLOCK):
            i = first + column
            d = tl.load(dy + plane + i, mask=i < PIXELS, other=0.0).to(tl.float32)
            dbias_sums += d
            dweight_sums += d * (tl.load(x + plane + i, mask=i < PIXELS, other=0.0).to(tl.float32) - centre) * inverse
    one = tl.arange(0, 1)
    if dweight is not None:
        store_or_add(dweight + channel + one, one == 0, tl.sum(dweight_sums, 0), scalars, WEIGHT_MODE)
    if dbias is not None:
        store_or_add(dbias + channel + one, one == 0, tl.sum(dbias_sums, 0), scalars, BIAS_MODE)


@device
def mean_pixels(y, x, scalars, PIXELS: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr):
    """y (N, C) = the mean of the pixels of x. A program has one channel of one image."""
    plane, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, PIXELS, BLOCK):
        i = first + column
        total += tl.load(x + plane * PIXELS + i, mask=i < PIXELS, other=0.0).to(tl.float32)
    one = tl.arange(0, 1)
    store_or_add(y + plane + one, one == 0, tl.sum(total, 0) / PIXELS, scalars, MODE)


@device
def mean_pixels_backward(dx, dy, n, scalars, PIXELS: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr):
    """dx (n, PIXELS) = dy / PIXELS."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n.to(tl.int64) * PIXELS
    store_or_add(dx + i, mask, tl.load(dy + i // PIXELS, mask=mask, other=0.0).to(tl.float32) / PIXELS, scalars, MODE)


def block_of(n: int) -> int:
    """BLOCK for rows of n elements."""
    return max(MIN_SUM_COLUMNS, min(MAX_BLOCK, pow2(n)))


def shape_of(op: Any, groups: int) -> dict[str, int]:
    """The constants that the kernels of rows take."""
    C, H, W = (int(n) for n in op.x.shape[1:])
    return {"GROUPS": groups, "GROUP_CHANNELS": C // groups, "PIXELS": H * W, "BLOCK": block_of(C // groups * H * W)}


@lowering("group_norm")
def lower_group_norm(op: Any, c: Lowering) -> None:
    names = ("y", "mean", "rstd", "x", "weight", "bias")
    rows = images_of(op.x, op.groups)
    constants = {**shape_of(op, op.groups), "EPS": float(op.eps)}
    c.launch(group_norm, {n: getattr(op, n) for n in names}, constants, grid=lambda s: (rows(s),), writes="y mean rstd")


@lowering("group_norm_dx", starts="dx")
def lower_group_norm_dx(op: Any, c: Lowering) -> None:
    names, groups = ("dx", "dy", "x", "weight", "mean", "rstd"), int(op.mean.shape[1])
    rows = images_of(op.x, groups)
    constants = {**shape_of(op, groups), "MODE": mode(op, "dx")}
    c.launch(group_norm_dx, {n: getattr(op, n) for n in names}, constants, grid=lambda s: (rows(s),), writes="dx")


@lowering("group_norm_dparams", starts="dweight dbias")
def lower_group_norm_dparams(op: Any, c: Lowering) -> None:
    C, H, W = (int(n) for n in op.x.shape[1:])
    operands = {n: op.inputs[n] for n in ("dy", "x", "mean", "rstd")} | {"images": images_of(op.x)}
    operands |= {n: op.outputs.get(n) for n in ("dweight", "dbias")}
    modes = {f"{n.upper()}_MODE": mode(op, f"d{n}") for n in ("weight", "bias")}
    constants = {"GROUPS": int(op.mean.shape[1]), "CHANNELS": C, "PIXELS": H * W, "BLOCK": block_of(H * W), **modes}
    c.launch(group_norm_dparams, operands, constants, grid=lambda s: (C,), writes="dweight dbias")


@lowering("mean_pixels", starts="y")
def lower_mean_pixels(op: Any, c: Lowering) -> None:
    C, H, W = (int(n) for n in op.x.shape[1:])
    planes = images_of(op.x, C)
    constants = {"PIXELS": H * W, "MODE": mode(op, "y"), "BLOCK": block_of(H * W)}
    c.launch(mean_pixels, {"y": op.y, "x": op.x}, constants, grid=lambda s: (planes(s),), writes="y")


@lowering("mean_pixels_backward", starts="dx")
def lower_mean_pixels_backward(op: Any, c: Lowering) -> None:
    C, H, W = (int(n) for n in op.dx.shape[1:])
    planes = images_of(op.dx, C)
    constants = {"PIXELS": H * W, "MODE": mode(op, "dx"), "BLOCK": 1024}
    c.launch(
        mean_pixels_backward, {"dx": op.dx, "dy": op.dy, "n": planes}, constants,
        grid=lambda s: (ceil_div(planes(s) * H * W, 1024),), writes="dx",
    )  # fmt: skip
