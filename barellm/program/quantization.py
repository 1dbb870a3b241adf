"""Weight quantization: how a matrix becomes codes and scales, and how codes lie in memory.

A row of a matrix (N, K) is cut into groups of neighbouring elements. A group has one scale, and each of its elements is a code:
the value of an element is its code's value times the scale. The values of the 4-bit codes stand in a table of 16 numbers that bf16
holds exactly, so that kernels can look them up in registers.

Scales are numbers of fp16, times a power of two for the whole row. It is 1 where all of a row's scales are normal numbers of fp16.
Its exponent lets a row have any magnitude that fp32 has.

Codes lie in tiles of 16 rows of the matrix, which are columns of a matmul's result, and in these in blocks of 8 elements of each
row: codes (tiles, blocks, 128), scales (tiles, groups + 1, 16), the last of which are the exponents of the rows. So a matmul reads
both from the beginning to the end, and the lanes of a vector are columns. What is beyond the matrix has the code of zero."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from barellm.errors import UserError, nearest
from barellm.program.integers import ceil_div

TILE, BLOCK = 16, 8  # rows of the matrix in a tile, elements of each in a block
GROUPS = (32, 64, 128)

INTEGERS = tuple(float(n - 8) for n in range(16))
# The quantiles of a normal distribution that QLoRA takes (Dettmers et al. 2023), each as the nearest bf16.
NORMAL_QUANTILES = (-1.0, -0.6953125, -0.5234375, -0.39453125, -0.28515625, -0.1845703125, -0.0908203125, 0.0,
                    0.07958984375, 0.1611328125, 0.24609375, 0.337890625, 0.44140625, 0.5625, 0.72265625, 1.0)  # fmt: skip
# Until 2026-11-25 code 6 stood for another number. Codes of that time keep their values.
NORMAL_QUANTILES_V1 = (*NORMAL_QUANTILES[:6], -0.09130859375, *NORMAL_QUANTILES[7:])

LEAST, TOP = -14, 13  # exponents of fp16's smallest normal number, and that a row's largest scale gets if it needs one


@dataclass(frozen=True)
class Scheme:
    """One way to quantise. `codes` is the dtype of the codes, `group` the elements that share a scale (0: a whole row), `table`
    the values of 4-bit codes, () where a code is its own value."""

    name: str
    codes: str
    group: int
    table: tuple[float, ...] = ()

    @property
    def largest(self) -> float:
        """The greatest magnitude of a code's value: a scale is that of a group over this."""
        return max(map(abs, self.table)) if self.table else 127.0

    @property
    def limit(self) -> np.float32:
        """The largest scale: every code's value times it is finite in fp32."""
        mantissa, exponent = np.frexp(float(np.finfo(np.float32).max) / self.largest)
        return np.float32(np.ldexp(int(mantissa * 2048) / 2048, exponent))  # fp16 has 11 places

    def groups(self, K: int) -> int:
        return ceil_div(K, self.group) if self.group else 1

    def shapes(self, N: int, K: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the codes and of the scales of a matrix (N, K)."""
        tiles = ceil_div(N, TILE)
        return (tiles, ceil_div(K, BLOCK), TILE * BLOCK), (tiles, self.groups(K) + 1, TILE)


SCHEMES = {
    "int8": Scheme("int8", "i8", 0),
    "int4": Scheme("int4", "u4", 32, INTEGERS),
    "nf4": Scheme("nf4", "u4", 64, NORMAL_QUANTILES),
}
EARLIER = {"nf4-v1": Scheme("nf4-v1", "u4", 64, NORMAL_QUANTILES_V1)}  # to read what was written so


@cache
def scheme(name: str) -> Scheme:
    """The scheme of a name: int8, int4, nf4, or one with another group size, as "int4/128". UserError for others."""
    kind, _, group = name.partition("/")
    base = SCHEMES.get(kind) or EARLIER.get(kind)
    if base is None:
        raise UserError(f"unknown weights {name!r}{nearest(kind, SCHEMES)} (known: {', '.join(SCHEMES)})")
    if not group:
        return base
    if group not in map(str, GROUPS):
        raise UserError(f"weights {name!r} have groups of {group!r}, expected {', '.join(map(str, GROUPS))}")
    return Scheme(name, base.codes, int(group), base.table)


def quantize(w_NK: np.ndarray, how: Scheme, *, name: str = "w", first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Quantize a matrix: (codes (N, K), scales (N, groups)). A group's element of largest magnitude gets the code of largest
    magnitude, all others the nearest code. Scales are fp16 where all of them are normal numbers or zero, else fp32. UserError for a
    row with non-finite elements, named as row `first` + n of `name`."""
    w = np.asarray(w_NK, np.float32)
    N, K = w.shape
    group, groups = how.group or K, how.groups(K)
    if groups * group != K:
        w = np.concatenate([w, np.zeros((N, groups * group - K), np.float32)], 1)
    grouped = w.reshape(N, groups, group)
    largest, least = grouped.max(-1), grouped.min(-1)
    finite = np.isfinite(largest) & np.isfinite(least)
    if not finite.all():
        row = int(np.argmin(finite.all(1)))
        found = w[row][~np.isfinite(w[row])][0]
        raise UserError(f"row {first + row} of {name} has {found}, expected finite numbers to quantize")
    scales, exponents = halves(scales_of(largest, least, how))
    if exponents.any():
        grouped = np.ldexp(grouped, -exponents[..., None])
    return nearest_codes(grouped, scales[..., None], how).reshape(N, -1)[:, :K], joined(scales, exponents)


def scales_of(largest: np.ndarray, least: np.ndarray, how: Scheme) -> np.ndarray:
    """fp32 scales of groups with these largest and least elements. In int4 only -8 has the largest magnitude: if a group's largest
    magnitude is positive, its scale is negative, so that the element gets this code."""
    if how.table and -how.largest in how.table and how.largest not in how.table:
        size = np.where(largest >= -least, largest, least) / np.float32(-how.largest)
    else:
        size = np.maximum(largest, -least) / np.float32(how.largest)
    return np.clip(size, -how.limit, how.limit)


def halves(scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales (N, groups) as fp16, and exponents (N, 1) of the powers of two that multiply each row: 0 if all are normal fp16
    numbers, zero or non-finite. Otherwise the row's largest scale gets exponent TOP; ones 2^27 times smaller lose precision."""
    sizes, none = np.abs(scales), np.zeros((len(scales), 1), np.int32)
    normal = (sizes == 0) | (sizes >= 2.0**LEAST) & (sizes <= np.finfo(np.float16).max)
    if normal.all():
        return scales.astype(np.float16), none
    most = sizes.max(1, keepdims=True)
    mantissa, exponent = np.frexp(most)
    # The exponent of the largest after rounding, so that rounding what is rounded already changes nothing.
    exponent = exponent - 1 + (mantissa.astype(np.float16) == 1)
    held = ~normal.all(1, keepdims=True) & np.isfinite(most)
    exponents = np.where(held, np.maximum(exponent - TOP, -126), none)
    return np.ldexp(scales, -exponents).astype(np.float16), exponents


def joined(scales: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """The scales that `halves` took apart: fp16 where no row has an exponent."""
    return np.ldexp(scales.astype(np.float32), exponents) if exponents.any() else scales


def nearest_codes(w: np.ndarray, scales: np.ndarray, how: Scheme) -> np.ndarray:
    """The code whose value times the scale is nearest; ties go to the even integer, in tables to the lower value."""
    scales = scales.astype(np.float32)
    with np.errstate(divide="ignore"):
        units = w * np.where(scales == 0, np.float32(0), 1 / scales)
    if not how.table:
        return np.clip(np.rint(units), -127, 127).astype(np.int8)
    if how.table == INTEGERS:
        return (np.clip(np.rint(units), -8, 7) + 8).astype(np.uint8)
    codes = np.zeros(units.shape, np.uint8)
    for a, b in zip(how.table, how.table[1:], strict=False):
        codes += units > np.float32((a + b) / 2)
    return codes


def dequantize(codes: np.ndarray, scales: np.ndarray, how: Scheme) -> np.ndarray:
    """The matrix (N, K) that codes and scales stand for, fp32; with scales in float64, float64."""
    kind = np.float64 if scales.dtype == np.float64 else np.float32
    values = np.array(how.table, kind)[codes.astype(np.intp)] if how.table else codes.astype(kind)
    K = codes.shape[1]
    return values * np.repeat(scales.astype(kind), how.group or K, axis=1)[:, :K]


@cache
def _order(codes: str) -> np.ndarray:
    """The place in a block (128) of the code of row r and element k, at [r, k]. Of 4-bit codes the byte b holds places b and b +
    64. The places of such a byte's codes are made for kernels that look up bytes: see `cpu/kernels/gemm/codes.py`."""
    r, k = np.meshgrid(np.arange(TILE), np.arange(BLOCK), indexing="ij")
    if codes == "i8":
        return k * TILE + r
    return 64 * (k // 4) + 16 * (r // 4) + 8 * (k // 2 % 2) + 2 * (r % 4) + k % 2


def pack(codes: np.ndarray, scales: np.ndarray, how: Scheme) -> tuple[np.ndarray, np.ndarray]:
    """Codes (N, K) and scales (N, groups) in the tiled memory layout of the module's docstring. Padding has the code of zero.
    `scales`: fp16, or fp32 that are split into fp16 and an exponent for each row (`halves`)."""
    N, K = codes.shape
    (tiles, blocks, _), (_, groups, _) = how.shapes(N, K)
    zero = how.table.index(0.0) if how.table else 0
    padded = np.full((tiles * TILE, blocks * BLOCK), zero, codes.dtype)
    padded[:N, :K] = codes
    blocked = padded.reshape(tiles, TILE, blocks, BLOCK).transpose(0, 2, 1, 3).reshape(tiles, blocks, -1)
    inverse = np.empty_like(_order(how.codes).reshape(-1))
    inverse[_order(how.codes).reshape(-1)] = np.arange(TILE * BLOCK)
    all_scales = np.zeros((tiles * TILE, groups), np.float16)
    all_scales[:N, :-1], exponents = (scales, 0) if scales.dtype == np.float16 else halves(scales)
    all_scales[:N, -1:] = exponents
    return blocked[..., inverse], np.ascontiguousarray(all_scales.reshape(tiles, TILE, groups).transpose(0, 2, 1))


def unpack(codes: np.ndarray, scales: np.ndarray, how: Scheme, N: int, K: int) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of `pack`; scales become fp32, or fp64 if they are."""
    tiles, blocks, _ = codes.shape
    rows = codes[..., _order(how.codes).reshape(-1)].reshape(tiles, blocks, TILE, BLOCK)
    kind = np.float64 if scales.dtype == np.float64 else np.float32
    of_rows = scales.astype(kind).transpose(0, 2, 1).reshape(tiles * TILE, -1)[:N]
    return (
        rows.transpose(0, 2, 1, 3).reshape(tiles * TILE, blocks * BLOCK)[:N, :K],
        np.ldexp(of_rows[:, :-1], of_rows[:, -1:].astype(np.int32)),
    )


def packed_matrix(codes: Any, scales: Any, how: Scheme, N: int, K: int) -> np.ndarray:
    """The matrix (N, K) of codes and scales that lie as `pack` has them."""
    return dequantize(*unpack(codes, scales, how, N, K), how)
