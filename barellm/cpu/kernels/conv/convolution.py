"""Lowering of conv2d and its gradients (cuDNN's fprop, dgrad and wgrad) to calls of the algorithms' kernels."""

from functools import partial
from typing import Any

from barellm.cpu.kernel import Lowering, Value, dims_of, lowering, part
from barellm.cpu.kernels.conv import conv_depthwise, conv_implicit_gemm, conv_implicit_gemm_bf16, conv_wgrad, conv_wgrad_bf16
from barellm.cpu.kernels.conv.conv_algorithm import select_bf16, select_tiled
from barellm.cpu.kernels.conv.conv_filter_packing import FilterPacking, pack_filters
from barellm.cpu.kernels.conv.conv_implicit_gemm import OutputMap
from barellm.cpu.kernels.conv.conv_tiled import append_tiled, append_tiled_wgrad
from barellm.cpu.kernels.conv.im2col import ConvGeometry, Images
from barellm.cpu.kernels.loops import accumulate_scalar, elementwise
from barellm.program.ops.convolution import Conv2d, Conv2dDw, Conv2dDx, phases, pixels
from barellm.program.tensor import Dim, Tensor


def images_of(t: Tensor) -> Images:
    """The number of images of a tensor (N, C, H, W)."""
    return dims_of(t), 1 if isinstance(t.shape[0], Dim) else int(t.shape[0])


