"""Global average pooling and its gradient. Shapes: x, dx (N, C, H, W), y, dy (N, C); PIXELS = H W."""

from __future__ import annotations

from typing import Any

from barellm.cuda.kernel import Lowering, lowering, mode
from barellm.cuda.kernels.common import MIN_SUM_COLUMNS, pow2, store_or_add
from barellm.cuda.kernels.conv.conv_gather import images_of
from barellm.cuda.lang import device, tl
from barellm.program.integers import ceil_div


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


@lowering("mean_pixels", starts="y")
def lower_mean_pixels(op: Any, c: Lowering) -> None:
    C, H, W = (int(n) for n in op.x.shape[1:])
    planes = images_of(op.x, C)
    constants = {"PIXELS": H * W, "MODE": mode(op, "y"), "BLOCK": max(MIN_SUM_COLUMNS, min(2048, pow2(H * W)))}
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
