"""How convolutions and their gradients become calls."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder, Lowering, dims_of, lowering
from barellm.cpu.kernels import conv_depthwise
from barellm.cpu.kernels.conv_choice import COSTS, PAIRS, tile_for
from barellm.cpu.kernels.conv_fft import append_fft, fft_pays
from barellm.cpu.kernels.conv_fft_gradient import append_fft_gradient
from barellm.cpu.kernels.conv_filters import Filters, pack_filters
from barellm.cpu.kernels.conv_gradient import append_weight_gradient
from barellm.cpu.kernels.conv_lines import Grid
from barellm.cpu.kernels.conv_pairs import Scratch as PairsScratch
from barellm.cpu.kernels.conv_pairs import blocks_of as blocks_of_pairs
from barellm.cpu.kernels.conv_pairs import conv_pairs
from barellm.cpu.kernels.conv_pairs_gradient import Scratch as GradientScratch
from barellm.cpu.kernels.conv_pairs_gradient import blocks_of as gradient_blocks
from barellm.cpu.kernels.conv_pairs_gradient import conv_pairs_gradient
from barellm.cpu.kernels.conv_product import Scratch, Target, blocks_of, conv_product
from barellm.cpu.kernels.conv_ways import Way, forward_way, gradient_way
from barellm.cpu.kernels.loops import elementwise_map, put_added
from barellm.cpu.kernels.winograd import append_winograd, tile_of_products
from barellm.cpu.kernels.winograd_gradient import append_winograd_gradient
from barellm.cpu.lang import Value
from barellm.program.ops.convolution import Conv2d, Conv2dDw, Conv2dDx, phases, pixels
from barellm.program.tensor import Dim, Tensor
from barellm.runtime.lowering import part


def images_of(t: Tensor) -> dict[str, Any]:
    """Constants `dims` and `count`: the images of a tensor (N, C, H, W) are `k.num_elements(dims, count)`."""
    return {"dims": dims_of(t), "count": 1 if isinstance(t.shape[0], Dim) else int(t.shape[0])}


def grid_of(op: Any, x: Tensor | tuple[int, ...], R: int, S: int) -> Grid:
    """What the outputs of a convolution see of its images."""
    _, C, H, W = x.shape if isinstance(x, Tensor) else x
    rows, columns = op.offsets(R, S)
    outputs = op.output_size(int(H), int(W), R, S)
    return Grid((int(H), int(W)), int(C) // op.groups, outputs, op.stride, rows, columns, op.reflect)


def tile_of(
    isa: ISA, which: str, algorithm: str, grid: Grid, target: Target, rows: int, images: int, way: Way | None
) -> int:
    """The m of Winograd's m x m tiles that does a pass of a convolution, 0 for the direct kernel. With "auto" it is what should be
    the fastest; `way`: the pairs that the direct kernel would multiply, if any. AMX tiles are faster than any products of fp32."""
    fits = len(grid.rows) == len(grid.columns) == 3 and simple(grid, target)
    if not fits or algorithm in ("direct", "fft"):
        return 0
    if algorithm != "auto":
        return int(algorithm[-1])
    if way and isa.tiles:
        return 0
    costs = PAIRS if way else COSTS
    return tile_for(costs[which], grid.channels, rows, images, grid.outputs, tile_of_products(isa).nr(isa))


def simple(grid: Grid, target: Target) -> bool:
    """Whether all outputs are wanted, each for its own window of neighbours: what the algorithms over tiles do."""
    adjacent = all({abs(b - a) for a, b in pairwise(line)} <= {1} for line in (grid.rows, grid.columns))
    return grid.stride == (1, 1) and target == Target(grid.outputs) and adjacent


def fft_suits(isa: ISA, made: str, grid: Grid, target: Target, rows: int, images: int, groups: int) -> bool:
    """Whether Fourier transforms are the fastest way, where nobody asked for one."""
    return simple(grid, target) and fft_pays(isa, made, grid, rows, images, groups)


def append_gemm(
    c: Lowering, *, algorithm: str, out: Any, w: Tensor, a: Any, x: Tensor, groups: int, rows: int, grid: Grid, target: Target,
    mode: str, turned: bool = False, elements: tuple[int, ...] = (),
) -> None:  # fmt: skip
    """One convolution with what `grid` sees of x: of filters `a`, fp32, as a product has them, which are made of w when they are
    needed. `turned`: w is read the other way round, as the input's gradient does."""
    flip = grid.rows[:2] != tuple(sorted(grid.rows[:2])) or grid.columns[:2] != tuple(sorted(grid.columns[:2]))
    how: dict[str, Any] = {
        "size": target.size,
        "groups": groups,
        "rows": rows,
        "turned": turned,
        "flip": flip,
        "mode": mode,
    }
    if algorithm in ("auto", "direct") and conv_depthwise.suits(grid, rows):
        append_depthwise(c, out=out, a=a(), x=x, groups=groups, rows=rows, grid=grid, target=target, mode=mode)
        return
    way = forward_way(c.isa, x.dtype, grid, rows) if algorithm in ("auto", "direct") else None
    images, which = int(x.shape[0]), "dx" if turned else "forward"
    pays = algorithm == "auto" and way is None and fft_suits(c.isa, "images", grid, target, rows, images, groups)
    if algorithm == "fft" or pays:
        append_fft(c, out=out, w=w, x=x, grid=grid, **how, **images_of(x))
        return
    if m := tile_of(c.isa, which, algorithm, grid, target, rows, images, way):
        offset = min(grid.rows), min(grid.columns)
        append_winograd(c, m=m, out=out, w=w, x=x, grid=grid, offset=offset, **how, **images_of(x))
        return
    if way:
        append_pairs(
            c,
            way,
            out=out,
            w=w,
            x=x,
            groups=groups,
            rows=rows,
            grid=grid,
            target=target,
            mode=mode,
            turned=turned,
            elements=elements,
        )
        return
    append_direct(c, out=out, a=a(), x=x, groups=groups, rows=rows, grid=grid, target=target, mode=mode)


