"""Convolutions with large filters by the discrete Fourier transform of tiles of F x F pixels, F = 16 or 32 (fourier.py).

A tile's transform times the conjugate of the filter's is the transform of m x m outputs, m = F + 1 - the filter's size, and of
others that wrapped around and are left out. Neighbouring tiles overlap, so nothing is added up. For the gradient of the filters a
tile of dy is the filter. A complex product (c + i d)(a + i b) takes three real ones (Gauss): with

    k1 = c (a + b), k2 = (d - c) a, k3 = (c + d) b      its parts are k1 - k3 and k1 + k2,

so each complex number of a spectrum is three positions of conv_transform_domain.py, 3 F F / 2 in all: 3.8 products for each output
of a filter of 7 x 7, which has 49. A number that is a pair of real ones has two products: there (c, d - c, c + d) is (0, c, -d) of
what is to be conjugated, and the two parts of the result have changed places.

Shapes: squares (tiles, F, F), spectra (F / 2, F, tiles). 128 threads do 16 tiles, or 8, and have two columns and then a row each.
So lanes side by side write the numbers of a position of 16 or 8 tiles, 64 or 32 bytes. The compiler would move all of them once
more to write 16 bytes for each thread, if it knew that addresses are multiples of 16: it gets an operand `unaligned`, which is
always 0, and does not know that.
"""

from __future__ import annotations

from barellm.cuda.kernels.common import store_or_add
from barellm.cuda.kernels.conv.conv_gather import reflect_index
from barellm.cuda.kernels.conv.conv_transform_domain import FpropAlgorithm, TransformKernel, WgradAlgorithm
from barellm.cuda.kernels.conv.fourier import spectrum, squares_of
from barellm.cuda.lang import DeviceFunction, device, tl

WARPS = 4
_THREADS = 32 * WARPS


