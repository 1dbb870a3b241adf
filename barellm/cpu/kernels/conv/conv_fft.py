"""FFT convolution with large filters, overlap-save: tiles of F x F pixels, F a power of two.

A tile's transform times the conjugate of the filter's is the transform of m x m outputs, m = F + 1 - R, and of others that wrapped
around and are discarded. Neighbouring tiles overlap by R - 1 pixels. Of the transform of real numbers half is enough: F rows and
F / 2 + 1 columns. A complex product u v = (c + i d)(a + i b) takes three real ones (Gauss): with

    k1 = c (a + b), k2 = a (d - c), k3 = b (c + d)      its parts are k1 - k3 and k1 + k2,

so three real GEMMs for each frequency sum over channels. They are planes as Winograd's positions are, and computed by the same
batched GEMM (winograd.py): plane 3 f + i is operand i of frequency f. Lanes are tiles; of filters, channels. A "vector" below is
one number of each lane. `half(F)` = F / 2 + 1 columns of frequencies are kept; frequency (row i, column j) has number i half(F) +
j."""

from collections.abc import Callable, Iterator
from math import cos, pi, sin

from barellm.cpu.kernel import ISA, Value
from barellm.cpu.kernels.conv import conv_tiled
from barellm.cpu.kernels.conv.conv_tiled import TileAlgorithm, TiledConv
from barellm.cpu.kernels.conv.im2col import ConvGeometry, Images, load_strided
from barellm.cpu.kernels.loops import accumulate_scalar
from barellm.program.integers import ceil_div, round_up

M_BYTES = 1 << 19  # of products that a work item has in L2
RUN = 64  # tiles of a work item of the input transform, at most: they see F^2 pixels each
MIN_FILTER, MAX_FILTER = 5, 23  # rows and columns of filters for which "auto" considers FFTs
# In direct multiply-adds of the same pass: of a multiply-add, of an element of a transformed tile, and one of a filter.
COSTS = {"images": (1.66, 55.0, 365.0), "filters": (1.77, 83.0, 245.0)}
MAX_FILTER_BYTES = 256 << 20  # of transformed filters that "auto" accepts

Complex = tuple[Value, "Value | None"]  # None: the imaginary part is zero


def _add_optional(a, b) -> Value | None:
    return b if a is None else a if b is None else a + b


def _subtract_optional(a, b) -> Value | None:
    return a if b is None else -b if a is None else a - b


def _multiply_constant(k, x: Complex, c: float, s: float) -> Complex:
    """The complex product x (c + i s), of vectors and a constant of magnitude 1; fewer operations where c or s is 0."""
    re, im = x
    if (c, s) == (1.0, 0.0):
        return x
    if c == 0.0:  # s is 1 or -1
        zero = k.to(0.0, k.vec)
        return ((-im if s > 0 else im) if im is not None else zero), (re if s > 0 else -re)
    if im is None:
        return re * c, re * s
    return re * c - im * s, re * s + im * c


def fft(k, x: list[Complex], sign: int) -> list[Complex]:
    """The DFT of a list of n complex vectors, lane by lane: the sum over j of x[j] exp(sign 2 pi i j f / n) for each f. Radix-2
    decimation in time (Cooley and Tukey 1965), unrolled. Each is (re, im); an im of None is zero, and costs nothing."""
    n = len(x)
    if n == 1:
        return x
    even, odd = fft(k, x[::2], sign), fft(k, x[1::2], sign)
    first, second = [], []
    for f, (e, o) in enumerate(zip(even, odd, strict=True)):
        angle = sign * 2 * pi * f / n
        c, s = (0.0, float(sign)) if 4 * f == n else (cos(angle), sin(angle))
        t = _multiply_constant(k, o, c, s)
        a, b = _add_optional(e[0], t[0]), _subtract_optional(e[0], t[0])
        assert a is not None and b is not None
        first.append((a, _add_optional(e[1], t[1])))
        second.append((b, _subtract_optional(e[1], t[1])))
    return first + second


def half(F: int) -> int:
    """Frequencies that are enough for F real numbers: the others are conjugates."""
    return F // 2 + 1


def store_half(k, dst, row) -> None:
    """dst (F / 2 + 1, re and im) vectors = the forward transform of a row of F real vectors, its first half."""
    for f, (re, im) in enumerate(fft(k, [(v, None) for v in row], -1)[: half(len(row))]):
        dst.store(re, 2 * f * k.lanes)
        dst.store(im if im is not None else 0.0, (2 * f + 1) * k.lanes)


