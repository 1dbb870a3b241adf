"""Convolutions with 3 x 3 filters by Winograd's F(2x2, 3x3) and F(4x4, 3x3): 2.25 and 4 times fewer multiplications
(program/winograd.py). A tile of m x m outputs sees n x n pixels, n = m + 2, and has n^2 positions (conv_tiled.py). The filter
gradient is F(3x3, 2x2) or F(3x3, 4x4)."""

from collections.abc import Sequence

from barellm.cpu.kernel import Value
from barellm.cpu.kernels.conv import conv_tiled
from barellm.cpu.kernels.conv.conv_tiled import TileAlgorithm, TiledConv
from barellm.cpu.kernels.conv.im2col import ConvGeometry, Images, load_strided
from barellm.cpu.kernels.loops import accumulate_scalar
from barellm.cpu.lang.vector import transpose_groups
from barellm.program.integers import ceil_div
from barellm.program.winograd import filter_matrix, input_matrix, output_matrix

GROUP_BYTES = 6 << 20  # of V that the work items of a group share in L3
M_BYTES = 1 << 18  # of M that a work item has in L2
RUN = 512  # tiles of a work item of the input transform, at most
WGRAD_KC = 48  # blocks of tiles of a K block of wgrad: they are the order of summation


def transform_vectors(k, matrix: Sequence[Sequence[float]], v) -> list[Value]:
    """matrix @ v, of a constant matrix and a list of vectors. Two columns, or two rows, that differ in some signs only share work:
    their sum and their difference are enough (x + y and x - y of the parts that are equal and opposite)."""
    rows = [list(row) for row in matrix]
    # Columns a and b: v[a] + v[b] stands for both where they are equal, v[a] - v[b] where they are opposite.
    for a in range(len(v)):
        for b in range(a + 1, len(v)):
            if _differ_in_signs([row[a] for row in rows], [row[b] for row in rows]):
                v = list(v)
                v[a], v[b] = v[a] + v[b], v[a] - v[b]
                for row in rows:
                    row[a], row[b] = (row[a], 0.0) if row[a] == row[b] else (0.0, row[a])
    out: dict[int, Value] = {}  # row -> its result
    for i, row in enumerate(rows):
        if i in out:
            continue
        twin = next((j for j in range(i + 1, len(rows)) if _differ_in_signs(row, rows[j])), None)
        if twin is None:
            out[i] = _dot_constant_row(k, row, v)
            continue
        even = _dot_constant_row(k, [x if x == y else 0.0 for x, y in zip(row, rows[twin], strict=True)], v)
        odd = _dot_constant_row(k, [x if x != y else 0.0 for x, y in zip(row, rows[twin], strict=True)], v)
        out[i], out[twin] = even + odd, even - odd
    return [out[i] for i in range(len(rows))]


def _differ_in_signs(a: list[float], b: list[float]) -> bool:
    """Whether two rows, or columns, differ in the signs of some elements and have others in common."""
    pairs = list(zip(a, b, strict=True))
    return all(x in (y, -y) for x, y in pairs) and any(x == y != 0 for x, y in pairs) and any(x == -y != 0 for x, y in pairs)


def _dot_constant_row(k, row: list[float], v) -> Value:
    """The row times v: first what has the factor 1."""
    terms = sorted(((c, x) for c, x in zip(row, v, strict=True) if c), key=lambda term: term[0] != 1.0)
    (c, total), *rest = terms
    total = total if c == 1.0 else total * c
    for c, x in rest:
        total = total + x if c == 1.0 else total - x if c == -1.0 else k.fma(x, k.to(c, k.vec), total)
    return total


def transform_square(k, matrix: Sequence[Sequence[float]], square) -> list[list[Value]]:
    """matrix @ square @ matrix^T, of a constant matrix and a square of vectors."""
    columns = [transform_vectors(k, matrix, list(column)) for column in zip(*square, strict=True)]
    return [transform_vectors(k, matrix, list(row)) for row in zip(*columns, strict=True)]