@device
def positions_of(to, F: tl.constexpr, APART: tl.constexpr):
    """Addresses (F / 2, F, tiles) of the first of three positions of each number. `to`: of the first position of all."""
    number = tl.arange(0, F)[None, :] * (F // 2) + tl.arange(0, F // 2)[:, None]
    return to[None, None, :] + (number.to(tl.int64) * (3 * APART))[:, :, None]


@device
def real(F: tl.constexpr):
    """Which numbers (F / 2, F, 1) are pairs of real ones."""
    return ((tl.arange(0, F) % (F // 2) == 0)[None, :] & (tl.arange(0, F // 2) == 0)[:, None])[:, :, None]


@device
def put_spectrum(to, mask, x, APART: tl.constexpr, FILTER: tl.constexpr):
    """The positions of tiles x. `to`, `mask`: (tiles,) of the first position, APART: from one to the next. FILTER: of the operand
    whose conjugate is multiplied."""
    F: tl.constexpr = x.shape[1]
    c, d = spectrum(x)
    to, inside = positions_of(to, F, APART), mask[None, None, :]
    if FILTER:
        pairs = real(F)
        tl.store(to, tl.where(pairs, 0.0, c), mask=inside)
        tl.store(to + APART, tl.where(pairs, c, -d - c), mask=inside)
        tl.store(to + 2 * APART, tl.where(pairs, -d, c - d), mask=inside)
    else:
        tl.store(to, c + d, mask=inside)
        tl.store(to + APART, c, mask=inside)
        tl.store(to + 2 * APART, d, mask=inside)


@device
def added(of, inside, PARTS: tl.constexpr, PITCH: tl.constexpr):
    """The sum of PARTS numbers, PITCH apart, in order."""
    total = tl.load(of, mask=inside, other=0.0)
    for _ in range(1, PARTS):
        of += PITCH
        total += tl.load(of, mask=inside, other=0.0)
    return total


@device
def taken_back(products, mask, F: tl.constexpr, APART: tl.constexpr, PARTS: tl.constexpr):
    """Squares of the sums of PARTS products. `products`, `mask`, APART: as of `put_spectrum`."""
    of, inside = positions_of(products, F, APART), mask[None, None, :]
    PITCH: tl.constexpr = 3 * F * F // 2 * APART
    k1, k2 = added(of, inside, PARTS, PITCH), added(of + APART, inside, PARTS, PITCH)
    k3 = added(of + 2 * APART, inside, PARTS, PITCH)
    a, b, pairs = k1 - k3, k1 + k2, real(F)
    return squares_of(tl.where(pairs, b, a), tl.where(pairs, a, b)) * (1.0 / (F * F))


@device
def fft_filters(
    u, a, unaligned, F: tl.constexpr, R: tl.constexpr, S: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    CHANNELS: tl.constexpr, A_GROUP: tl.constexpr, A_ROW: tl.constexpr, A_CHANNEL: tl.constexpr, A_FIRST: tl.constexpr,
    A_R: tl.constexpr, A_S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """u (positions, GROUPS ROWS, CHANNELS) of filters of R x S."""
    SIZE: tl.constexpr = GROUPS * ROWS * CHANNELS
    at = tl.program_id(0) * BLOCK + unaligned + tl.arange(0, BLOCK)
    row, there = at // CHANNELS, at < SIZE
    of = a + row // ROWS * A_GROUP + row % ROWS * A_ROW + at % CHANNELS * A_CHANNEL + A_FIRST
    r, s = tl.arange(0, F)[None, :, None], tl.arange(0, F)[None, None, :]
    inside = there[:, None, None] & (r < R) & (s < S)
    x = tl.load(of[:, None, None] + r * A_R + s * A_S, mask=inside, other=0.0)
    put_spectrum(u + at, there, x.to(tl.float32), SIZE, True)


@device
def fft_tiles(
    v, x, first, count, unaligned, F: tl.constexpr, SEEN: tl.constexpr, FILTER: tl.constexpr, CHANNELS: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr, STEP: tl.constexpr, TOP: tl.constexpr,
    LEFT: tl.constexpr, REFLECT: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """v (positions, CHANNELS, ROOM) of SEEN x SEEN pixels of the tiles [first, first + count) of x (N, CHANNELS, H, W), and zeros
    behind them. Tile (i, j) of an image begins at the pixel (i STEP + TOP, j STEP + LEFT)."""
    at, channel = tl.program_id(0) * BLOCK + unaligned + tl.arange(0, BLOCK), tl.program_id(1)
    tile = first + at
    plane = (tile // (TH * TW)).to(tl.int64) * CHANNELS + channel
    i, j = tl.arange(0, F)[None, :, None], tl.arange(0, F)[None, None, :]
    row = (tile % (TH * TW) // TW * STEP + TOP)[:, None, None] + i
    column = (tile % TW * STEP + LEFT)[:, None, None] + j
    if REFLECT:
        row, column = reflect_index(row, H), reflect_index(column, W)
    inside = (
        (at < count)[:, None, None] & (i < SEEN) & (j < SEEN) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    )
    pixels = tl.load(x + (plane * (H * W))[:, None, None] + row * W + column, mask=inside, other=0.0)
    put_spectrum(v + channel * ROOM + at, at < ROOM, pixels.to(tl.float32), CHANNELS * ROOM, FILTER)


@device
def fft_images(
    y, products, first, count, unaligned, scalars, F: tl.constexpr, STEP: tl.constexpr, CHANNELS: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr, ROOM: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of the tiles [first, first + count), what lies in the images y (N, CHANNELS, H, W)."""
    at, channel = tl.program_id(0) * BLOCK + unaligned + tl.arange(0, BLOCK), tl.program_id(1)
    tile = first + at
    pixels = taken_back(products + channel * ROOM + at, at < count, F, CHANNELS * ROOM, 1)
    plane = (tile // (TH * TW)).to(tl.int64) * CHANNELS + channel
    i, j = tl.arange(0, F)[None, :, None], tl.arange(0, F)[None, None, :]
    row = (tile % (TH * TW) // TW * STEP)[:, None, None] + i
    column = (tile % TW * STEP)[:, None, None] + j
    there = (at < count)[:, None, None] & (i < STEP) & (j < STEP) & (row < H) & (column < W)
    store_or_add(y + (plane * (H * W))[:, None, None] + row * W + column, there, pixels, scalars, MODE)


@device
def fft_wgrad(
    dw, products, unaligned, scalars, F: tl.constexpr, R: tl.constexpr, S: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr,
    FLIP: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dw (SIZE, R, S) of the sum over parts of products (PARTS, positions, SIZE). FLIP: filters are read from their end."""
    at = tl.program_id(0) * BLOCK + unaligned + tl.arange(0, BLOCK)
    filters = taken_back(products + at, at < SIZE, F, SIZE, PARTS)
    r, s = tl.arange(0, F)[None, :, None], tl.arange(0, F)[None, None, :]
    tap = r * S + s
    if FLIP:
        tap = R * S - 1 - tap
    there = (at < SIZE)[:, None, None] & (r < R) & (s < S)
    store_or_add(dw + at[:, None, None] * (R * S) + tap, there, filters, scalars, MODE)


def size_of(R: int, S: int) -> int:
    """F for a filter: where at least half of a tile's rows are outputs."""
    return 16 if max(R, S) <= 9 else 32


def _step(function: DeviceFunction, F: int, **constants: int) -> TransformKernel:
    """A number of a spectrum's row for each thread."""
    return TransformKernel(function, {"F": F, **constants}, _THREADS // (F // 2), WARPS, {"unaligned": 0})


def algorithms(R: int, S: int) -> tuple[FpropAlgorithm, WgradAlgorithm]:
    """How y or dx, and dw, are computed with filters of R x S."""
    F = size_of(R, S)
    m, positions = F + 1 - max(R, S), 3 * F * F // 2
    tiles = _step(fft_tiles, F, SEEN=F, FILTER=False)
    filters, images = _step(fft_filters, F, R=R, S=S), _step(fft_images, F, STEP=m)
    dy, dw = _step(fft_tiles, F, SEEN=m, FILTER=True), _step(fft_wgrad, F, R=R, S=S)
    return FpropAlgorithm(m, (R, S), positions, filters, tiles, images), WgradAlgorithm(
        m, (R, S), positions, dy, tiles, dw
    )
