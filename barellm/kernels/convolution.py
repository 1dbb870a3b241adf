"""Convolution on arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from barellm.kernels.call import call
from barellm.kernels.options import truth, whole, whole_or_pair
from barellm.kernels.rule import Rule

if TYPE_CHECKING:
    from barellm.kernels.arrays import Array
    from barellm.program.builder import Program
    from barellm.program.tensor import Tensor


def _conv2d(p: Program, x: Tensor, w: Tensor, **how: Any) -> Tensor:
    return p.conv2d(x, w, **how)


_CONV2D = Rule("conv2d", {"x": "N C H W", "w": "K G R S"}, ("N K P Q",), _conv2d)


def conv2d(
    x: Array, w: Array, *, stride: int | tuple[int, int] = 1, padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1, groups: int = 1, reflect: bool = False, mirrored: bool = False,
    algorithm: str = "auto", out: Array | None = None,
) -> Array:  # fmt: skip
    """Convolution of images, summed in fp32.

    Shapes: x (N, C, H, W), w (K, C / groups, R, S) -> (N, K, P, Q), with P = (H + 2 padding - dilation (R - 1) - 1) // stride + 1.
    Formula: y[n, k, p, q] = sum over c, r, s of w[k, c, r, s] x[n, c, p stride + r dilation - padding, likewise of q and s].
    Options: sizes are a number, or one for rows and one for columns. Beyond the image x is zero or, with `reflect`, its mirror
    image. `mirrored` reads the filter from its end. `algorithm` is "auto", "direct", "winograd2", "winograd4" or "fft".
    Dtypes: float32 or bfloat16 each; the result has that of x. With x in bfloat16 direct sums may round w to it.
    Source: `barellm/cpu/kernels/conv/convolution.py`.

        y = kernels.conv2d(x, w, padding=1)
        y, pull = kernels.vjp(kernels.conv2d, x, w, padding=1)
        dx, dw = pull(dy)
    """
    sizes: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation}
    sizes = {name: whole_or_pair("conv2d", name, size) for name, size in sizes.items()}
    sizes["groups"] = whole("conv2d", "groups", groups)
    flags = {"reflect": reflect, "mirrored": mirrored}
    how = {name: truth("conv2d", name, flag) for name, flag in flags.items()} | {"algorithm": algorithm}
    return call(_CONV2D, {"x": x, "w": w}, out, **sizes, **how)[0]
