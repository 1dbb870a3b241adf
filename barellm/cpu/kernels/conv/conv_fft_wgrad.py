"""Filter gradient (wgrad) of FFT convolution: the tiles of the output's gradient are the filters.

A tile of m x m pixels of dy, m = F + 1 - R, sees F x F pixels of the image. Both are transformed (conv_fft.py), lanes along
tiles, and for each of the 3 F (F / 2 + 1) planes the gradient is a GEMM whose K dimension is all tiles (winograd_wgrad.py). The
first R x S pixels of its inverse transform are the sum over tiles of dy times the pixels that each tap multiplied."""

from typing import Any

from barellm.cpu.kernel import KernelBuilder, Lowering, part
from barellm.cpu.kernels.conv import conv_fft, im2col, winograd_wgrad
from barellm.cpu.kernels.conv.winograd import V_BYTES, gemm_tile
from barellm.cpu.kernels.loops import accumulate_scalar
from barellm.program.integers import ceil_div


def fft_wgrad_output(k: KernelBuilder, dw, products, *, size: int, F: int, R: int, S: int, flip: bool, mode: str) -> None:
    """dw (size, R, S) = the first R x S pixels of the inverse transforms of products (planes, size), lanes along `size` = (group,
    output channel, input channel): of the columns, to scratch (R, half(F), re and im), then of the rows. `flip`: filters are read
    from their end."""
    pitch, buffer = 2 * conv_fft.half(F) * k.lanes, k.thread_scratch()
    with k.parallel_range(ceil_div(size, k.lanes), 8) as (begin, end), k.loop(begin, end) as block:
        first = block * k.lanes
        mask = k.mask_first(size - first) if size % k.lanes else None
        with k.loop(0, conv_fft.half(F)) as column:
            x: list[conv_fft.Complex] = []
            for i in range(F):
                plane = (column + i * conv_fft.half(F)) * 3
                k1, k2, k3 = (products.load((plane + n) * size + first, mask) for n in range(3))
                x.append((k1 - k3, k1 + k2))
            for i, (re, im) in enumerate(conv_fft.fft(k, x, 1)[:R]):
                dst = buffer.at(i * pitch + column * (2 * k.lanes))
                dst.store(re)
                dst.store(im, k.lanes)
        with k.loop(0, R) as r:
            at = buffer.at(r * pitch)
            x = conv_fft.load_hermitian(k, at, F)
            row = R - 1 - r if flip else r
            for s, (re, _) in enumerate(conv_fft.fft(k, x, 1)[:S]):
                tap, column = re * (1.0 / (F * F)), S - 1 - s if flip else s
                for lane in range(k.lanes):
                    with k.when(first + lane < size):
                        accumulate_scalar(k, dw, (first + lane) * (R * S) + row * S + column, k.lane(tap, lane), mode)


def append_fft_wgrad(
    c: Lowering, *, dw: Any, dy: Any, x: Any, geometry: im2col.ConvGeometry, groups: int, mode: str, dims: tuple[str, ...],
    count: int,
) -> None:  # fmt: skip
    """Append the calls of an FFT filter gradient: for as many blocks of tiles as V_BYTES hold, both transforms and the GEMMs; then
    the inverse transform. `geometry`: of the direct forward convolution."""
    rows, columns, R, S = (int(dy.shape[1]) // groups, geometry.channels, len(geometry.row_offsets), len(geometry.column_offsets))
    F = conv_fft.fft_size(R, S)
    m, planes = F + 1 - max(R, S), 3 * F * conv_fft.half(F)
    P, Q = geometry.output_size
    outputs, offset = (ceil_div(P, m), ceil_div(Q, m)), (min(geometry.row_offsets), min(geometry.column_offsets))
    of_x = im2col.ConvGeometry(
        geometry.input_size, columns, outputs, (m, m), tuple(offset[0] + i for i in range(F)),
        tuple(offset[1] + i for i in range(F)), geometry.reflect,
    )  # fmt: skip
    of_dy = im2col.ConvGeometry((P, Q), rows, outputs, (m, m), tuple(range(m)), tuple(range(m)))
    tile_n = gemm_tile(c.isa).nr(c.isa)
    blocks = ceil_div(int(x.shape[0]) * outputs[0] * outputs[1], tile_n)
    # Blocks of tiles that are transformed and multiplied at a time: they are the order of summation.
    limit = max(1, min(blocks, V_BYTES // (4 * groups * planes * max(rows, columns) * tile_n)))
    operands = (("x tiles", x, of_x, False), ("dy tiles", dy, of_dy, True))
    made = {
        name: (part(c.workspace(name, 4 * limit * groups * planes * seen.channels * tile_n)), "fp32")
        for name, _, seen, _ in operands
    }
    products = part(c.workspace("products", 4 * planes * groups * rows * columns)), "fp32"
    images: dict[str, Any] = {"dims": dims, "count": count, "groups": groups, "tile_n": tile_n}
    buffer = 4 * F * 2 * conv_fft.half(F) * c.isa.lanes
    c.thread_scratch(buffer + max(conv_fft.input_nbytes(c.isa, seen, tile_n) for _, _, seen, _ in operands))
    for first in range(0, blocks, limit):
        where = {"first": first, "limit": limit}
        for name, src, seen, filters in operands:
            c.call(
                conv_fft.fft_input, {"v": made[name], "x": src, **where}, {**images, "geometry": seen, "F": F, "filters": filters},
                writes="v",
            )  # fmt: skip
        sizes = {"rows": rows, "columns": columns, "positions": planes, "outputs": outputs, **images}
        tensors = {"products": products, "dy": made["dy tiles"], "x": made["x tiles"], **where}
        c.call(winograd_wgrad.winograd_wgrad_gemm, tensors, sizes, writes="products")
    sizes = {"size": groups * rows * columns, "F": F, "R": R, "S": S, "flip": geometry.flipped, "mode": mode}
    c.call(fft_wgrad_output, {"dw": dw, "products": products}, sizes, writes="dw")