def append_pairs(
    c: Lowering, way: Way, *, out: Any, w: Tensor, x: Tensor, groups: int, rows: int, grid: Grid, target: Target, mode: str,
    elements: tuple[int, ...], turned: bool,
) -> None:  # fmt: skip
    """The same of bf16 images by products of pairs, with filters that are rounded to bf16."""
    blocks = blocks_of_pairs(c.isa, way.tile, way.tiled, grid, rows, int(x.shape[0]), groups, c.threads)
    size = int(w.shape[2]) * int(w.shape[3])
    elements = elements or tuple(range(size))
    filters = Filters(groups, grid.channels, rows, size, elements, blocks.pairs, blocks.tile.nr(c.isa), turned)
    c.thread_scratch(
        max(
            PairsScratch(c.isa, grid, blocks, dense=target == Target(grid.outputs)).nbytes,
            filters.thread_scratch(c.isa),
        )
    )
    a = part(c.workspace("filters", filters.nbytes)), "bf16"
    c.call(pack_filters, {"a": a, "w": w}, {"filters": filters}, writes="a")
    sizes = {"groups": groups, "columns": rows, "grid": grid, "target": target, "blocks": blocks, "mode": mode}
    c.call(conv_pairs, {"out": out, "a": a, "x": x}, {**images_of(x), **sizes}, writes="out")


def append_depthwise(
    c: Lowering, *, out: Any, a: Any, x: Tensor, groups: int, rows: int, grid: Grid, target: Target, mode: str
) -> None:
    """The same where each group has one channel of x."""
    blocks = conv_depthwise.blocks_of(c.isa, grid, gradient=False)
    c.thread_scratch(conv_depthwise.nbytes(c.isa, grid, blocks, 1))
    sizes = {"groups": groups, "rows": rows, "grid": grid, "target": target, "blocks": blocks, "mode": mode}
    c.call(conv_depthwise.conv_depthwise, {"out": out, "a": a, "x": x}, {**images_of(x), **sizes}, writes="out")