def frequencies(k, rows, F: int, count: int) -> Iterator[tuple[Value, Value, Value]]:
    """The second half of a 2-D transform: (frequency, re, im) of each output of the forward transforms of the columns of `rows` (F,
    F / 2 + 1, re and im), whose rows behind the first `count` are zero and not in memory. A loop as those of loops.py. A yielded
    frequency i half(F) + j is a Value: j is the loop's."""
    pitch, zero = 2 * half(F) * k.lanes, k.to(0.0, k.vec)  # elements from a row of `rows` to the next
    with k.loop(0, half(F)) as column:
        at = rows.at(column * (2 * k.lanes))
        x: list[Complex] = [(at.load(i * pitch), at.load(i * pitch + k.lanes)) for i in range(count)]
        x += [(zero, zero)] * (F - count)
        for i, (re, im) in enumerate(fft(k, x, -1)):
            assert im is not None
            yield column + i * half(F), re, im


def fft_filters(k, u, w, *, count: int, rows: int, depth: int, step: int, row_step: int, flip: bool, F: int, R: int,
        S: int) -> None:  # fmt: skip
    """The kernel of the filter transform: u (planes, count rows, depth) fp32 = the forward transforms of filters R x S of `count`
    groups, as Gauss's c, d - c and c + d of the conjugates: planes Re, -Im - Re and Re - Im. Filter (group, row, depth) begins at
    element group rows depth R S + row row_step + depth step of w; `flip`: it is read from its end. Scratch `buffer`: the R rows'
    transforms, [R][half(F)][re, im] vectors."""
    size, blocks, buffer = count * rows * depth, ceil_div(depth, k.lanes), k.thread_scratch()  # of a plane of u; vectors of a depth
    pitch = 2 * half(F) * k.lanes
    # Offset of each tap in its filter.
    taps = [[(R - 1 - r) * S + S - 1 - s if flip else r * S + s for s in range(S)] for r in range(R)]
    zero = k.to(0.0, k.vec)
    with k.parallel_for(count * rows * blocks) as item:
        line, first = item // blocks, item % blocks * k.lanes  # (group, row), first depth of the vector
        mask = k.mask_first(k.int(depth) - first) if depth % k.lanes else None
        src = w.at(line // rows * (rows * depth * R * S) + line % rows * row_step + first * step)
        for r in range(R):
            row = [_load_lanes(k, src.at(t), step, depth, first) for t in taps[r]] + [zero] * (F - S)
            store_half(k, buffer.at(r * pitch), row)
        dst = u.at(line * depth + first)
        for frequency, re, im in frequencies(k, buffer, F, R):
            for plane, v in enumerate((re, -im - re, re - im)):
                dst.at((frequency * 3 + plane) * size).store(v, 0, mask)


def _load_lanes(k, p, step: int, depth: int, first) -> Value:
    """A vector of elements `step` apart from p on, the numbers first, first + 1, ... of a row of `depth`; zero from `depth` on."""
    if depth % k.lanes == 0:
        return load_strided(k, p, step)
    v = k.to(0.0, k.vec)
    for i in range(k.lanes):
        exists = first + i < depth
        x = p.get(k.select(exists, k.int(i * step), 0))
        v = k.op(k.vec, f"insertelement {v.typed}, {k.select(exists, x, 0.0).typed}, i64 {i}")
    return v


def fft_input(k, v, x, first, limit, *, images: Images, geometry: ConvGeometry, F: int, tile_n: int, filters: bool) -> None:
    """The kernel of the input transform: v (blocks, groups, planes, channels, tile_n) fp32 = the forward transforms of the tiles of
    x (N, groups channels, H, W) in blocks [first, first + limit): planes Re + Im, Re and Im, or, where the tiles are the `filters`
    (wgrad: dy), those that `fft_filters` makes. A tile that `geometry` sees is n x n pixels, n <= F, zero-padded to F x F; tiles
    that do not exist are zero."""
    C, planes, n = geometry.channels, 3 * F * half(F), len(geometry.row_offsets)
    buffer = k.thread_scratch().bytes(conv_tiled.panel_bytes(k.isa, geometry, tile_n, RUN))  # behind the panel of `for_each_block`
    sizes = {"images": images, "geometry": geometry, "tile_n": tile_n, "most": RUN}
    with conv_tiled.for_each_block(k, x, first, limit, **sizes) as r, k.loop(0, tile_n, k.lanes) as lanes:
        dst = v.at((((r.begin + r.block) * geometry.groups + r.group) * planes * C + r.channel) * tile_n + lanes)
        at = r.panel.at.at(r.skip + r.block * tile_n + lanes)  # pixel (0, 0) of these tiles; a pixel more is r.panel.pitch on
        with k.loop(0, n) as i:
            row = [at.load((i * n + j) * r.panel.pitch) for j in range(n)] + [k.to(0.0, k.vec)] * (F - n)
            store_half(k, buffer.at(i * (2 * half(F) * k.lanes)), row)
        for frequency, re, im in frequencies(k, buffer, F, n):
            for plane, value in enumerate((re, -im - re, re - im) if filters else (re + im, re, im)):
                dst.at((frequency * 3 + plane) * (C * tile_n)).store(value)


def fft_gemm(k, y, u, v, first, limit, *, images: Images, conv: TiledConv, F: int, R: int, S: int, mode: str) -> None:
    """The kernel: y (N, groups rows, H, W), of the tiles in blocks [first, first + limit) = the inverse transform of the products
    of the planes u (`fft_filters`) and v (`fft_input`). The epilogue of the batched GEMM is the inverse transform: of the columns,
    to `buffer` [m][half(F)][re, im]; then of each row, whose missing half are conjugates; the first m x m pixels are outputs."""
    # Outputs of a side, positions, tiles of a work item.
    m, planes, width = conv.m, 3 * F * half(F), conv.group * conv.tile.nr(k.isa)
    products = k.thread_scratch()  # [plane][filter][tile] fp32 of a work item
    buffer = products.bytes(4 * planes * conv.filters * width)
    pitch = 2 * half(F) * k.lanes
    output_row = buffer.bytes(4 * m * pitch)  # [m][lanes], behind it
    plane_stride = conv.filters * width

    def inverse_transform(src, tile, num_tiles, channel) -> None:
        """The outputs of one channel of a vector of tiles, the first of which is `tile`; `src`: their products."""
        inverse_of_columns(k, buffer, F, m, lambda plane: src.load(plane * plane_stride))
        with k.loop(0, m) as i:
            x = load_hermitian(k, buffer.at(i * pitch), F)
            for j, (re, _) in enumerate(fft(k, x, 1)[:m]):
                output_row.store(re * (1.0 / (F * F)), j * k.lanes)  # 1 / F^2: of an inverse DFT
            store_tile_rows(k, y, output_row, tile, num_tiles, channel, conv, i, mode)

    conv_tiled.batched_gemm(k, u, v, first, limit, products, inverse_transform, images=images, conv=conv, positions=planes)


def inverse_of_columns(k, rows, F: int, count: int, product: Callable[[Value], Value]) -> None:
    """rows [count][half(F)][re, im] vectors = the first `count` rows of the inverse transforms of the columns of product(plane), of
    all 3 F half(F) planes: Gauss's products (k1, k2, k3) of a frequency are (k1 - k3) + i (k1 + k2)."""
    with k.loop(0, half(F)) as column:
        x: list[Complex] = []
        for i in range(F):
            plane = (column + i * half(F)) * 3
            k1, k2, k3 = (product(plane + n) for n in range(3))
            x.append((k1 - k3, k1 + k2))
        for i, (re, im) in enumerate(fft(k, x, 1)[:count]):
            dst = rows.at(i * (2 * half(F) * k.lanes) + column * (2 * k.lanes))
            dst.store(re)
            dst.store(im, k.lanes)


def store_tile_rows(k, y, line, tile, num_tiles, channel, conv: TiledConv, i, mode: str) -> None:
    """Write row i of each lane's tile of m x m outputs, `line` [m][lanes] fp32 in scratch, to image plane `channel` of y; the first
    `num_tiles` lanes are the tiles from number `tile` on."""
    m, (H, W), (TH, TW) = conv.m, conv.size, conv.geometry.output_size
    with k.loop(0, num_tiles) as lane:
        t = tile + lane
        image, ty, tx = t // (TH * TW), t % (TH * TW) // TW * m + i, t % TW * m  # image, row and first column of the outputs
        dst = y.at(((image * (conv.geometry.groups * conv.geometry.rows) + channel) * H + ty) * W + tx)
        with k.loop(0, k.select(ty < H, k.min(W - tx, m), 0)) as j:
            accumulate_scalar(k, dst, j, line.get(j * k.lanes + lane), mode)


def load_hermitian(k, at, F: int) -> list[Complex]:
    """A row's F frequencies from the half(F) at `at`, (re and im) vectors: X[F - f] is the conjugate of X[f] where x is real."""
    known: list[Complex] = [(at.load(2 * f * k.lanes), at.load((2 * f + 1) * k.lanes)) for f in range(half(F))]
    return known + [(re, -im if im is not None else None) for re, im in known[-2:0:-1]]


def fft_wgrad_output(k, dw, products, *, size: int, F: int, R: int, S: int, flip: bool, mode: str) -> None:
    """The kernel: dw (size, R, S) = the first R x S pixels of the inverse transforms of products (planes, size) that
    `tiled_wgrad_gemm` wrote, lanes along `size` = (group, output channel, input channel): of the columns, to scratch
    [R][half(F)][re, im], then of the rows. `flip`: filters are read from their end."""
    pitch, buffer = 2 * half(F) * k.lanes, k.thread_scratch()
    with k.parallel_range(ceil_div(size, k.lanes), 8) as (begin, end), k.loop(begin, end) as block:
        first = block * k.lanes
        mask = k.mask_first(size - first) if size % k.lanes else None
        inverse_of_columns(k, buffer, F, R, lambda plane, first=first, mask=mask: products.load(plane * size + first, mask))
        with k.loop(0, R) as r:
            x = load_hermitian(k, buffer.at(r * pitch), F)
            row = R - 1 - r if flip else r
            for s, (re, _) in enumerate(fft(k, x, 1)[:S]):
                tap, column = re * (1.0 / (F * F)), S - 1 - s if flip else s
                for lane in range(k.lanes):
                    with k.when(first + lane < size):
                        accumulate_scalar(k, dw, (first + lane) * (R * S) + row * S + column, k.lane(tap, lane), mode)


def fft_algorithm(R: int, S: int) -> TileAlgorithm:
    """FFT convolution with filters of R x S."""
    F = fft_size(R, S)
    rows = F * 2 * half(F)
    return TileAlgorithm(F + 1 - max(R, S), F, 3 * F * half(F), fft_filters, fft_input, fft_gemm, fft_wgrad_output, {"F": F, "R": R,
        "S": S}, {"F": F, "filters": False}, {"F": F, "filters": True}, run=RUN, rows=rows, epilogue=rows + F, most_bytes=M_BYTES,
        group_bytes=0, wgrad_kc=0)  # fmt: skip


def fft_is_faster(isa: ISA, result: str, geometry: ConvGeometry, images: int) -> bool:
    """Whether this algorithm is the faster one by a tenth, by a cost model: the GEMMs, the transforms of tiles, and those of the
    filters, which are read again for each block of tiles. `result`: "images", or "filters" for wgrad. Fitted to layers with filters
    of 5 x 5 to 21 x 21 (benchmarks/results/xeon-amx/convolution-large.json), none of which loses more than a tenth."""
    R, S = len(geometry.row_offsets), len(geometry.column_offsets)
    if max(R, S) > MAX_FILTER or min(R, S) < MIN_FILTER:
        return False
    F = fft_size(R, S)
    m, C, rows = F + 1 - max(R, S), geometry.channels, geometry.rows
    tile_n = conv_tiled.gemm_tile(isa).nr(isa)
    count = images * ceil_div(geometry.output_size[0], m) * ceil_div(geometry.output_size[1], m)  # tiles
    matmul = 3 * F * half(F) * rows * C * round_up(count, tile_n)  # multiply-adds of the GEMMs
    per_matmul, per_tile, per_filter = COSTS[result]
    work = per_matmul * matmul + per_tile * count * (C + rows) * F * F + per_filter * rows * C * F * F
    direct = R * S * images * geometry.output_size[0] * geometry.output_size[1] * rows * C  # those of the direct convolution
    return 1.1 * work < direct and 12 * F * half(F) * geometry.groups * rows * C <= MAX_FILTER_BYTES


def fft_size(R: int, S: int) -> int:
    """F for a filter: where at least half of a tile's rows are outputs."""
    return 16 if max(R, S) <= 9 else 32
