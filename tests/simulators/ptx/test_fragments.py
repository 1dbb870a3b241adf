"""Where elements lie, by the PTX ISA's own words: the formulas beside its figures of fragments, its table of swizzles."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from barellm.cuda.compile import Descriptor
from tests.simulators.ptx import fragments
from tests.simulators.ptx.asynchronous import slots

pytestmark = pytest.mark.extended

BF16 = np.dtype(ml_dtypes.bfloat16)


def bf16_registers(place, registers: int, value) -> np.ndarray:
    """A warp's registers with value(row, column), where place(lane, element) says which one element a_i of a lane is."""
    found = np.array([[value(*place(lane, i)) for lane in range(32)] for i in range(2 * registers)], BF16)
    bits = found.view(np.uint16).astype(np.uint32).reshape(registers, 2, 32)
    return bits[:, 0] | bits[:, 1] << 16


def number(row: int, col: int) -> int:
    return 16 * row - 7 * col + 3  # exact in bf16


@pytest.mark.parametrize("depth", [8, 16])
def test_operands_of_bf16(depth):
    """mma.m16n8k8 and m16n8k16, "Matrix Fragments"."""

    def a_place(lane, i):
        group, thread = lane >> 2, lane % 4
        row = group if (i // 2) % 2 == 0 else group + 8
        return row, thread * 2 + (i & 1) + (8 if i >= 4 else 0)

    def b_place(lane, i):
        group, thread = lane >> 2, lane % 4
        return thread * 2 + (i & 1) + (8 if i >= 2 else 0), group

    a = fragments.a_fragment(bf16_registers(a_place, depth // 4, number)[:, None], "bf16")
    b = fragments.b_fragment(bf16_registers(b_place, depth // 8, number)[:, None], "bf16")
    for found, shape in ((a, (1, 16, depth)), (b, (1, depth, 8))):
        assert found.shape == shape
        assert (found[0] == np.array([[number(r, c) for c in range(shape[2])] for r in range(shape[1])])).all()


def test_operands_of_f16_lie_as_those_of_bf16():
    codes = np.random.default_rng(1).integers(0, 1 << 32, (4, 1, 32), dtype=np.uint32)
    found, places = (fragments.a_fragment(codes, kind) for kind in ("f16", "bf16"))
    bits = (np.ascontiguousarray(places).view(np.uint32) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(found, bits.view(np.float16).astype(np.float32))


def test_operands_of_tf32():
    """mma.m16n8k8 of .tf32: a1 is 8 rows down, a2 four columns on; what is below 19 bits counts for nothing."""
    a, b = np.zeros((4, 1, 32), np.float32), np.zeros((2, 1, 32), np.float32)
    for lane in range(32):
        group, thread = lane >> 2, lane % 4
        for i in range(4):
            row, col = (group if i in (0, 2) else group + 8), (thread if i < 2 else thread + 4)
            a[i, 0, lane] = number(row, col) + 99 + 2.0**-12
        for i in range(2):
            b[i, 0, lane] = number(thread + 4 * i, group)
    found = fragments.a_fragment(a.view(np.uint32), "tf32")
    assert (found[0] == np.array([[number(r, c) + 99 for c in range(8)] for r in range(16)])).all()
    found = fragments.b_fragment(b.view(np.uint32), "tf32")
    assert (found[0] == np.array([[number(r, c) for c in range(8)] for r in range(8)])).all()


def test_operands_of_single_bits():
    """mma.m16n8k256 of .b1: row and column of a_i and b_i, bit i mod 32 of register i / 32; and of a sum in s32."""
    r = np.random.default_rng(5)
    a, b = r.integers(0, 2, (16, 256)), r.integers(0, 2, (256, 8))
    a_registers, b_registers = np.zeros((4, 1, 32), np.uint32), np.zeros((2, 1, 32), np.uint32)
    for lane in range(32):
        group, thread = lane >> 2, lane % 4
        for i in range(128):
            row = group if i < 32 or 64 <= i < 96 else group + 8
            col = thread * 32 + (i & 0x1F) + (0 if i < 64 else 128)
            a_registers[i // 32, 0, lane] |= np.uint32(a[row, col] << i % 32)
        for i in range(64):
            row = thread * 32 + (i & 0x1F) + (0 if i < 32 else 128)
            b_registers[i // 32, 0, lane] |= np.uint32(b[row, group] << i % 32)
    assert (fragments.a_fragment(a_registers, "b1")[0] == a).all()
    assert (fragments.b_fragment(b_registers, "b1")[0] == b).all()
    sums = r.integers(-(2**31), 2**31, (1, 16, 8)).astype(np.int32)
    registers = fragments.c_registers(sums, np.int32)
    for lane in range(32):
        for i in range(4):
            assert registers[i, 0, lane].view(np.int32) == sums[0, lane // 4 + 8 * (i // 2), lane % 4 * 2 + (i & 1)]
    assert (fragments.c_fragment(registers, np.int32) == sums).all()


@pytest.mark.parametrize("cols", [8, 16, 256])
def test_sums(cols):
    """wgmma's "Matrix fragments for .f32": row and column of d_i in the thread of a warp; mma's are those of 8 columns."""
    sums = np.random.default_rng(0).standard_normal((3, 16, cols)).astype(np.float32)
    registers = fragments.c_registers(sums)
    assert registers.shape == (cols // 2, 3, 32)
    for lane in range(32):
        for i in range(cols // 2):
            row = lane // 4 + 8 * (i // 2 % 2)
            column = i // 4 * 8 + lane % 4 * 2 + (i & 1)
            assert (registers[i, :, lane].view(np.float32) == sums[:, row, column]).all()
    assert (fragments.c_fragment(registers) == sums).all()


def test_matrices_of_ldmatrix():
    """ "each thread loads a fragment of a row": thread 4 r + t has elements 2 t and 2 t + 1 of row r."""
    rows = np.arange(64, dtype=np.uint16).reshape(1, 8, 8)
    register = fragments.matrix_register(rows)
    for lane in range(32):
        assert register[0, lane] == (lane // 4 * 8 + lane % 4 * 2) + (lane // 4 * 8 + lane % 4 * 2 + 1 << 16)
    assert (fragments.matrix_rows(register) == rows).all()


def test_swizzles():
    """The first row of each pattern, in units of 16 bytes, as the ISA draws them."""
    unit = np.arange(64)
    found = fragments.swizzled(16 * unit, 128) // 16
    assert found[:8].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert found[8:16].tolist() == [9, 8, 11, 10, 13, 12, 15, 14]
    assert found[56:].tolist() == [63, 62, 61, 60, 59, 58, 57, 56]
    found = fragments.swizzled(16 * unit, 64) // 16
    assert found[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9, 8, 11, 10]
    found = fragments.swizzled(16 * unit, 32) // 16
    assert found[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9, 8, 11, 10]
    assert found[16:20].tolist() == [16, 17, 18, 19]
    for span in (16, 32, 64, 128):
        assert sorted(fragments.swizzled(16 * unit, span)) == (16 * unit).tolist()


@pytest.mark.parametrize("span", [32, 64, 128])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [64, 128])
def test_a_descriptor_finds_what_a_copy_wrote(span, transposed, rows):
    """A matrix (rows, 64) in boxes as wide as the swizzle, side by side in shared memory; each turn of 16 of its depth."""
    matrix = np.arange(rows * 64, dtype=np.uint16).reshape(rows, 64)
    stored = matrix.T if transposed else matrix  # as it lies: rows of 64 along the depth, or of `rows`
    wide, deep = stored.shape[1], stored.shape[0]
    memory, number = np.zeros(rows * 64 * 2, np.uint8), {32: 1, 64: 2, 128: 3}[span]
    box = Descriptor((deep, span // 2), number, 2, 10)
    for k in range(wide // (span // 2)):
        part = np.ascontiguousarray(stored[:, k * (span // 2) : (k + 1) * (span // 2)])
        at = slots(box, k * deep * span)
        memory.reshape(-1, 16)[at >> 4] = part.view(np.uint8).reshape(*at.shape, 16)
    for k in range(0, 64, 16):
        if transposed:
            described = fragments.descriptor(k * span, deep * span, 8 * span, span)
        else:
            described = fragments.descriptor(k * 2 // span * deep * span + k * 2 % span, 16, 8 * span, span)
        found = memory.view(np.uint16)[fragments.operand_addresses(described, rows, 16, 2, transposed=transposed) >> 1]
        assert (found == matrix[:, k : k + 16]).all(), k


def test_a_descriptor_without_swizzle():
    """Core matrices of 8 rows of 16 bytes, each 128 bytes: "no swizzling", K-major: LBO is from the first to the second along K."""
    matrix = np.arange(64 * 16, dtype=np.uint16).reshape(64, 16)
    cores = matrix.reshape(8, 8, 2, 8).transpose(0, 2, 1, 3)  # by rows, then by depth
    memory = np.ascontiguousarray(cores).reshape(-1)
    found = memory[fragments.operand_addresses(fragments.descriptor(0, 128, 256, 16), 64, 16, 2, transposed=False) >> 1]
    assert (found == matrix).all()
