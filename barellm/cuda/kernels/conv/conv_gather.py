"""What convolutions read of images: the pixels under a filter's elements, zero or mirrored beyond the edge."""

from __future__ import annotations

from typing import Any

from barellm.cuda.kernel import Count
from barellm.cuda.lang import device, tl
from barellm.program.tensor import Dim, Tensor


@device
def reflect_index(at, SIZE: tl.constexpr):
    """The index that a reflected one stands for."""
    at = tl.abs(at)
    return tl.where(at < SIZE, at, 2 * (SIZE - 1) - at)


@device
def gather_pixels(
    x, image, i, j, d, inside, group, GROUPS: tl.constexpr, CHANNELS: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, R_FIRST: tl.constexpr, R_STEP: tl.constexpr, S_FIRST: tl.constexpr, S_STEP: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, REFLECT: tl.constexpr,
):  # fmt: skip
    """What depths `d` see of x for the output pixels (i, j) of images; zero beyond the image and where not `inside`."""
    channel, tap = d // (R * S), d % (R * S)
    row = i * STRIDE_H + tap // S * R_STEP + R_FIRST
    column = j * STRIDE_W + tap % S * S_STEP + S_FIRST
    if REFLECT:
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
    """The constants of `seen`, but for the channels, and P and Q."""
    found: dict[str, Any] = {
        "H": size[0],
        "W": size[1],
        "P": outputs[0],
        "Q": outputs[1],
        "R": len(rows),
        "S": len(columns),
    }
    found |= dict(zip(("R_FIRST", "R_STEP"), step_of(rows), strict=True))
    found |= dict(zip(("S_FIRST", "S_STEP"), step_of(columns), strict=True))
    return found | {"STRIDE_H": stride[0], "STRIDE_W": stride[1], "REFLECT": reflect}
