"""FFT convolution, for large filters: overlap-save on tiles of F x F pixels, F = 16 or 32 (transforms: fourier.py).

A tile's transform times the conjugate of the filter's is the transform of m x m outputs, m = F + 1 - max(R, S), and of others that
wrapped around and are dropped. Neighbouring tiles overlap, so nothing is added up. For wgrad a tile of dy is the filter. A complex
product (c + i d)(a + i b) takes three real ones (Gauss): with

    k1 = c (a + b), k2 = (d - c) a, k3 = (c + d) b      its parts are k1 - k3 and k1 + k2,

so each complex number of a spectrum takes three positions of conv_transform_domain.py, 3 F F / 2 in all: 3.8 multiplications for
each output of a filter of 7 x 7, which has 49. The operand a + i b is stored as (a + b, a, b), the one that is conjugated, c - i d,
as (c, -d - c, c - d). An element that holds a pair of real numbers (`is_real_pair`) has two real products, c a and d b: there the
second operand is stored as (0, c, -d), and the two parts of the result have changed places.

Shapes: tiles of pixels (tiles, F, F), spectra (F / 2, F, tiles) complex, in memory (positions, rows, tiles) fp32 with STRIDE
elements from a position to the next. TH x TW tiles cover an image, tile (i, j) begins STEP = m pixels after its neighbour; a pass
has up to PASS_TILES tiles. 128 threads do 16 tiles, or 8, and have two columns and then a row each. So lanes side by side write one
position of 16 or 8 tiles, 64 or 32 bytes. The compiler would shuffle all of them to write 16 bytes for each thread, if it knew that
addresses are multiples of 16: it gets an operand `unaligned`, always 0, which hides that."""

from __future__ import annotations

from barellm.cuda.kernels.common import store_or_add
from barellm.cuda.kernels.conv.conv_gather import reflect_index
from barellm.cuda.kernels.conv.conv_transform_domain import FpropAlgorithm, TransformKernel, WgradAlgorithm
from barellm.cuda.kernels.conv.fourier import inverse_spectrum, spectrum
from barellm.cuda.lang import DeviceFunction, device, tl

WARPS = 4
_THREADS = 32 * WARPS


