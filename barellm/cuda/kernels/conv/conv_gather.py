"""Implicit im2col: the pixels under a filter's taps, gathered through indices, zero or reflected beyond the edge. No copy is made.

GATHER, a group of constants: image size H, W; output size P, Q; filter size R, S; first row offset of the taps and the step between
them, the same of columns; strides of rows and columns; whether padding reflects.
"""

from __future__ import annotations

from typing import Any

from barellm.cuda.kernel import Count
from barellm.cuda.lang import device, tl
from barellm.program.tensor import Dim, Tensor


@device
def reflect_index(at, SIZE: tl.constexpr):
    """The index inside the image that a reflected index stands for."""
    at = tl.abs(at)
    return tl.where(at < SIZE, at, 2 * (SIZE - 1) - at)


@device
def gather_pixels(x, image, i, j, d, inside, group, GROUPS: tl.constexpr, CHANNELS: tl.constexpr, GATHER: tl.constexpr):
    """x at depths `d` (channel and tap) of the output pixels (i, j) of images; zero beyond the image and where not `inside`."""
    H: tl.constexpr = GATHER[0]
    W: tl.constexpr = GATHER[1]
    R: tl.constexpr = GATHER[4]
    S: tl.constexpr = GATHER[5]
    channel, tap = d // (R * S), d % (R * S)
    row = i * GATHER[10] + tap // S * GATHER[7] + GATHER[6]
    column = j * GATHER[11] + tap % S * GATHER[9] + GATHER[8]
    if GATHER[12]:
        row, column = reflect_index(row, H), reflect_index(column, W)
    inside = inside & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    plane = (image.to(tl.int64) * GROUPS + group) * CHANNELS + channel
    return tl.load(x + plane * (H * W) + row * W + column, mask=inside, other=0.0)


def images_of(t: Tensor, inner: int = 1) -> Count:
    """`inner` times the number of images."""
    N = t.shape[0]
    return Count((N.name,), inner) if isinstance(N, Dim) else Count((), int(N) * inner)


def step_of(offsets: tuple[int, ...]) -> tuple[int, int]:
    """(first, step) of offsets that lie evenly apart."""
    return (offsets[0], offsets[1] - offsets[0] if len(offsets) > 1 else 0) if offsets else (0, 0)


def gather_constants(
    size: tuple[int, int], outputs: tuple[int, int], rows: tuple[int, ...], columns: tuple[int, ...], stride: tuple[int, int],
    reflect: bool,
) -> dict[str, Any]:  # fmt: skip
    """The constants of a convolution's gather by name, in the order of GATHER."""
    found: dict[str, Any] = dict(zip("HWPQRS", (*size, *outputs, len(rows), len(columns)), strict=True))
    found |= dict(zip(("R_FIRST", "R_STEP"), step_of(rows), strict=True))
    found |= dict(zip(("S_FIRST", "S_STEP"), step_of(columns), strict=True))
    return found | {"STRIDE_H": stride[0], "STRIDE_W": stride[1], "REFLECT": reflect}