def append_direct(
    c: Lowering, *, out: Any, a: Any, x: Tensor, groups: int, rows: int, grid: Grid, target: Target, mode: str
) -> None:
    """One product of filters `a`, fp32, with what `grid` sees of x."""
    blocks = blocks_of(c.isa, grid, rows, int(x.shape[0]), groups, c.threads)
    c.thread_scratch(Scratch(c.isa, grid, blocks, rows).nbytes)
    sizes = {"groups": groups, "rows": rows, "grid": grid, "target": target, "blocks": blocks, "mode": mode}
    c.call(conv_product, {"out": out, "a": a, "x": x}, {**images_of(x), **sizes}, writes="out")


def widen(k: KernelBuilder, y, x, *, width: int) -> None:
    """Filters as fp32."""
    elementwise_map(k, k.int(width), y, x.load)


def filters_of(c: Lowering, w: Tensor) -> Any:
    """The filters in fp32, (K, C / groups R S)."""
    if w.dtype == "fp32":
        return w
    wide = part(c.workspace("filters", 4 * w.size)), "fp32"
    c.call(widen, {"y": wide, "x": w}, {"width": w.size}, writes="y")
    return wide


@lowering("conv2d", starts="y")
def lower_conv2d(op: Conv2d, c: Lowering) -> None:
    K, _, R, S = (int(n) for n in op.w.shape)
    grid = grid_of(op, op.x, R, S)
    append_gemm(
        c, algorithm=op.algorithm, out=op.y, w=op.w, a=lambda: filters_of(c, op.w), x=op.x, groups=op.groups, rows=K // op.groups,
        grid=grid, target=Target(grid.outputs), mode=op.modes["y"],
    )  # fmt: skip


