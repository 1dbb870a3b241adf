"""GroupNorm of images (Wu and He 2018), and its gradients. Shapes: x, y, dy, dx (N, channels, H, W); weight, bias (channels); mean,
rstd (N, groups) fp32. A row is one group of one image, M = channels / groups * pixels adjacent elements. One thread reads a row,
again for each sum that depends on the one before: it stays in the cache."""

from typing import Any

from barellm.cpu.kernel import Op, Value, dims_of, kernel
from barellm.cpu.kernels.loops import accumulate, accumulate_scalar, columns, row_grain
from barellm.cpu.kernels.loss.cross_entropy import sums_over
from barellm.program.tensor import Dim


def shape_of(op: Op) -> dict[str, Any]:
    """Compile-time constants: `count` images for each of `dims` (run-time sizes), their `channels`, `pixels` and `groups`."""
    N, C, H, W = op.x.shape
    groups = int((op.mean if "mean" in op.inputs else op.outputs["mean"]).shape[1])
    count = 1 if isinstance(N, Dim) else int(N)
    return {"dims": dims_of(op.x), "count": count, "channels": int(C), "pixels": int(H) * int(W), "groups": groups}


@kernel("group_norm", constants=lambda op: {**shape_of(op), "eps": float(op.eps)})
def group_norm(k, y, mean, rstd, x, weight, bias, *, dims, count, channels, pixels, groups, eps) -> None:
    """The kernel: y (N, channels, H, W) = (x - mean) rstd weight + bias; writes mean and rstd (N, groups) fp32 of each group of
    channels of each image. The variance is the mean of (x - mean)^2: three passes over a row in the cache."""
    group_channels = channels // groups
    M = group_channels * pixels
    with k.parallel_range(k.num_elements(dims, count) * groups, row_grain(M)) as (begin, end), k.loop(begin, end) as row:
        src, dst = x.at(row * M), y.at(row * M)
        (total,) = sums_over(k, M, lambda i, mask: [src.load(i, mask)], 1)
        centre = total / float(M)  # the mean

        def square(i, mask) -> list[Value]:
            d = src.load(i, mask) - centre
            return [d * d]

        (squares,) = sums_over(k, M, square, 1)
        inverse = 1.0 / k.sqrt(squares / float(M) + eps)
        mean.put(centre, row)
        rstd.put(inverse, row)
        with k.loop(0, group_channels) as c:
            channel = row % groups * group_channels + c
            scale = inverse * weight.get(channel)
            shift = bias.get(channel)
            src_c, dst_c = src.at(c * pixels), dst.at(c * pixels)
            for i, mask, _ in columns(k, pixels):
                dst_c.store(k.fma(src_c.load(i, mask) - centre, k.splat(scale), k.splat(shift)), i, mask)


@kernel("group_norm_dx", constants=shape_of)
def group_norm_dx(k, dx, dy, x, weight, mean, rstd, *, dims, count, channels, pixels, groups, mode_dx) -> None:
    """The kernel: dx (N, channels, H, W) = rstd (dn - mean(dn) - n mean(dn n)), dn = dy weight, n = (x - mean) rstd; the means are
    over a group of an image; mean and rstd from `group_norm`. The weight is constant in a channel, so it multiplies a channel's
    sums. dx is stored or added (mode_dx)."""
    group_channels = channels // groups
    M = group_channels * pixels
    with k.parallel_range(k.num_elements(dims, count) * groups, row_grain(M)) as (begin, end), k.loop(begin, end) as row:
        centre, inverse = mean.get(row), rstd.get(row)
        sum_dn = k.var(0.0)
        sum_dnn = k.var(0.0)  # of dn n

        def normal(p, i, mask, centre=centre, inverse=inverse) -> Value:
            return (p.load(i, mask) - centre) * inverse

        with k.loop(0, group_channels) as c:
            at, w = row * M + c * pixels, weight.get(row % groups * group_channels + c)

            def terms(i, mask, at=at) -> list[Value]:
                d = dy.at(at).load(i, mask)
                return [d, d * normal(x.at(at), i, mask)]

            dn, dnn = sums_over(k, pixels, terms, 2)  # before the channel's weight
            sum_dn.value, sum_dnn.value = sum_dn.value + w * dn, sum_dnn.value + w * dnn
        mean_dn, mean_dnn = sum_dn.value / float(M), sum_dnn.value / float(M)
        with k.loop(0, group_channels) as c:
            at, w = row * M + c * pixels, weight.get(row % groups * group_channels + c)
            for i, mask, _ in columns(k, pixels):
                v = inverse * (dy.at(at).load(i, mask) * w - mean_dn - normal(x.at(at), i, mask) * mean_dnn)
                dx.at(at).store(accumulate(k, dx.at(at), i, mask, v, mode_dx), i, mask)


@kernel("group_norm_dparams", constants=shape_of)
def group_norm_dparams(k, dweight, dbias, dy, x, mean, rstd, *, dims, count, channels, pixels, groups, mode_dweight,
        mode_dbias) -> None:  # fmt: skip
    """The kernel: dweight (channels) = sum of dy n, dbias = sum of dy (None: not stored), over images and pixels, n = (x - mean)
    rstd. A work item is a channel, whose images are added in order."""
    group_channels = channels // groups
    with k.parallel_for(channels) as channel:
        weight_sum, bias_sum = k.var(0.0), k.var(0.0)
        with k.loop(0, k.num_elements(dims, count)) as n:
            # Of the channel's pixels; of mean and rstd.
            at, row = (n * channels + channel) * pixels, n * groups + channel // group_channels
            centre, inverse = mean.get(row), rstd.get(row)

            def terms(i, mask, at=at, centre=centre, inverse=inverse) -> list[Value]:
                d = dy.at(at).load(i, mask)
                return [d * ((x.at(at).load(i, mask) - centre) * inverse), d]

            weighted, plain = sums_over(k, pixels, terms, 2)
            weight_sum.value, bias_sum.value = weight_sum.value + weighted, bias_sum.value + plain
        for dst, value, mode in ((dweight, weight_sum.value, mode_dweight), (dbias, bias_sum.value, mode_dbias)):
            if dst is not None:
                accumulate_scalar(k, dst, channel, value, mode)