def geometry_of(op: Conv2d | Conv2dDw, K: int, R: int, S: int) -> ConvGeometry:
    """The geometry of a forward convolution of op.x with K filters."""
    C, H, W = (int(n) for n in op.x.shape[1:])
    outputs, offsets = op.output_size(H, W, R, S), op.offsets(R, S)
    return ConvGeometry((H, W), C // op.groups, outputs, op.stride, *offsets, op.reflect, op.groups, K // op.groups)


def append_conv(c: Lowering, *, algorithm: str, out, w: Tensor, a, x: Tensor, geometry: ConvGeometry, target: OutputMap, mode: str,
        transposed: bool = False, taps: tuple[int, ...] = ()) -> None:  # fmt: skip
    """Append one convolution of x (N, groups channels, H, W), fprop or dgrad, by the algorithm that the op names or the cost models
    take. `a()` makes the fp32 GEMM operand from the filters w when an algorithm needs it. `transposed`: w is read with input and
    output channels exchanged, as dgrad does. `taps`: the elements of w that are used (none: all)."""
    is_direct, N = algorithm in ("auto", "direct"), int(x.shape[0])
    sizes: dict[str, Any] = {"geometry": geometry, "mode": mode, "images": images_of(x)}
    depthwise = is_direct and conv_depthwise.is_supported(geometry)
    # A bf16 implicit GEMM's choice of tile; None: not bf16.
    bf16 = select_bf16(c.isa, x.dtype, geometry, wgrad=False) if is_direct and not depthwise else None
    which = "dx" if transposed else "forward"
    if depthwise:
        kernel, blocking = conv_depthwise.conv_depthwise, conv_depthwise.select_blocking(c.isa, geometry, gradient=False)
        filters, nbytes = a(), blocking.scratch_nbytes(c.isa, geometry, 1)
    elif how := select_tiled(c.isa, which, algorithm, geometry, target, N, bf16):
        append_tiled(c, how, out=out, w=w, x=x, transposed=transposed, **sizes)
        return
    elif bf16:
        kernel = conv_implicit_gemm_bf16.conv_implicit_gemm_bf16
        blocking = conv_implicit_gemm_bf16.select_blocking(c.isa, bf16.tile, bf16.use_amx, geometry, N, c.threads)
        filters = packed_filters(c, w, geometry, blocking, taps, transposed)
        dense = target == OutputMap(geometry.output_size)
        nbytes = conv_implicit_gemm_bf16.ScratchLayout(c.isa, geometry, blocking, dense=dense).nbytes
    else:
        kernel, filters = conv_implicit_gemm.conv_implicit_gemm, a()
        blocking = conv_implicit_gemm.select_blocking(c.isa, geometry, N, c.threads)
        nbytes = conv_implicit_gemm.ScratchLayout(c.isa, geometry, blocking).nbytes
    c.thread_scratch(nbytes)
    c.call(kernel, {"out": out, "a": filters, "x": x}, {**sizes, "target": target, "blocking": blocking}, writes="out")


def packed_filters(c: Lowering, w: Tensor, geometry: ConvGeometry, blocking: conv_implicit_gemm_bf16.Blocking,
        taps: tuple[int, ...], transposed: bool) -> Any:  # fmt: skip
    """Append the packing of the filters w for the bf16 implicit GEMM, rounded to bf16, into a workspace. Returns that operand."""
    size, tile_n = int(w.shape[2]) * int(w.shape[3]), blocking.tile.nr(c.isa)
    of_groups = geometry.groups, geometry.channels, geometry.rows
    packing = FilterPacking(*of_groups, size, taps or tuple(range(size)), blocking.pairs, tile_n, transposed)
    c.thread_scratch(packing.scratch_nbytes(c.isa))
    packed = part(c.workspace("filters", packing.nbytes)), "bf16"
    c.call(pack_filters, {"a": packed, "w": w}, {"packing": packing}, writes="a")
    return packed


def filters_to_fp32(k, y, x, *, width: int) -> None:
    """Filters as fp32."""
    for i, mask, put in elementwise(k, k.int(width), y):
        put(x.load(i, mask))


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
    geometry = geometry_of(op, K, R, S)
    append_conv(c, algorithm=op.algorithm, out=op.y, w=op.w, a=partial(filters_of, c, op.w), x=op.x, geometry=geometry,
        target=OutputMap(geometry.output_size), mode=op.modes["y"])  # fmt: skip


def transpose_filters(k, a, w, *, groups, K, C, R, S, rows, columns) -> None:
    """The kernel: the filters of a dgrad, a (groups C, K, rows, columns) fp32, from w (groups K, C, R, S): those rows and columns
    of the filter that one phase of a strided convolution's pixels needs."""
    taps = len(rows) * len(columns)
    with k.parallel_for(groups * C) as row, k.loop(0, K) as i:
        src = w.at(((row // C * K + i) * C + row % C) * (R * S))  # filter of (input channel, output channel i)
        dst = a.at((row * K + i) * taps)
        # Where all taps are used they are adjacent.
        vectors = range(0, taps - taps % k.lanes, k.lanes) if taps == R * S else range(0)
        for v in vectors:
            dst.store(src.load(v), v)
        for t, (r, s) in list(enumerate((r, s) for r in rows for s in columns))[len(vectors) * k.lanes :]:
            dst.put(src.get(r * S + s), t)


def reflect_pad_backward(k, dx, padded, *, images, channels, size, padding, mode) -> None:
    """The kernel: dx (N, channels, H, W) of reflection padding: each pixel gets the sum of the gradients of its copies in `padded`,
    fp32 images of (H + 2 top, W + 2 left). `images`: dims and a factor of N (`Images`); `size`: (H, W); `padding`: (top, left). A
    line of dx is one work item's."""
    (H, W), (top, left) = size, padding
    padded_W, padded_H = W + 2 * left, H + 2 * top

    def copies(at, n: int, pad: int) -> list[tuple[Value, Value]]:
        """(index in the padded axis, whether it exists) of a pixel and of its two reflections."""
        low, high = at > 0, at < n - 1
        return [(at + pad, k.const(1, "i1")), (pad - at, low & (at <= pad)), (pad + 2 * (n - 1) - at, high & (at >= n - 1 - pad))]

    with k.parallel_range(k.num_elements(*images) * (channels * H), 16) as (begin, end), k.loop(begin, end) as line:
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
            geometry = ConvGeometry(pixels(op.dy), K // op.groups, (P, Q), (1, 1), *offsets, groups=op.groups, rows=C)
            append_conv(c, algorithm=op.algorithm, out=out, w=op.w, a=partial(transposed_filters, c, op, rows, columns), x=op.dy,
                geometry=geometry, target=OutputMap((H, W), (y, x), op.stride), mode=mode, transposed=True,
                taps=tuple(r * S + s for r in rows for s in columns))  # fmt: skip
    if op.reflect:
        sizes = {"images": images_of(op.dy), "channels": op.groups * C, "size": op.size, "padding": op.padding}
        c.call(reflect_pad_backward, {"dx": op.dx, "padded": out}, {**sizes, "mode": op.modes["dx"]}, writes="dx")


@lowering("conv2d_dw", starts="dw")
def lower_conv2d_dw(op: Conv2dDw, c: Lowering) -> None:
    """The filter gradient by the op's algorithm; with "auto" the first of depthwise, FFT, Winograd, bf16 and fp32 direct that
    supports it and that the cost models take."""
    geometry, N = geometry_of(op, int(op.dy.shape[1]), *op.size), int(op.x.shape[0])
    sizes: dict[str, Any] = {"geometry": geometry, "mode": op.modes["dw"], "images": images_of(op.x)}
    is_direct = op.algorithm in ("auto", "direct")
    depthwise, one_dtype = is_direct and conv_depthwise.is_supported(geometry), op.dy.dtype == op.x.dtype
    bf16 = select_bf16(c.isa, op.x.dtype, geometry, wgrad=True) if is_direct and one_dtype else None
    if depthwise:
        kernel, blocking = conv_depthwise.conv_depthwise_wgrad, conv_depthwise.select_blocking(c.isa, geometry, gradient=True)
        nbytes = blocking.scratch_nbytes(c.isa, geometry, geometry.taps)
    elif how := select_tiled(c.isa, "dw", op.algorithm, geometry, OutputMap(geometry.output_size), N, bf16):
        append_tiled_wgrad(c, how, dw=op.dw, dy=op.dy, x=op.x, **sizes)
        return
    elif bf16:
        kernel = conv_wgrad_bf16.conv_wgrad_bf16
        blocking = conv_wgrad_bf16.select_blocking(c.isa, bf16.tile, bf16.use_amx, geometry, N, c.threads)
        nbytes = conv_wgrad_bf16.ScratchLayout(c.isa, geometry, blocking).nbytes
    else:
        kernel, blocking = conv_wgrad.conv_wgrad, conv_wgrad.select_blocking(c.isa, geometry, N)
        nbytes = conv_wgrad.ScratchLayout(c.isa, geometry, blocking).nbytes
    c.thread_scratch(nbytes)
    c.call(kernel, {"dw": op.dw, "dy": op.dy, "x": op.x}, {**sizes, "blocking": blocking}, writes="dw")
