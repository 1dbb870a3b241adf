"""Lowering of conv2d and its gradients (cuDNN's fprop, dgrad and wgrad) to calls of the algorithms' kernels."""

from functools import partial
from itertools import pairwise
from typing import Any

from barellm.cpu.kernel import ISA, KernelBuilder, Lowering, Value, dims_of, lowering, part
from barellm.cpu.kernels.conv import conv_algorithm, conv_depthwise, conv_implicit_gemm, conv_implicit_gemm_bf16, conv_wgrad_bf16
from barellm.cpu.kernels.conv.conv_algorithm import Bf16MicroKernel
from barellm.cpu.kernels.conv.conv_fft import fft_algorithm, fft_is_faster
from barellm.cpu.kernels.conv.conv_filter_packing import FilterPacking, pack_filters
from barellm.cpu.kernels.conv.conv_implicit_gemm import OutputMap
from barellm.cpu.kernels.conv.conv_tiled import TileAlgorithm, append_tiled, append_tiled_wgrad, gemm_tile
from barellm.cpu.kernels.conv.conv_wgrad import append_wgrad
from barellm.cpu.kernels.conv.im2col import ConvGeometry
from barellm.cpu.kernels.conv.winograd import winograd
from barellm.cpu.kernels.loops import accumulate_scalar, elementwise_map
from barellm.program.ops.convolution import Conv2d, Conv2dDw, Conv2dDx, phases, pixels
from barellm.program.tensor import Dim, Tensor


def images_of(t: Tensor) -> dict[str, Any]:
    """Constants `dims` and `count`: the images of a tensor (N, C, H, W) are `k.num_elements(dims, count)`."""
    return {"dims": dims_of(t), "count": 1 if isinstance(t.shape[0], Dim) else int(t.shape[0])}