def winograd_filters(k, u, w, *, count: int, rows: int, depth: int, step: int, row_step: int, flip: bool, m: int) -> None:
    """The kernel of the filter transform: u (positions, count rows, depth) fp32 = G w G^T of filters w of 3 x 3, lanes along the
    depth; `count` groups. Filter (group, row, depth) begins at element group rows depth 9 + row row_step + depth step of w; `flip`:
    it is read from its end. The last vector of a depth that lanes do not divide overlaps the one before. G is (n, 3), `size` the
    elements of a position; a depth below `lanes` is gathered element by element and stored masked."""
    G, n = filter_matrix(m, 3), m + 2
    taps = range(8, -1, -1) if flip else range(9)
    size = count * rows * depth
    blocks = ceil_div(depth, k.lanes)
    with k.parallel_range(count * rows * blocks, 16) as (begin, end), k.loop(begin, end) as item:
        line, first = item // blocks, item % blocks * k.lanes
        first = k.min(first, max(depth - k.lanes, 0))  # the last vector overlaps the one before
        src = w.at(line // rows * (rows * depth * 9) + line % rows * row_step + first * step)
        if depth >= k.lanes:
            vectors = [load_strided(k, src.at(t), step) for t in taps]
        else:
            vectors = [k.to(0.0, k.vec) for _ in taps]
            for i in range(depth):
                vectors = [
                    k.op(k.vec, f"insertelement {v.typed}, {src.at(t).get(i * step).typed}, i64 {i}")
                    for t, v in zip(taps, vectors, strict=True)
                ]
        transformed = transform_square(k, G, [vectors[i : i + 3] for i in range(0, 9, 3)])
        dst = u.at(line * depth + first)
        mask = None if depth >= k.lanes else k.mask_first(depth)
        for position, v in enumerate(transformed[i][j] for i in range(n) for j in range(n)):
            dst.store(v, position * size, mask)


def winograd_input(k, v, x, first, limit, *, images: Images, geometry: ConvGeometry, matrix: tuple[tuple[float, ...], ...],
        tile_n: int) -> None:  # fmt: skip
    """The kernel of the input transform: v (blocks, groups, positions, channels, tile_n) fp32 = matrix d matrix^T, where d are the
    n x n pixels of x (N, groups channels, H, W) that a tile sees (`geometry`), of the blocks of tiles [first, first + limit); zero
    for tiles that do not exist. Lanes are tiles. `matrix` is (n, n). The panel's depth i `window` + j has the pixels (i, j) of all
    tiles of the item."""
    n, window, C = len(matrix), len(geometry.row_offsets), geometry.channels
    with conv_tiled.for_each_block(k, x, first, limit, images=images, geometry=geometry, tile_n=tile_n, most=RUN) as r:
        dst = v.at((((r.begin + r.block) * geometry.groups + r.group) * (n * n) * C + r.channel) * tile_n)
        at = r.panel.at.at(r.skip + r.block * tile_n)
        for lanes in range(0, tile_n, k.lanes):
            d = [[at.at((i * window + j) * r.panel.pitch).load(lanes) for j in range(window)] for i in range(window)]
            for position, value in enumerate(x for row in transform_square(k, matrix, d) for x in row):
                dst.store(value, position * (C * tile_n) + lanes)


def winograd_gemm(k, y, u, v, first, limit, *, images: Images, conv: TiledConv, m: int, mode: str) -> None:
    """The kernel: y (N, groups rows, H, W) = A^T (u v) A of the tiles in blocks [first, first + limit), stored or added (`mode`). u
    (positions, groups rows, C) is from `winograd_filters`, v (blocks, groups, positions, C, tile_n) from `winograd_input`, n^2
    positions of fp32: the batched GEMM with the output transform as its epilogue. Scratch: `products` [position][filter][tile] of a
    work item, of `conv.filters` x `width` for each position; behind them `squares`, where a vector of tiles is transposed
    (`store_tiles`)."""
    n = m + 2  # pixels of a tile's side
    A = output_matrix(m, 3)
    width = conv.group * conv.tile.nr(k.isa)  # tiles of a work item
    products = k.thread_scratch()
    squares = products.bytes(4 * n * n * conv.filters * width)

    def output_transform(src, tile, num_tiles, channel) -> None:
        """The outputs of a vector of tiles, whose first product is at `src`."""
        square = [[src.load((i * n + j) * (conv.filters * width)) for j in range(n)] for i in range(n)]
        store_tiles(k, y, squares, transform_square(k, A, square), tile, num_tiles, channel, conv, mode)

    conv_tiled.batched_gemm(k, u, v, first, limit, products, output_transform, images=images, conv=conv, positions=n * n)


def store_tiles(k, y, squares, outputs, tile, num_tiles, channel, conv: TiledConv, mode: str) -> None:
    """Write the m x m outputs[i][j], vectors whose lanes are tiles from number `tile` on, to image plane `channel` of y; the first
    `num_tiles` lanes exist. They are transposed through `squares` in scratch, [tile][m][4] fp32; then each tile's rows are stored,
    as vectors of m where it lies in the image whole. `tile`: counted over all images, rows of tiles of (TH, TW) an image."""
    m, (H, W), (TH, TW), lanes = conv.m, conv.size, conv.geometry.output_size, k.lanes
    tile_stride = m * 4  # a tile has m rows of 4, of which m are used
    zero = k.to(0.0, k.vec)
    for i, row in enumerate(outputs):
        columns = transpose_groups(k, [*row, *[zero] * (4 - m)])
        for j, four in enumerate(columns):  # tiles j, j + 4, ...
            for g in range(lanes // 4):
                quad = k.shuffle(four, None, list(range(4 * g, 4 * g + 4)))  # row i of tile 4 g + j
                at = squares.at((4 * g + j) * tile_stride + i * 4)
                k.line(f"store {quad.typed}, ptr {at.ref}, align 16")
    with k.loop(0, num_tiles) as lane:
        t = tile + lane
        image, ty, tx = t // (TH * TW), t % (TH * TW) // TW * m, t % TW * m  # the tile's first pixel
        src = squares.at(lane * tile_stride)
        dst = y.at(((image * (conv.geometry.groups * conv.geometry.rows) + channel) * H + ty) * W + tx)
        whole = (ty + m <= H) & (tx + m <= W)
        stores_rows = y.dtype == "fp32" and mode == "store"
        if stores_rows:
            with k.when(whole):
                for i in range(m):
                    four = k.op(f"<{m} x float>", f"load <{m} x float>, ptr {src.at(i * 4).ref}, align 4")
                    k.line(f"store {four.typed}, ptr {dst.at(i * W).ref}, align 4")
        with k.otherwise(whole) if stores_rows else k.when(k.const(1, "i1")):  # the pixels that are in the image, one by one
            rows, columns = k.min(H - ty, m), k.min(W - tx, m)
            with k.loop(0, rows) as i, k.loop(0, columns) as j:
                accumulate_scalar(k, dst, i * W + j, src.get(i * 4 + j), mode)


def winograd_wgrad_output(k, dw, products, *, size: int, m: int, flip: bool, mode: str) -> None:
    """The kernel: dw (size, 3, 3) = A^T products A, of products (positions, size) that `tiled_wgrad_gemm` wrote. `flip`: filters
    are read from their end. Stored or added (`mode`), element by element."""
    n, A = m + 2, output_matrix(3, m)  # here 3 x 3 taps are the outputs
    with k.parallel_range(ceil_div(size, k.lanes), 8) as (begin, end), k.loop(begin, end) as block:
        first = block * k.lanes
        mask = k.mask_first(size - first) if size % k.lanes else None
        square = [[products.load((i * n + j) * size + first, mask) for j in range(n)] for i in range(n)]
        taps = [v for row in transform_square(k, A, square) for v in row]
        for t, v in enumerate(reversed(taps) if flip else taps):
            for lane in range(k.lanes):
                with k.when(first + lane < size):
                    accumulate_scalar(k, dw, (first + lane) * 9 + t, k.lane(v, lane), mode)


def winograd(m: int) -> TileAlgorithm:
    """F(m x m, 3 x 3)."""
    matrix, of_dy = ({"matrix": tuple(map(tuple, found))} for found in (input_matrix(m + 2), filter_matrix(3, m)))
    return TileAlgorithm(m, m + 2, (m + 2) ** 2, winograd_filters, winograd_input, winograd_gemm, winograd_wgrad_output, {"m": m},
        matrix, of_dy, run=RUN, rows=0, epilogue=16, most_bytes=M_BYTES, group_bytes=GROUP_BYTES, wgrad_kc=WGRAD_KC)  # fmt: skip
