"""Convolution on arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from barellm.errors import WrongType
from barellm.kernels.call import call
from barellm.kernels.function_spec import FunctionSpec
from barellm.kernels.options import boolean, integer, integer_or_pair

if TYPE_CHECKING:
    from barellm.kernels.arrays import Array


_CONV2D = FunctionSpec("conv2d", {"x": "N C H W", "w": "K G R S"}, ("N K P Q",))


def conv2d(
    x: Array, w: Array, *, stride: int | tuple[int, int] = 1, padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1, groups: int = 1, padding_mode: str = "zeros",
    flip_kernel: bool = False, algorithm: str = "auto", out: Array | None = None, **old_names: Any,
) -> Array:  # fmt: skip
    """Convolution of images, summed in fp32.

    Shapes: x (N, C, H, W), w (K, C / groups, R, S) -> (N, K, P, Q), with P = (H + 2 padding - dilation (R - 1) - 1) // stride + 1.
    Formula: y[n, k, p, q] = sum over c, r, s of w[k, c, r, s] x[n, c, p stride + r dilation - padding, likewise of q and s].
    Options: sizes are a number, or one for rows and one for columns. `padding_mode` is "zeros" or "reflect". `flip_kernel` reads
    the filter from its end: true convolution instead of cross-correlation. `algorithm` is "auto", "direct", "winograd2",
    "winograd4" or "fft". The old names `reflect=True` and `mirrored` are accepted too.
    Dtypes: float32 or bfloat16 each; the result has that of x. With x in bfloat16 direct sums may round w to it.
    Source: `barellm/cpu/kernels/conv/convolution.py`.

        y = kernels.conv2d(x, w, padding=1)
        y, vjp_fn = kernels.vjp(kernels.conv2d, x, w, padding=1)
        dx, dw = vjp_fn(dy)"""
    sizes: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation}
    sizes = {name: integer_or_pair("conv2d", name, size) for name, size in sizes.items()}
    sizes["groups"] = integer("conv2d", "groups", groups)
    if "reflect" in old_names:
        padding_mode = "reflect" if boolean("conv2d", "reflect", old_names.pop("reflect")) else "zeros"
    if "mirrored" in old_names:
        flip_kernel = boolean("conv2d", "mirrored", old_names.pop("mirrored"))
    if old_names:
        raise WrongType(f"conv2d() got an unexpected keyword argument {next(iter(old_names))!r}")
    how = {"padding_mode": padding_mode, "flip_kernel": boolean("conv2d", "flip_kernel", flip_kernel)}
    return call(_CONV2D, {"x": x, "w": w}, out, **sizes, **how, algorithm=algorithm)[0]
