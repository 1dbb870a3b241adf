"""GroupNorm of images, and its gradients. A row is a group of an image, M adjacent numbers.

One thread reads a row, again for each sum that depends on the one before: it stays in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import add
from typing import Any

from barellm.cpu.kernel import KernelBuilder, dims_of, kernel
from barellm.cpu.kernels.loops import (
    accumulate,
    accumulate_scalar,
    foreach_column,
    new_accumulators,
    row_grain,
    tree_reduce,
)
from barellm.cpu.lang import Pointer, Value
from barellm.program.ops.base import Op
from barellm.program.tensor import Dim

CHAINS = 4


def shape_of(op: Op) -> dict[str, Any]:
    """Constants: `count` images for each of `dims`, of `channels` channels of `pixels` pixels, and their `groups`."""
    N, C, H, W = op.x.shape
    groups = int((op.mean if "mean" in op.inputs else op.outputs["mean"]).shape[1])
    count = 1 if isinstance(N, Dim) else int(N)
    return {"dims": dims_of(op.x), "count": count, "channels": int(C), "pixels": int(H) * int(W), "groups": groups}


def summed(k: KernelBuilder, M: int, terms: Callable[[Any, Value | None], list[Value]], count: int) -> list[Value]:
    """`count` sums over M numbers: terms(index, mask) gives the vector that goes into each."""
    chains = [new_accumulators(k, CHAINS) for _ in range(count)]

    def body(i: Any, mask: Value | None, j: int) -> None:
        for chain, v in zip(chains, terms(i, mask), strict=True):
            chain[j].value = chain[j].value + (v if mask is None else k.select(mask, v, 0.0))

    foreach_column(k, M, body, unroll=CHAINS)
    return [k.sum(tree_reduce(chain, add)) for chain in chains]


@kernel("group_norm", constants=lambda op: {**shape_of(op), "eps": float(op.eps)})
def group_norm(k, y, mean, rstd, x, weight, bias, *, dims, count, channels, pixels, groups, eps) -> None:
    own = channels // groups
    M = own * pixels
    with (
        k.parallel_range(k.num_elements(dims, count) * groups, row_grain(M)) as (begin, end),
        k.loop(begin, end) as row,
    ):
        src, dst = x.at(row * M), y.at(row * M)
        (total,) = summed(k, M, lambda i, mask: [src.load(i, mask)], 1)
        centre = total / float(M)

        def square(i: Any, mask: Value | None) -> list[Value]:
            d = src.load(i, mask) - centre
            return [d * d]

        (squares,) = summed(k, M, square, 1)
        inverse = 1.0 / k.sqrt(squares / float(M) + eps)
        mean.put(centre, row)
        rstd.put(inverse, row)
        with k.loop(0, own) as c:
            channel = row % groups * own + c
            scale = inverse * weight.get(channel)
            shift = bias.get(channel)
            of_c, to_c = src.at(c * pixels), dst.at(c * pixels)

            def write(i: Any, mask: Value | None, j: int, of_c=of_c, to_c=to_c, scale=scale, shift=shift) -> None:
                to_c.store(k.fma(of_c.load(i, mask) - centre, k.splat(scale), k.splat(shift)), i, mask)

            foreach_column(k, pixels, write)


@kernel("group_norm_dx", constants=shape_of)
def group_norm_dx(k, dx, dy, x, weight, mean, rstd, *, dims, count, channels, pixels, groups, mode_dx) -> None:
    own = channels // groups
    M = own * pixels
    with (
        k.parallel_range(k.num_elements(dims, count) * groups, row_grain(M)) as (begin, end),
        k.loop(begin, end) as row,
    ):
        centre, inverse = mean.get(row), rstd.get(row)
        of_dn, of_dnn = k.var(0.0), k.var(0.0)

        def normal(p: Pointer, i: Any, mask: Value | None, centre=centre, inverse=inverse) -> Value:
            return (p.load(i, mask) - centre) * inverse

        with k.loop(0, own) as c:
            at, w = row * M + c * pixels, weight.get(row % groups * own + c)

            def terms(i: Any, mask: Value | None, at=at) -> list[Value]:
                d = dy.at(at).load(i, mask)
                return [d, d * normal(x.at(at), i, mask)]

            dn, dnn = summed(k, pixels, terms, 2)
            of_dn.value, of_dnn.value = of_dn.value + w * dn, of_dnn.value + w * dnn
        a, b = of_dn.value / float(M), of_dnn.value / float(M)
        with k.loop(0, own) as c:
            at, w = row * M + c * pixels, weight.get(row % groups * own + c)

            def write(i: Any, mask: Value | None, j: int, at=at, w=w, a=a, b=b, inverse=inverse) -> None:
                v = inverse * (dy.at(at).load(i, mask) * w - a - normal(x.at(at), i, mask) * b)
                dx.at(at).store(accumulate(k, dx.at(at), i, mask, v, mode_dx), i, mask)

            foreach_column(k, pixels, write)


@kernel("group_norm_dparams", constants=shape_of)
def group_norm_dparams(
    k, dweight, dbias, dy, x, mean, rstd, *, dims, count, channels, pixels, groups, mode_dweight, mode_dbias
) -> None:
    """A channel belongs to one thread, which adds its images up in order."""
    own = channels // groups
    with k.parallel_for(channels) as channel:
        of_weight, of_bias = k.var(0.0), k.var(0.0)
        with k.loop(0, k.num_elements(dims, count)) as n:
            at, row = (n * channels + channel) * pixels, n * groups + channel // own
            centre, inverse = mean.get(row), rstd.get(row)

            def terms(i: Any, mask: Value | None, at=at, centre=centre, inverse=inverse) -> list[Value]:
                d = dy.at(at).load(i, mask)
                return [d * ((x.at(at).load(i, mask) - centre) * inverse), d]

            weighted, plain = summed(k, pixels, terms, 2)
            of_weight.value, of_bias.value = of_weight.value + weighted, of_bias.value + plain
        for dst, value, mode in ((dweight, of_weight.value, mode_dweight), (dbias, of_bias.value, mode_dbias)):
            if dst is not None:
                accumulate_scalar(k, dst, channel, value, mode)