def geometry_of(op: Any, x: Tensor | tuple[int, ...], R: int, S: int) -> ConvGeometry:
    """Which pixels of its images each output of a convolution sees."""
    _, C, H, W = x.shape if isinstance(x, Tensor) else x
    rows, columns = op.offsets(R, S)
    outputs = op.output_size(int(H), int(W), R, S)
    return ConvGeometry((int(H), int(W)), int(C) // op.groups, outputs, op.stride, rows, columns, op.reflect)


def select_tiled(
    isa: ISA, which: str, algorithm: str, geometry: ConvGeometry, target: OutputMap, rows: int, images: int, groups: int,
    bf16: Bf16MicroKernel | None,
) -> TileAlgorithm | None:  # fmt: skip
    """The algorithm over tiles for a pass of a convolution, None for the direct one. With "auto" the cost models select it; `bf16`:
    the micro-kernel that the direct algorithm would have. Direct on AMX tiles is faster than any algorithm in fp32."""
    size, plain, auto = (len(geometry.row_offsets), len(geometry.column_offsets)), is_plain(geometry, target), algorithm == "auto"
    result = "filters" if which == "dw" else "images"
    if algorithm == "fft" or (auto and not bf16 and plain and fft_is_faster(isa, result, geometry, rows, images, groups)):
        return fft_algorithm(*size)
    if algorithm == "direct" or size != (3, 3) or not plain or (auto and bf16 and isa.tiles):
        return None
    m = 0 if auto else int(algorithm[-1])
    if auto:
        costs = (conv_algorithm.BF16_COSTS if bf16 else conv_algorithm.FP32_COSTS)[which]
        tile_n = gemm_tile(isa).nr(isa)
        m = conv_algorithm.select_winograd_tile(costs, geometry.channels, rows, images, geometry.output_size, tile_n)
    return winograd(m) if m else None


def is_plain(geometry: ConvGeometry, target: OutputMap) -> bool:
    """Whether stride and dilation are 1 and all outputs are computed: what the algorithms over tiles support."""
    undilated = all({abs(b - a) for a, b in pairwise(line)} <= {1} for line in (geometry.row_offsets, geometry.column_offsets))
    return geometry.stride == (1, 1) and target == OutputMap(geometry.output_size) and undilated


def append_conv(
    c: Lowering, *, algorithm: str, out: Any, w: Tensor, a: Any, x: Tensor, groups: int, rows: int, geometry: ConvGeometry,
    target: OutputMap, mode: str, transposed: bool = False, taps: tuple[int, ...] = (),
) -> None:  # fmt: skip
    """One convolution of x. `a()` makes the fp32 GEMM operand from the filters w when an algorithm needs it. `transposed`: w is
    read with input and output channels exchanged, as dgrad does. `taps`: the elements of w that are used."""
    is_direct = algorithm in ("auto", "direct")
    sizes: dict[str, Any] = {"groups": groups, "geometry": geometry, "target": target, "mode": mode, **images_of(x)}
    if is_direct and conv_depthwise.is_supported(geometry, rows):
        append_depthwise(c, out, a(), x, rows=rows, **sizes)
        return
    bf16 = conv_algorithm.select_fprop_bf16(c.isa, x.dtype, geometry, rows) if is_direct else None
    which = "dx" if transposed else "forward"
    if how := select_tiled(c.isa, which, algorithm, geometry, target, rows, int(x.shape[0]), groups, bf16):
        append_tiled(
            c, how, out=out, w=w, x=x, groups=groups, rows=rows, transposed=transposed, geometry=geometry, mode=mode, **images_of(x)
        )  # fmt: skip
    elif bf16:
        append_bf16(c, bf16, out, w, x, rows=rows, taps=taps, transposed=transposed, **sizes)
    else:
        append_direct(c, out, a(), x, rows=rows, **sizes)


def append_bf16(
    c: Lowering, bf16: Bf16MicroKernel, out: Any, w: Tensor, x: Tensor, *, groups: int, rows: int, geometry: ConvGeometry,
    target: OutputMap, taps: tuple[int, ...], transposed: bool, **sizes: Any,
) -> None:  # fmt: skip
    """The direct algorithm in bf16, with filters that are rounded to bf16."""
    blocking = conv_implicit_gemm_bf16.select_blocking(
        c.isa, bf16.tile, bf16.use_amx, geometry, rows, int(x.shape[0]), groups, c.threads
    )
    size = int(w.shape[2]) * int(w.shape[3])
    tile_n, taps = blocking.tile.nr(c.isa), taps or tuple(range(size))
    packing = FilterPacking(groups, geometry.channels, rows, size, taps, blocking.pairs, tile_n, transposed)
    dense = target == OutputMap(geometry.output_size)
    layout = conv_implicit_gemm_bf16.ScratchLayout(c.isa, geometry, blocking, dense=dense)
    c.thread_scratch(max(layout.nbytes, packing.scratch_nbytes(c.isa)))
    a = part(c.workspace("filters", packing.nbytes)), "bf16"
    c.call(pack_filters, {"a": a, "w": w}, {"packing": packing}, writes="a")
    sizes |= {"groups": groups, "columns": rows, "geometry": geometry, "target": target, "blocking": blocking}
    c.call(conv_implicit_gemm_bf16.conv_implicit_gemm_bf16, {"out": out, "a": a, "x": x}, sizes, writes="out")


def append_depthwise(c: Lowering, out: Any, a: Any, x: Tensor, *, geometry: ConvGeometry, **sizes: Any) -> None:
    """A depthwise convolution: each group has one channel of x."""
    blocking = conv_depthwise.select_blocking(c.isa, geometry, gradient=False)
    c.thread_scratch(conv_depthwise.scratch_nbytes(c.isa, geometry, blocking, 1))
    sizes |= {"geometry": geometry, "blocking": blocking}
    c.call(conv_depthwise.conv_depthwise, {"out": out, "a": a, "x": x}, sizes, writes="out")


def append_direct(
    c: Lowering, out: Any, a: Any, x: Tensor, *, groups: int, rows: int, geometry: ConvGeometry, **sizes: Any
) -> None:
    """The direct algorithm in fp32, with filters `a`."""
    blocking = conv_implicit_gemm.select_blocking(c.isa, geometry, rows, int(x.shape[0]), groups, c.threads)
    c.thread_scratch(conv_implicit_gemm.ScratchLayout(c.isa, geometry, blocking, rows).nbytes)
    sizes |= {"groups": groups, "rows": rows, "geometry": geometry, "blocking": blocking}
    c.call(conv_implicit_gemm.conv_implicit_gemm, {"out": out, "a": a, "x": x}, sizes, writes="out")


def filters_to_fp32(k: KernelBuilder, y, x, *, width: int) -> None:
    """Filters as fp32."""
    elementwise_map(k, k.int(width), y, x.load)


def filters_of(c: Lowering, w: Tensor) -> Any:
    """The filters in fp32, (K, C / groups R S)."""
    if w.dtype == "fp32":
        return w
    fp32 = part(c.workspace("filters", 4 * w.size)), "fp32"
    c.call(filters_to_fp32, {"y": fp32, "x": w}, {"width": w.size}, writes="y")
    return fp32


@lowering("conv2d", starts="y")
def lower_conv2d(op: Conv2d, c: Lowering) -> None:
    K, _, R, S = (int(n) for n in op.w.shape)
    geometry = geometry_of(op, op.x, R, S)
    append_conv(
        c, algorithm=op.algorithm, out=op.y, w=op.w, a=lambda: filters_of(c, op.w), x=op.x, groups=op.groups, rows=K // op.groups,
        geometry=geometry, target=OutputMap(geometry.output_size), mode=op.modes["y"],
    )  # fmt: skip


def transpose_filters(k: KernelBuilder, a, w, *, groups, K, C, R, S, rows, columns) -> None:
    """The filters of a dgrad, a (groups C, K, rows, columns), from w (groups K, C, R, S): those rows and columns of the filter that
    one phase of a strided convolution's pixels needs."""
    taps = len(rows) * len(columns)
    with k.parallel_for(groups * C) as row, k.loop(0, K) as i:
        src = w.at(((row // C * K + i) * C + row % C) * (R * S))
        dst = a.at((row * K + i) * taps)
        # Where all taps are used they are adjacent.
        vectors = range(0, taps - taps % k.lanes, k.lanes) if taps == R * S else range(0)
        for v in vectors:
            dst.store(src.load(v), v)
        for t, (r, s) in list(enumerate((r, s) for r in rows for s in columns))[len(vectors) * k.lanes :]:
            dst.put(src.get(r * S + s), t)


def reflect_pad_backward(k: KernelBuilder, dx, padded, *, dims, count, channels, size, padding, mode) -> None:
    """dx of reflection padding: each pixel gets the sum of the gradients of its copies in `padded`."""
    (H, W), (top, left) = size, padding
    padded_W, padded_H = W + 2 * left, H + 2 * top

    def copies(at: Value, n: int, pad: int) -> list[tuple[Value, Value]]:
        """(index in the padded axis, whether it exists) of a pixel and of its two reflections."""
        low, high = at > 0, at < n - 1
        return [(at + pad, k.const(1, "i1")), (pad - at, low & (at <= pad)), (pad + 2 * (n - 1) - at, high & (at >= n - 1 - pad))]

    with k.parallel_range(k.num_elements(dims, count) * (channels * H), 16) as (begin, end), k.loop(begin, end) as line:
        plane, y = line // H, line % H
        with k.loop(0, W) as x:
            total = k.var(0.0)
            for row, row_exists in copies(y, H, top):
                for column, column_exists in copies(x, W, left):
                    with k.when(row_exists & column_exists):
                        total.value = total.value + padded.get((plane * padded_H + row) * padded_W + column)
            accumulate_scalar(k, dx, line * W + x, total.value, mode)


def transposed_filters(c: Lowering, op: Conv2dDx, rows: tuple[int, ...], columns: tuple[int, ...]) -> Any:
    """The filters of one phase of a dgrad."""
    K, C, R, S = (int(n) for n in op.w.shape)
    a = part(c.workspace("transposed", 4 * max(C * K * len(rows) * len(columns), 1))), "fp32"
    sizes = {"groups": op.groups, "K": K // op.groups, "C": C, "R": R, "S": S, "rows": rows, "columns": columns}
    c.call(transpose_filters, {"a": a, "w": op.w}, sizes, writes="a")
    return a


@lowering("conv2d_dx", starts="dx")
def lower_conv2d_dx(op: Conv2dDx, c: Lowering) -> None:
    """A convolution for each phase of the stride. With reflection padding it makes the gradient of the padded image first."""
    K, C, R, S = (int(n) for n in op.w.shape)
    H, W = op.size
    (row_offsets, column_offsets), out, mode = op.offsets(R, S), op.dx, op.modes["dx"]
    if op.reflect:
        top, left = op.padding
        H, W = H + 2 * top, W + 2 * left
        row_offsets, column_offsets = tuple(r + top for r in row_offsets), tuple(s + left for s in column_offsets)
        N = int(op.dy.shape[0])
        out, mode = (part(c.workspace("padded", 4 * N * op.groups * C * H * W)), "fp32"), "store"
    for y, (P, rows, row_at) in enumerate(phases(row_offsets, op.stride[0], H)):
        for x, (Q, columns, column_at) in enumerate(phases(column_offsets, op.stride[1], W)):
            offsets = (row_at, column_at) if rows and columns else ((), ())
            geometry = ConvGeometry(pixels(op.dy), K // op.groups, (P, Q), (1, 1), *offsets)
            append_conv(
                c, algorithm=op.algorithm, out=out, w=op.w, a=partial(transposed_filters, c, op, rows, columns), x=op.dy,
                groups=op.groups, rows=C, geometry=geometry, target=OutputMap((H, W), (y, x), op.stride), mode=mode,
                transposed=True, taps=tuple(r * S + s for r in rows for s in columns),
            )  # fmt: skip
    if op.reflect:
        sizes = {**images_of(op.dy), "channels": op.groups * C, "size": op.size, "padding": op.padding}
        c.call(reflect_pad_backward, {"dx": op.dx, "padded": out}, {**sizes, "mode": op.modes["dx"]}, writes="dx")


@lowering("conv2d_dw", starts="dw")
def lower_conv2d_dw(op: Conv2dDw, c: Lowering) -> None:
    """The filter gradient by the op's algorithm; with "auto" the first of depthwise, FFT, Winograd, bf16 and fp32 direct that
    supports it and that the cost models take."""
    geometry = geometry_of(op, op.x, *op.size)
    images = {"groups": op.groups, "geometry": geometry, "mode": op.modes["dw"], **images_of(op.x)}
    rows = int(op.dy.shape[1]) // op.groups
    operands = {"dw": op.dw, "dy": op.dy, "x": op.x}
    if op.algorithm in ("auto", "direct") and conv_depthwise.is_supported(geometry, rows):
        blocking = conv_depthwise.select_blocking(c.isa, geometry, gradient=True)
        c.thread_scratch(conv_depthwise.scratch_nbytes(c.isa, geometry, blocking, geometry.taps))
        sizes = {**images, "rows": rows, "blocking": blocking}
        c.call(conv_depthwise.conv_depthwise_wgrad, operands, sizes, writes="dw")
        return
    is_direct = op.dy.dtype == op.x.dtype and op.algorithm in ("auto", "direct")
    bf16 = conv_algorithm.select_wgrad_bf16(c.isa, op.x.dtype, geometry, rows) if is_direct else None
    target, N = OutputMap(geometry.output_size), int(op.x.shape[0])
    if how := select_tiled(c.isa, "dw", op.algorithm, geometry, target, rows, N, op.groups, bf16):
        append_tiled_wgrad(c, how, **operands, **images)
        return
    if bf16:
        blocking = conv_wgrad_bf16.select_blocking(c.isa, bf16.tile, bf16.use_amx, geometry, rows, N, op.groups, c.threads)
        c.thread_scratch(conv_wgrad_bf16.ScratchLayout(c.isa, geometry, blocking).nbytes)
        c.call(conv_wgrad_bf16.conv_wgrad_bf16, operands, {**images, "rows": rows, "blocking": blocking}, writes="dw")
        return
    append_wgrad(c, op.dw, op.dy, op.x, **images)