@device
def spectrum_pointers(base, F: tl.constexpr, STRIDE: tl.constexpr):
    """Pointers (F / 2, F, tiles) to the first of the three positions of each complex element, elements in column-major order.
    `base` (tiles,): pointers to position 0."""
    index = tl.arange(0, F)[None, :] * (F // 2) + tl.arange(0, F // 2)[:, None]
    return base[None, None, :] + (index.to(tl.int64) * (3 * STRIDE))[:, :, None]


@device
def is_real_pair(F: tl.constexpr):
    """Which elements (F / 2, F, 1) of a spectrum hold two real numbers instead of a complex one: (0, 0) and (0, F / 2)."""
    return ((tl.arange(0, F) % (F // 2) == 0)[None, :] & (tl.arange(0, F // 2) == 0)[:, None])[:, :, None]


@device
def store_spectrum(base, mask, x, STRIDE: tl.constexpr, CONJUGATE: tl.constexpr):
    """Transform tiles x (tiles, F, F) and store the three real numbers of each element. `base`, `mask` (tiles,): pointers to a
    tile's position 0, STRIDE elements from a position to the next. CONJUGATE: x is the operand whose conjugate is multiplied."""
    F: tl.constexpr = x.shape[1]
    c, d = spectrum(x)
    base, mask3 = spectrum_pointers(base, F, STRIDE), mask[None, None, :]
    if CONJUGATE:  # c - i d as (c, -d - c, c - d)
        real_pair = is_real_pair(F)
        tl.store(base, tl.where(real_pair, 0.0, c), mask=mask3)
        tl.store(base + STRIDE, tl.where(real_pair, c, -d - c), mask=mask3)
        tl.store(base + 2 * STRIDE, tl.where(real_pair, -d, c - d), mask=mask3)
    else:  # c + i d as (c + d, c, d)
        tl.store(base, c + d, mask=mask3)
        tl.store(base + STRIDE, c, mask=mask3)
        tl.store(base + 2 * STRIDE, d, mask=mask3)


@device
def sum_slices(pointers, mask, SLICES: tl.constexpr, SLICE_STRIDE: tl.constexpr):
    """The sum over split-K slices, SLICE_STRIDE elements apart, in order."""
    total = tl.load(pointers, mask=mask, other=0.0)
    for _ in range(1, SLICES):
        pointers += SLICE_STRIDE
        total += tl.load(pointers, mask=mask, other=0.0)
    return total


@device
def inverse_transform(gemm_out, mask, F: tl.constexpr, STRIDE: tl.constexpr, SLICES: tl.constexpr):
    """Output transform: pixels (tiles, F, F) from the GEMMs' products k1, k2, k3 of each element, summed over SLICES of split-K.
    `gemm_out`, `mask` (tiles,): pointers to a tile's position 0, STRIDE elements from a position to the next."""
    pointers, mask3 = spectrum_pointers(gemm_out, F, STRIDE), mask[None, None, :]
    SLICE_STRIDE: tl.constexpr = 3 * F * F // 2 * STRIDE
    k1 = sum_slices(pointers, mask3, SLICES, SLICE_STRIDE)
    k2 = sum_slices(pointers + STRIDE, mask3, SLICES, SLICE_STRIDE)
    k3 = sum_slices(pointers + 2 * STRIDE, mask3, SLICES, SLICE_STRIDE)
    a, b, real_pair = k1 - k3, k1 + k2, is_real_pair(F)  # real and imaginary part; swapped in pairs of real numbers
    return inverse_spectrum(tl.where(real_pair, b, a), tl.where(real_pair, a, b)) * (1.0 / (F * F))


@device
def fft_filters(
    u, a, unaligned, F: tl.constexpr, R: tl.constexpr, S: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    CHANNELS: tl.constexpr, A_GROUP: tl.constexpr, A_ROW: tl.constexpr, A_CHANNEL: tl.constexpr, A_FIRST: tl.constexpr,
    A_R: tl.constexpr, A_S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Filter transform: u (positions, GROUPS * ROWS, CHANNELS) of filters (R, S), padded with zeros to (F, F). A_NAME: strides of
    the filters `a` (FILTER of convolution.py). A program does BLOCK filters."""
    SIZE: tl.constexpr = GROUPS * ROWS * CHANNELS
    index = tl.program_id(0) * BLOCK + unaligned + tl.arange(0, BLOCK)
    row, live = index // CHANNELS, index < SIZE
    taps = a + row // ROWS * A_GROUP + row % ROWS * A_ROW + index % CHANNELS * A_CHANNEL + A_FIRST
    r, s = tl.arange(0, F)[None, :, None], tl.arange(0, F)[None, None, :]
    in_filter = live[:, None, None] & (r < R) & (s < S)
    x = tl.load(taps[:, None, None] + r * A_R + s * A_S, mask=in_filter, other=0.0)
    store_spectrum(u + index, live, x.to(tl.float32), SIZE, True)


@device
def fft_tiles(
    v, x, first, count, unaligned, F: tl.constexpr, SIDE: tl.constexpr, CONJUGATE: tl.constexpr, CHANNELS: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr, STEP: tl.constexpr, TOP: tl.constexpr,
    LEFT: tl.constexpr, REFLECT: tl.constexpr, PASS_TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Input transform (forward FFT): v (positions, CHANNELS, PASS_TILES) of the tiles [first, first + count) of x (N, CHANNELS, H,
    W); behind them zeros. Tile (i, j) of an image begins at the pixel (i STEP + TOP, j STEP + LEFT); SIDE x SIDE of its F x F
    pixels are loaded, the others are zeros. CONJUGATE: x takes the filter's place (dy in wgrad). REFLECT: padding reflects. A
    program does BLOCK tiles of a channel; `unaligned`: 0, see the module's docstring."""
    t, channel = tl.program_id(0) * BLOCK + unaligned + tl.arange(0, BLOCK), tl.program_id(1)
    tile = first + t
    plane = (tile // (TH * TW)).to(tl.int64) * CHANNELS + channel
    i, j = tl.arange(0, F)[None, :, None], tl.arange(0, F)[None, None, :]
    row = (tile % (TH * TW) // TW * STEP + TOP)[:, None, None] + i
    column = (tile % TW * STEP + LEFT)[:, None, None] + j
    if REFLECT:
        row, column = reflect_index(row, H), reflect_index(column, W)
    in_image = (t < count)[:, None, None] & (i < SIDE) & (j < SIDE) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    pixels = tl.load(x + (plane * (H * W))[:, None, None] + row * W + column, mask=in_image, other=0.0)
    store_spectrum(v + channel * PASS_TILES + t, t < PASS_TILES, pixels.to(tl.float32), CHANNELS * PASS_TILES, CONJUGATE)


@device
def fft_images(
    y, gemm_out, first, count, unaligned, scalars, F: tl.constexpr, STEP: tl.constexpr, CHANNELS: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr, PASS_TILES: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Output transform (inverse FFT): the first STEP x STEP pixels of the tiles [first, first + count) into y (N, CHANNELS, H, W),
    from gemm_out (positions, CHANNELS, PASS_TILES). A program does BLOCK tiles of a channel."""
    t, channel = tl.program_id(0) * BLOCK + unaligned + tl.arange(0, BLOCK), tl.program_id(1)
    tile = first + t
    pixels = inverse_transform(gemm_out + channel * PASS_TILES + t, t < count, F, CHANNELS * PASS_TILES, 1)
    plane = (tile // (TH * TW)).to(tl.int64) * CHANNELS + channel
    i, j = tl.arange(0, F)[None, :, None], tl.arange(0, F)[None, None, :]
    row = (tile % (TH * TW) // TW * STEP)[:, None, None] + i
    column = (tile % TW * STEP)[:, None, None] + j
    in_image = (t < count)[:, None, None] & (i < STEP) & (j < STEP) & (row < H) & (column < W)
    store_or_add(y + (plane * (H * W))[:, None, None] + row * W + column, in_image, pixels, scalars, MODE)


@device
def fft_wgrad(
    dw, gemm_out, unaligned, scalars, F: tl.constexpr, R: tl.constexpr, S: tl.constexpr, SLICES: tl.constexpr,
    FILTERS: tl.constexpr, FLIP: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Output transform of wgrad: dw (FILTERS, R, S) from gemm_out (SLICES, positions, FILTERS), summed over split-K slices; the
    first R x S of F x F values. FLIP: taps are stored in reverse order, for true convolution. A program does BLOCK filters."""
    index = tl.program_id(0) * BLOCK + unaligned + tl.arange(0, BLOCK)
    filters = inverse_transform(gemm_out + index, index < FILTERS, F, FILTERS, SLICES)
    r, s = tl.arange(0, F)[None, :, None], tl.arange(0, F)[None, None, :]
    tap = r * S + s
    if FLIP:
        tap = R * S - 1 - tap
    in_filter = (index < FILTERS)[:, None, None] & (r < R) & (s < S)
    store_or_add(dw + index[:, None, None] * (R * S) + tap, in_filter, filters, scalars, MODE)


def fft_size(R: int, S: int) -> int:
    """F, the side of a tile, for filters of R x S: at least half of a tile's rows are outputs (m >= F / 2)."""
    return 16 if max(R, S) <= 9 else 32


def transform_kernel(function: DeviceFunction, F: int, **constants: int) -> TransformKernel:
    """A transform with _THREADS / (F / 2) tiles a program: each thread has one row of a spectrum."""
    return TransformKernel(function, {"F": F, **constants}, _THREADS // (F // 2), WARPS, {"unaligned": 0})


def algorithms(R: int, S: int) -> tuple[FpropAlgorithm, WgradAlgorithm]:
    """The FFT algorithms for fprop or dgrad, and for wgrad, of filters of R x S; m: outputs a side of a tile."""
    F = fft_size(R, S)
    m, positions = F + 1 - max(R, S), 3 * F * F // 2
    tiles = transform_kernel(fft_tiles, F, SIDE=F, CONJUGATE=False)
    filters, images = transform_kernel(fft_filters, F, R=R, S=S), transform_kernel(fft_images, F, STEP=m)
    dy, dw = transform_kernel(fft_tiles, F, SIDE=m, CONJUGATE=True), transform_kernel(fft_wgrad, F, R=R, S=S)
    return FpropAlgorithm(m, (R, S), positions, filters, tiles, images), WgradAlgorithm(m, (R, S), positions, dy, tiles, dw)
