"""Convolutions with 3 x 3 filters by Winograd's F(2x2, 3x3) and F(4x4, 3x3): 2.25 and 4 times fewer products (program/winograd.py).

Positions (conv_transform_domain.py) are the n^2 elements of a transformed tile, n = m + 2. In a transform each thread has one tile,
or one filter.
"""

from __future__ import annotations

from barellm.cuda.kernels.common import store_or_add
from barellm.cuda.kernels.conv.conv_gather import reflect_index
from barellm.cuda.kernels.conv.conv_transform_domain import BLOCK, FpropAlgorithm, TransformKernel, WgradAlgorithm
from barellm.cuda.lang import DeviceFunction, device, tl
from barellm.program.winograd import Matrix, filter_matrix, input_matrix, output_matrix


@device
def element(MATRIX: tl.constexpr, ROW: tl.constexpr, v):
    """Element ROW of MATRIX v."""
    total = tl.zeros_like(v[0])
    for i in tl.static_range(len(v)):
        if MATRIX[ROW][i] == 1.0:
            total += v[i]
        elif MATRIX[ROW][i] != 0.0:
            total += v[i] * MATRIX[ROW][i]
    return total


@device
def both_ways(MATRIX: tl.constexpr, square):
    """MATRIX square MATRIX^T of as many squares as a tensor has elements; a square is a tuple of tensors, row by row."""
    SIZE: tl.constexpr = len(MATRIX[0])
    EPILOGUES_BY_KIND: tl.constexpr = len(MATRIX)
    half = ()
    for i in tl.static_range(EPILOGUES_BY_KIND):
        for j in tl.static_range(SIZE):
            half += (element(MATRIX, i, square[j::SIZE]),)
    made = ()
    for i in tl.static_range(EPILOGUES_BY_KIND):
        for j in tl.static_range(EPILOGUES_BY_KIND):
            made += (element(MATRIX, j, half[i * SIZE : i * SIZE + SIZE]),)
    return made


@device
def winograd_filters(
    u, a, MATRIX: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, A_GROUP: tl.constexpr,
    A_ROW: tl.constexpr, A_CHANNEL: tl.constexpr, A_FIRST: tl.constexpr, A_R: tl.constexpr, A_S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """u (positions, GROUPS ROWS, CHANNELS) = MATRIX g MATRIX^T."""
    SIZE: tl.constexpr = GROUPS * ROWS * CHANNELS
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = at // CHANNELS
    of = a + row // ROWS * A_GROUP + row % ROWS * A_ROW + at % CHANNELS * A_CHANNEL + A_FIRST
    taps = ()
    for r in tl.static_range(3):
        for s in tl.static_range(3):
            taps += (tl.load(of + r * A_R + s * A_S, mask=at < SIZE, other=0.0).to(tl.float32),)
    made = both_ways(MATRIX, taps)
    for position in tl.static_range(len(made)):
        tl.store(u + position * SIZE + at, made[position], mask=at < SIZE)


@device
def winograd_tiles(
    v, x, first, count, MATRIX: tl.constexpr, CHANNELS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, TH: tl.constexpr,
    TW: tl.constexpr, STEP: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, REFLECT: tl.constexpr, ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """v (positions, CHANNELS, ROOM) = MATRIX d MATRIX^T of the tiles [first, first + count) of x (N, CHANNELS, H, W), and zeros up
    to a whole block. Tile (i, j) of an image begins at the pixel (i STEP + TOP, j STEP + LEFT)."""
    SIZE: tl.constexpr = len(MATRIX[0])
    at, channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    tile = first + at
    plane = (tile // (TH * TW)).to(tl.int64) * CHANNELS + channel
    top, left = tile % (TH * TW) // TW * STEP + TOP, tile % TW * STEP + LEFT
    seen = ()
    for i in tl.static_range(SIZE):
        for j in tl.static_range(SIZE):
            row, column = top + i, left + j
            if REFLECT:
                row, column = reflect_index(row, H), reflect_index(column, W)
            inside = (at < count) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
            seen += (tl.load(x + plane * (H * W) + row * W + column, mask=inside, other=0.0).to(tl.float32),)
    made = both_ways(MATRIX, seen)
    for position in tl.static_range(len(made)):
        tl.store(v + (position * CHANNELS + channel) * ROOM + at, made[position])


@device
def winograd_images(
    y, products, first, count, scalars, MATRIX: tl.constexpr, CHANNELS: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    TH: tl.constexpr, TW: tl.constexpr, ROOM: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of the tiles [first, first + count), what lies in the images y (N, CHANNELS, H, W)."""
    SIZE: tl.constexpr = len(MATRIX[0])
    STEP: tl.constexpr = len(MATRIX)
    at, channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    tile, there = first + at, at < count
    square = ()
    for position in tl.static_range(SIZE * SIZE):
        square += (tl.load(products + (position * CHANNELS + channel) * ROOM + at, mask=there, other=0.0),)
    made = both_ways(MATRIX, square)
    plane = (tile // (TH * TW)).to(tl.int64) * CHANNELS + channel
    top, left = tile % (TH * TW) // TW * STEP, tile % TW * STEP
    for i in tl.static_range(STEP):
        for j in tl.static_range(STEP):
            row, column = top + i, left + j
            to = y + plane * (H * W) + row * W + column
            store_or_add(to, there & (row < H) & (column < W), made[i * STEP + j], scalars, MODE)


@device
def winograd_wgrad(
    dw, products, scalars, MATRIX: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr, FLIP: tl.constexpr, MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """dw (SIZE, 3, 3) of the sum over parts of products (PARTS, positions, SIZE). FLIP: filters are read from their end."""
    POSITIONS: tl.constexpr = len(MATRIX[0]) * len(MATRIX[0])
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    square = ()
    for position in tl.static_range(POSITIONS):
        total = tl.zeros((BLOCK,), tl.float32)
        for part in range(PARTS):
            total += tl.load(products + (part * POSITIONS + position) * SIZE + at, mask=at < SIZE, other=0.0)
        square += (total,)
    made = both_ways(MATRIX, square)
    for tap in tl.static_range(9):
        store_or_add(dw + at * 9 + (8 - tap if FLIP else tap), at < SIZE, made[tap], scalars, MODE)


def matrix(values: Matrix) -> tuple[tuple[float, ...], ...]:
    """A matrix as a constant of the code."""
    return tuple(map(tuple, values))


def _step(function: DeviceFunction, values: Matrix) -> TransformKernel:
    return TransformKernel(function, {"MATRIX": matrix(values)}, BLOCK)


def algorithms(m: int) -> tuple[FpropAlgorithm, WgradAlgorithm]:
    """How y or dx, and dw, are computed in tiles of m x m."""
    n = m + 2
    tiles = _step(winograd_tiles, input_matrix(n))
    filters, images = _step(winograd_filters, filter_matrix(m, 3)), _step(winograd_images, output_matrix(m, 3))
    dy, dw = _step(winograd_tiles, filter_matrix(3, m)), _step(winograd_wgrad, output_matrix(3, m))
    return FpropAlgorithm(m, (3, 3), n * n, filters, tiles, images), WgradAlgorithm(m, (3, 3), n * n, dy, tiles, dw)
