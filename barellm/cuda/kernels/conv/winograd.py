"""Convolutions with 3 x 3 filters by Winograd's F(2x2, 3x3) and F(4x4, 3x3): 2.25 and 4 times fewer multiplications
(program/winograd.py).

Positions (conv_transform_domain.py) are the n^2 elements of a transformed tile, n = m + 2. In a transform each thread has one tile,
or one filter: a matrix of tiles is a Python tuple of tensors (BLOCK,), row by row, element e of all tiles of the program. MATRIX is
one of the transforms' constant matrices (Lavin and Gray 2016: B^T, G or A^T). TH x TW tiles cover an image, neighbours are STEP
pixels apart; a pass has up to PASS_TILES tiles."""

from __future__ import annotations

from barellm.cuda.kernels.common import store_or_add
from barellm.cuda.kernels.conv.conv_gather import reflect_index
from barellm.cuda.kernels.conv.conv_transform_domain import BLOCK, Algorithm, TransformKernel
from barellm.cuda.lang import DeviceFunction, device, tl
from barellm.program.winograd import Matrix, filter_matrix, input_matrix, output_matrix


@device
def product_element(MATRIX: tl.constexpr, ROW: tl.constexpr, v):
    """Element ROW of the product of MATRIX and the vector v, a tuple of tensors; factors 0 and 1 cost nothing."""
    total = tl.zeros_like(v[0])
    for i in tl.static_range(len(v)):
        if MATRIX[ROW][i] == 1.0:
            total += v[i]
        elif MATRIX[ROW][i] != 0.0:
            total += v[i] * MATRIX[ROW][i]
    return total


@device
def transform_2d(MATRIX: tl.constexpr, square):
    """MATRIX tile MATRIX^T of each of a program's tiles. `square`: a tuple of N^2 tensors for MATRIX (M, N); gives M^2."""
    SIZE: tl.constexpr = len(MATRIX[0])
    ROWS: tl.constexpr = len(MATRIX)
    half = ()  # MATRIX tile, (M, N)
    for i in tl.static_range(ROWS):
        for j in tl.static_range(SIZE):
            half += (product_element(MATRIX, i, square[j::SIZE]),)
    made = ()
    for i in tl.static_range(ROWS):
        for j in tl.static_range(ROWS):
            made += (product_element(MATRIX, j, half[i * SIZE : i * SIZE + SIZE]),)
    return made


