"""Implicit im2col: the pixels under a filter's taps, gathered through indices, zero or reflected beyond the edge. No copy is made.

Names as in cuDNN: images (N, C, H, W), outputs (N, K, P, Q), filters (K, C, R, S). A tap (r, s) is an element of a filter; output
pixel (i, j) meets it at the row i STRIDE_H + R_FIRST + r R_STEP and the column j STRIDE_W + S_FIRST + s S_STEP of the image, where
FIRST holds the padding and STEP the dilation (negative where the filter is flipped).

GATHER, a tuple of constants: H, W, P, Q, R, S, R_FIRST, R_STEP, S_FIRST, S_STEP, STRIDE_H, STRIDE_W, REFLECT (padding reflects)."""

from __future__ import annotations

from typing import Any

from barellm.cuda.kernel import Count
from barellm.cuda.lang import device, tl
from barellm.program.tensor import Dim, Tensor


@device
def reflect_index(at, SIZE: tl.constexpr):
    """The row or column in [0, SIZE) of which `at`, less than SIZE beyond an edge, is the mirror image."""
    at = tl.abs(at)
    return tl.where(at < SIZE, at, 2 * (SIZE - 1) - at)


@device
def gather_pixels(x, image, i, j, d, inside, group, GROUPS: tl.constexpr, CHANNELS: tl.constexpr, GATHER: tl.constexpr):
    """Elements of the im2col matrix of x (N, GROUPS * CHANNELS, H, W): for output pixels (image, i, j) and depths d = (channel * R
    + r) * S + s of a group, int32 tensors that broadcast to one shape. Zero beyond the image and where not `inside`."""
    H: tl.constexpr = GATHER[0]
    W: tl.constexpr = GATHER[1]
    R: tl.constexpr = GATHER[4]
    S: tl.constexpr = GATHER[5]
    R_FIRST: tl.constexpr = GATHER[6]
    R_STEP: tl.constexpr = GATHER[7]
    S_FIRST: tl.constexpr = GATHER[8]
    S_STEP: tl.constexpr = GATHER[9]
    channel, tap = d // (R * S), d % (R * S)
    row = i * GATHER[10] + tap // S * R_STEP + R_FIRST  # GATHER[10], GATHER[11]: strides of rows and columns
    column = j * GATHER[11] + tap % S * S_STEP + S_FIRST
    if GATHER[12]:  # padding reflects
        row, column = reflect_index(row, H), reflect_index(column, W)
    inside = inside & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    plane = (image.to(tl.int64) * GROUPS + group) * CHANNELS + channel
    return tl.load(x + plane * (H * W) + row * W + column, mask=inside, other=0.0)


def images_of(t: Tensor, inner: int = 1) -> Count:
    """`inner` times the images N of t (N, ...), as a size of a run."""
    N = t.shape[0]
    return Count((N.name,), inner) if isinstance(N, Dim) else Count((), int(N) * inner)


def first_and_step(offsets: tuple[int, ...]) -> tuple[int, int]:
    """(first, step) of evenly spaced offsets; step 0 of one, (0, 0) of none."""
    return (offsets[0], offsets[1] - offsets[0] if len(offsets) > 1 else 0) if offsets else (0, 0)


def gather_constants(
    size: tuple[int, int], outputs: tuple[int, int], rows: tuple[int, ...], columns: tuple[int, ...], stride: tuple[int, int],
    reflect: bool,
) -> dict[str, Any]:  # fmt: skip
    """The constants of GATHER by name. `size`: (H, W); `outputs`: (P, Q); `rows`, `columns`: offsets of the R and S taps from an
    output pixel's first one."""
    found: dict[str, Any] = dict(zip("HWPQRS", (*size, *outputs, len(rows), len(columns)), strict=True))
    found |= dict(zip(("R_FIRST", "R_STEP"), first_and_step(rows), strict=True))
    found |= dict(zip(("S_FIRST", "S_STEP"), first_and_step(columns), strict=True))
    return found | {"STRIDE_H": stride[0], "STRIDE_W": stride[1], "REFLECT": reflect}
