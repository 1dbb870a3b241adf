"""Global average pooling of images, and its gradient. Shapes: x (N, C, H, W), y (N, C)."""

from math import prod
from operator import add
from typing import Any

from barellm.cpu.kernel import Op, Tensor, dims_of, kernel
from barellm.cpu.kernels.loops import accumulate, accumulate_scalar, columns, new_accumulators, row_grain, tree_reduce


def _constants(op: Op) -> dict[str, Any]:
    """`planes` of `pixels` for each of the run-time sizes `dims`."""
    images: Tensor = op.inputs.get("x") or op.dx
    pixels = prod(int(n) for n in images.shape[2:])
    return {"dims": dims_of(images), "planes": images.width // pixels, "pixels": pixels}


@kernel("mean_pixels", constants=_constants)
def mean_pixels(k, y, x, *, dims, planes, pixels, mode_y) -> None:
    with k.parallel_range(k.num_elements(dims, planes), row_grain(pixels)) as (begin, end), k.loop(begin, end) as plane:
        chains = new_accumulators(k, 4)
        for i, mask, j in columns(k, pixels):
            chains[j].value = chains[j].value + x.at(plane * pixels).load(i, mask)
        accumulate_scalar(k, y, plane, k.sum(tree_reduce(chains, add)) / float(pixels), mode_y)


@kernel("mean_pixels_backward", constants=_constants)
def mean_pixels_backward(k, dx, dy, *, dims, planes, pixels, mode_dx) -> None:
    with k.parallel_range(k.num_elements(dims, planes), row_grain(pixels)) as (begin, end), k.loop(begin, end) as plane:
        v, dst = k.splat(dy.get(plane) * (1.0 / pixels)), dx.at(plane * pixels)
        for i, mask, _ in columns(k, pixels):
            dst.store(accumulate(k, dst, i, mask, v, mode_dx), i, mask)