@device
def winograd_filters(
    u, a, MATRIX: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, A_GROUP: tl.constexpr,
    A_ROW: tl.constexpr, A_CHANNEL: tl.constexpr, A_FIRST: tl.constexpr, A_R: tl.constexpr, A_S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Filter transform: u (positions, GROUPS * ROWS, CHANNELS) = MATRIX g MATRIX^T of 3 x 3 filters g. A_NAME: strides of the
    filters `a` (FILTER of convolution.py)."""
    SIZE: tl.constexpr = GROUPS * ROWS * CHANNELS
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = index // CHANNELS
    filters = a + row // ROWS * A_GROUP + row % ROWS * A_ROW + index % CHANNELS * A_CHANNEL + A_FIRST
    taps = ()
    for r in tl.static_range(3):
        for s in tl.static_range(3):
            taps += (tl.load(filters + r * A_R + s * A_S, mask=index < SIZE, other=0.0).to(tl.float32),)
    transformed = transform_2d(MATRIX, taps)
    for position in tl.static_range(len(transformed)):
        tl.store(u + position * SIZE + index, transformed[position], mask=index < SIZE)


@device
def winograd_tiles(
    v, x, first, count, MATRIX: tl.constexpr, CHANNELS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, TH: tl.constexpr,
    TW: tl.constexpr, STEP: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, REFLECT: tl.constexpr, PASS_TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Input transform: v (positions, CHANNELS, PASS_TILES) = MATRIX d MATRIX^T of the tiles d in [first, first + count) of x (N,
    CHANNELS, H, W); zeros behind them up to a multiple of BLOCK. Tile (i, j) of an image begins at the pixel (i STEP + TOP, j STEP
    + LEFT). REFLECT: padding reflects. A program does BLOCK tiles of a channel."""
    SIZE: tl.constexpr = len(MATRIX[0])
    t, channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    tile = first + t
    plane = (tile // (TH * TW)).to(tl.int64) * CHANNELS + channel
    top, left = tile % (TH * TW) // TW * STEP + TOP, tile % TW * STEP + LEFT
    pixels = ()
    for i in tl.static_range(SIZE):
        for j in tl.static_range(SIZE):
            row, column = top + i, left + j
            if REFLECT:
                row, column = reflect_index(row, H), reflect_index(column, W)
            inside = (t < count) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
            pixels += (tl.load(x + plane * (H * W) + row * W + column, mask=inside, other=0.0).to(tl.float32),)
    transformed = transform_2d(MATRIX, pixels)
    for position in tl.static_range(len(transformed)):
        tl.store(v + (position * CHANNELS + channel) * PASS_TILES + t, transformed[position])


@device
def winograd_images(
    y, gemm_out, first, count, scalars, MATRIX: tl.constexpr, CHANNELS: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    TH: tl.constexpr, TW: tl.constexpr, PASS_TILES: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Output transform: MATRIX m MATRIX^T, (STEP, STEP) outputs of each of the tiles [first, first + count), into y (N, CHANNELS,
    H, W), from gemm_out (positions, CHANNELS, PASS_TILES). A program does BLOCK tiles of a channel."""
    SIZE: tl.constexpr = len(MATRIX[0])
    STEP: tl.constexpr = len(MATRIX)
    t, channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    tile, live = first + t, t < count
    products = ()
    for position in tl.static_range(SIZE * SIZE):
        products += (tl.load(gemm_out + (position * CHANNELS + channel) * PASS_TILES + t, mask=live, other=0.0),)
    pixels = transform_2d(MATRIX, products)
    plane = (tile // (TH * TW)).to(tl.int64) * CHANNELS + channel
    top, left = tile % (TH * TW) // TW * STEP, tile % TW * STEP
    for i in tl.static_range(STEP):
        for j in tl.static_range(STEP):
            row, column = top + i, left + j
            to = y + plane * (H * W) + row * W + column
            store_or_add(to, live & (row < H) & (column < W), pixels[i * STEP + j], scalars, MODE)


@device
def winograd_wgrad(
    dw, gemm_out, scalars, MATRIX: tl.constexpr, SLICES: tl.constexpr, FILTERS: tl.constexpr, FLIP: tl.constexpr,
    MODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Output transform of wgrad: dw (FILTERS, 3, 3) from gemm_out (SLICES, positions, FILTERS), summed over split-K slices. FLIP:
    taps are stored in reverse order, for true convolution."""
    POSITIONS: tl.constexpr = len(MATRIX[0]) * len(MATRIX[0])
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    products = ()
    for position in tl.static_range(POSITIONS):
        total = tl.zeros((BLOCK,), tl.float32)
        for slice in range(SLICES):
            total += tl.load(gemm_out + (slice * POSITIONS + position) * FILTERS + index, mask=index < FILTERS, other=0.0)
        products += (total,)
    taps = transform_2d(MATRIX, products)
    for tap in tl.static_range(9):
        store_or_add(dw + index * 9 + (8 - tap if FLIP else tap), index < FILTERS, taps[tap], scalars, MODE)


def as_constant(values: Matrix) -> tuple[tuple[float, ...], ...]:
    """A matrix as a constant of the code."""
    return tuple(map(tuple, values))


def transform_kernel(function: DeviceFunction, values: Matrix) -> TransformKernel:
    return TransformKernel(function, {"MATRIX": as_constant(values)}, BLOCK)


def algorithms(m: int) -> tuple[Algorithm, Algorithm]:
    """The algorithms for y or dx, and for dw, in tiles of m x m."""
    n = m + 2
    tiles = transform_kernel(winograd_tiles, input_matrix(n))
    filters, images = (
        transform_kernel(winograd_filters, filter_matrix(m, 3)),
        transform_kernel(winograd_images, output_matrix(m, 3)),
    )
    dy, dw = (transform_kernel(winograd_tiles, filter_matrix(3, m)), transform_kernel(winograd_wgrad, output_matrix(3, m)))
    return Algorithm(m, (3, 3), n * n, filters, tiles, images), Algorithm(m, (3, 3), n * n, dy, tiles, dw)
