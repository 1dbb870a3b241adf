"""Where the elements of a matrix lie: in the registers of a warp, and in shared memory as a descriptor of wgmma has it. By the PTX
ISA's sections on mma, ldmatrix and wgmma; pure functions of arrays.

A register holds 32 bits: two elements of bf16 or f16, the lower half first, one of tf32, fp32 or s32, or 32 of b1, the lowest
first. A lane's number is 4 g + t.
"""

from __future__ import annotations

from functools import cache

import numpy as np

LANES = 32
_G, _T = np.divmod(np.arange(LANES), 4)


def a_fragment(registers: np.ndarray, kind: str) -> np.ndarray:
    """A (..., 16, k) from registers (n, ..., 32), of `width` elements of a kind each. Register r: rows g + 8 (r mod 2), and
    columns from width t on, 4 width further for each two registers."""
    n = len(registers)
    parts = elements(registers, kind)  # (n, ..., 32, width)
    width = parts.shape[-1]
    split = parts.reshape(n // 2, 2, *parts.shape[1:-2], 8, 4, width)
    half, eight, *batch, g, t, e = range(split.ndim)
    return split.transpose(*batch, eight, g, half, t, e).reshape(*parts.shape[1:-2], 16, n // 2 * 4 * width)


def b_fragment(registers: np.ndarray, kind: str) -> np.ndarray:
    """B (..., k, 8). Register r: column g, rows from width (t + 4 r) on."""
    n = len(registers)
    parts = elements(registers, kind)
    width = parts.shape[-1]
    split = parts.reshape(n, *parts.shape[1:-2], 8, 4, width)
    r, *batch, g, t, e = range(split.ndim)
    return split.transpose(*batch, r, t, e, g).reshape(*parts.shape[1:-2], n * 4 * width, 8)


def c_fragment(registers: np.ndarray, dtype: type = np.float32) -> np.ndarray:
    """The sums (..., 16, 2 n) from n registers of fp32 or s32: register 4 j + 2 h + e has row g + 8 h, column 8 j + 2 t + e."""
    n = len(registers)
    split = registers.view(dtype).reshape(n // 4, 2, 2, *registers.shape[1:-1], 8, 4)
    j, h, e, *batch, g, t = range(split.ndim)
    return split.transpose(*batch, h, g, j, t, e).reshape(*registers.shape[1:-1], 16, 2 * n)


def c_registers(sums: np.ndarray, dtype: type = np.float32) -> np.ndarray:
    """The inverse of `c_fragment`: registers (n, ..., 32)."""
    *batch, rows, cols = sums.shape
    assert rows == 16
    split = sums.astype(dtype).reshape(*batch, 2, 8, cols // 8, 4, 2)
    first = len(batch)
    h, g, j, t, e = range(first, first + 5)
    return split.transpose(j, h, e, *range(first), g, t).reshape(cols // 2, *batch, LANES).view(np.uint32)


def elements(registers: np.ndarray, kind: str) -> np.ndarray:
    """fp32 of each element, on a new last axis: 2 of bf16 or f16, 1 of tf32, of which tensor cores see 19 bits, 32 of b1."""
    if kind == "b1":
        return (registers[..., None] >> np.arange(32, dtype=np.uint32) & np.uint32(1)).astype(np.float32)
    if kind == "tf32":
        return (registers & np.uint32(0xFFFFE000)).view(np.float32)[..., None]
    if kind == "f16":
        halves = np.stack([registers & np.uint32(0xFFFF), registers >> np.uint32(16)], -1)
        return halves.astype(np.uint16).view(np.float16).astype(np.float32)
    return np.stack([registers << np.uint32(16), registers & np.uint32(0xFFFF0000)], -1).view(np.float32)


def matrix_rows(registers: np.ndarray) -> np.ndarray:
    """Eight rows of 16 bytes, uint16 (..., 8, 8), from one register (..., 32) of ldmatrix or stmatrix: lane 4 g + t has elements
    2 t and 2 t + 1 of row g."""
    return np.ascontiguousarray(registers).view(np.uint16).reshape(*registers.shape[:-1], 8, 8)


def matrix_register(rows: np.ndarray) -> np.ndarray:
    """The inverse of `matrix_rows`."""
    return np.ascontiguousarray(rows, np.uint16).view(np.uint32).reshape(*rows.shape[:-2], LANES)


# --- shared memory ---

SWIZZLES = {0: 16, 1: 128, 2: 64, 3: 32}  # a descriptor's bits 62 and 63: bytes of a row that are exchanged among themselves
PHASES = {16: 0, 32: 1, 64: 3, 128: 7}


def swizzled(address: np.ndarray, span: int) -> np.ndarray:
    """Where a byte lies: among the 16-byte units of `span` bytes, by the address's own bits from 7 on."""
    return address ^ ((address >> 7 & PHASES[span]) << 4)


def descriptor(start: int, leading: int, stride: int, span: int) -> int:
    """wgmma's description of a matrix in shared memory, from bytes."""
    mode = next(number for number, nbytes in SWIZZLES.items() if nbytes == span)
    return start >> 4 & 0x3FFF | (leading >> 4 & 0x3FFF) << 16 | (stride >> 4 & 0x3FFF) << 32 | mode << 62


def operand_addresses(described: int, rows: int, depth: int, itemsize: int, *, transposed: bool) -> np.ndarray:
    """The address of each element (rows, depth) of an operand, whose rows run along M or N. `transposed`: those are contiguous,
    else the depth is."""
    assert not described & (0b111 << 46 | 0x1FFF << 49), f"bits of a descriptor that nobody here sets: {described:#x}"
    start, leading, stride = (described >> at & 0x3FFF for at in (0, 16, 32))
    span = SWIZZLES[described >> 62]
    return swizzled(start * 16 + _offsets(rows, depth, itemsize, leading * 16, stride * 16, span, transposed), span)


@cache
def _offsets(rows: int, depth: int, itemsize: int, leading: int, stride: int, span: int, transposed: bool) -> np.ndarray:
    """The ISA's canonical layouts, in bytes and before the exchange."""
    i, k = np.arange(rows)[:, None], np.arange(depth)[None, :]
    unit = 16 // itemsize  # elements of 16 bytes
    if not transposed:
        along = k * itemsize if span > 16 else k // unit * leading + k % unit * itemsize
        return i % 8 * span + i // 8 * stride + along
    chunk = i // unit
    if span == 16:
        return chunk * stride + i % unit * itemsize + k % 8 * 16 + k // 8 * leading
    units = span // 16
    return chunk % units * 16 + chunk // units * leading + i % unit * itemsize + k % 8 * span + k // 8 * stride