def turned(k: KernelBuilder, a, w, *, groups, K, C, R, S, rows, columns) -> None:
    """Filters (groups K, C, R, S) as the gradient of the input reads them, (groups C, K, rows, columns), with those rows and
    columns of the filter that one phase of the pixels needs."""
    taps = len(rows) * len(columns)
    with k.parallel_for(groups * C) as row, k.loop(0, K) as i:
        of = w.at(((row // C * K + i) * C + row % C) * (R * S))
        to = a.at((row * K + i) * taps)
        vectors = (
            range(0, taps - taps % k.lanes, k.lanes) if taps == R * S else range(0)
        )  # then they lie as they are wanted
        for v in vectors:
            to.store(of.load(v), v)
        for t, (r, s) in list(enumerate((r, s) for r in rows for s in columns))[len(vectors) * k.lanes :]:
            to.put(of.get(r * S + s), t)


def fold(k: KernelBuilder, dx, padded, *, dims, count, channels, size, padding, mode) -> None:
    """The gradient of an image that was padded with its mirror image: each pixel gets what its images got."""
    (H, W), (top, left) = size, padding
    wide = W + 2 * left
    tall = H + 2 * top

    def images(at: Value, n: int, pad: int) -> list[tuple[Value, Value]]:
        """(place in the padded axis, whether there is one) of a pixel and of its two mirror images."""
        low, high = at > 0, at < n - 1
        return [
            (at + pad, k.const(1, "i1")),
            (pad - at, low & (at <= pad)),
            (pad + 2 * (n - 1) - at, high & (at >= n - 1 - pad)),
        ]

    with k.parallel_range(k.num_elements(dims, count) * (channels * H), 16) as (begin, end), k.loop(begin, end) as line:
        plane, y = line // H, line % H
        with k.loop(0, W) as x:
            total = k.var(0.0)
            for row, row_there in images(y, H, top):
                for column, column_there in images(x, W, left):
                    with k.when(row_there & column_there):
                        total.value = total.value + padded.get((plane * tall + row) * wide + column)
            put_added(k, dx, line * W + x, total.value, mode)


def turned_filters(c: Lowering, op: Conv2dDx, rows: tuple[int, ...], columns: tuple[int, ...]) -> Any:
    """The filters as one phase of the input's gradient has them."""
    K, C, R, S = (int(n) for n in op.w.shape)
    a = part(c.workspace("turned", 4 * max(C * K * len(rows) * len(columns), 1))), "fp32"
    sizes = {"groups": op.groups, "K": K // op.groups, "C": C, "R": R, "S": S, "rows": rows, "columns": columns}
    c.call(turned, {"a": a, "w": op.w}, sizes, writes="a")
    return a


@lowering("conv2d_dx", starts="dx")
def lower_conv2d_dx(op: Conv2dDx, c: Lowering) -> None:
    """One product for each phase of a stride. Behind a reflected padding lies the gradient of the padded image, which is folded."""
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
            seen = (row_at, column_at) if rows and columns else ((), ())
            grid = Grid(pixels(op.dy), K // op.groups, (P, Q), (1, 1), *seen)
            append_gemm(
                c, algorithm=op.algorithm, out=out, w=op.w, a=partial(turned_filters, c, op, rows, columns), x=op.dy,
                groups=op.groups, rows=C, grid=grid, target=Target((H, W), (y, x), op.stride), mode=mode, turned=True,
                elements=tuple(r * S + s for r in rows for s in columns),
            )  # fmt: skip
    if op.reflect:
        sizes = {**images_of(op.dy), "channels": op.groups * C, "size": op.size, "padding": op.padding}
        c.call(fold, {"dx": op.dx, "padded": out}, {**sizes, "mode": op.modes["dx"]}, writes="dx")


@lowering("conv2d_dw", starts="dw")
def lower_conv2d_dw(op: Conv2dDw, c: Lowering) -> None:
    grid = grid_of(op, op.x, *op.size)
    images = {"groups": op.groups, "grid": grid, "mode": op.modes["dw"], **images_of(op.x)}
    rows = int(op.dy.shape[1]) // op.groups
    operands = {"dw": op.dw, "dy": op.dy, "x": op.x}
    if op.algorithm in ("auto", "direct") and conv_depthwise.suits(grid, rows):
        blocks = conv_depthwise.blocks_of(c.isa, grid, gradient=True)
        c.thread_scratch(conv_depthwise.nbytes(c.isa, grid, blocks, grid.taps))
        sizes = {**images, "rows": rows, "blocks": blocks}
        c.call(conv_depthwise.conv_depthwise_gradient, operands, sizes, writes="dw")
        return
    way = (
        gradient_way(c.isa, op.x.dtype, grid, rows)
        if op.dy.dtype == op.x.dtype and op.algorithm in ("auto", "direct")
        else None
    )
    target, N = Target(grid.outputs), int(op.x.shape[0])
    pays = op.algorithm == "auto" and way is None and fft_suits(c.isa, "filters", grid, target, rows, N, op.groups)
    if op.algorithm == "fft" or pays:
        append_fft_gradient(c, dw=op.dw, dy=op.dy, x=op.x, **images)
        return
    if m := tile_of(c.isa, "dw", op.algorithm, grid, target, rows, N, way):
        append_winograd_gradient(c, m=m, dw=op.dw, dy=op.dy, x=op.x, **images)
        return
    if way:
        blocks = gradient_blocks(c.isa, way.tile, way.tiled, grid, rows, N, op.groups, c.threads)
        c.thread_scratch(GradientScratch(c.isa, grid, blocks).nbytes)
        c.call(conv_pairs_gradient, operands, {**images, "rows": rows, "blocks": blocks}, writes="dw")
        return
    append_weight_gradient(c, op.dw, op.dy, op.x, **images)
