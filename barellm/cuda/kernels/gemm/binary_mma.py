"""Binary matmul on tensor cores: y = COLUMNS - 2 ones(a xor b). Shapes: a (rows, W), b (N, W) words of 32 signs; y (rows, N).

An instruction, mma.m16n8k256, counts the ones of `a and b` for 16 rows, 8 columns and 8 words of each. The xor follows from it:

    ones(a xor b) = ones(a) + ones(b) - 2 ones(a and b)

(The instruction has a xor of its own, of which ptxas makes two BMMA; of the and it makes one.) Four warps do a tile of TILE_M x
TILE_N, each a quarter of it. Words come to shared memory by cp.async, in a ring of STAGES buffers of DEPTH words of each row, whose
units of 16 bytes are exchanged so that no bank is met twice: neither by ldmatrix, which brings operands to the tensor cores, nor
where a lane reads a row to count its ones."""

from __future__ import annotations

from math import gcd
from typing import Any

from barellm.cuda import gemm_config
from barellm.cuda.kernel import Lowering, mode
from barellm.cuda.kernels.common import pow2, store_or_add
from barellm.cuda.lang import ampere, constant, device, gl, gluon
from barellm.program.integers import ceil_div

FIRST_ARCH, LAST_ARCH = 80, 90  # compute capabilities whose tensor cores multiply single bits
TILES = (128, 64)  # rows and columns of a thread block's tile, the first where that fills the card
STAGES = 3  # buffers of the ring
VECTOR = 4  # words of 16 bytes, the most that one cp.async brings
ROW = 32  # words of a row in shared memory, at most: one of each bank
STEP = constant(8)  # words of a row (K = 256 bits) that one instruction multiplies
# The operands in the order in which `mma_popc` has a thread's values, where it is lane 4 g + t of its warp: words t and t + 4 of
# a's row g, then of row g + 8; the same of b's column g, twice; sums of columns 2 t and 2 t + 1 in row g, then in row g + 8.
AND_POPC = constant(
    "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {$0, $1, $2, $3}, {$4, $6, $5, $7}, {$8, $9}, {$12, $13, $14, $15};"
)
REGISTERS = constant("=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r")


@gluon
def binary_mma(
    y, a, b, scalars, rows, N: gl.constexpr, W: gl.constexpr, COLUMNS: gl.constexpr, TILE_M: gl.constexpr,
    TILE_N: gl.constexpr, DEPTH: gl.constexpr, UNIT: gl.constexpr, STAGES: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """One TILE_M x TILE_N tile of y (rows, N) = COLUMNS - 2 ones(a xor b), by 128 threads. DEPTH: words of a row in a stage of the
    ring; UNIT: words that one copy may bring, a divisor of W. The xor is by ones(a) + ones(b) - 2 ones(a and b): the tensor cores
    count the last, `a_ones` and `b_ones` the others."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8])
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(4, 32 // DEPTH, DEPTH // 4, [1, 0])
    COPY: gl.constexpr = gl.BlockedLayout([1, UNIT], [32 * UNIT // DEPTH, DEPTH // UNIT], [4, 1], [1, 0])
    A_ROWS: gl.constexpr = gl.BlockedLayout([1, DEPTH * TILE_M // 128], [TILE_M // 4, 128 // TILE_M], [4, 1], [0, 1])
    B_ROWS: gl.constexpr = gl.BlockedLayout([1, DEPTH * TILE_N // 128], [TILE_N // 4, 128 // TILE_N], [4, 1], [0, 1])
    m, n = gl.program_id(0) * TILE_M, gl.program_id(1) * TILE_N
    a_ring = gl.allocate_shared_memory(gl.int32, [STAGES, TILE_M, DEPTH], SWIZZLED)
    b_ring = gl.allocate_shared_memory(gl.int32, [STAGES, TILE_N, DEPTH], SWIZZLED)
    for s in gl.static_range(STAGES - 1):
        async_load(a_ring.index(s), a, m, rows, s * DEPTH, W, COPY)
        async_load(b_ring.index(s), b, n, N, s * DEPTH, W, COPY)
        ampere.async_copy.commit_group()
    acc = gl.zeros([TILE_M, TILE_N], gl.int32, SUMS).reshape([TILE_M // 8, 8, TILE_N // 8, 8])
    a_ones = gl.zeros([TILE_M], gl.int32, gl.SliceLayout(1, A_ROWS))
    b_ones = gl.zeros([TILE_N], gl.int32, gl.SliceLayout(1, B_ROWS))
    for i in range(gl.cdiv(W, DEPTH)):
        ampere.async_copy.wait_group(STAGES - 2)
        loaded_step = i + STAGES - 1
        async_load(a_ring.index(loaded_step % STAGES), a, m, rows, loaded_step * DEPTH, W, COPY)
        async_load(b_ring.index(loaded_step % STAGES), b, n, N, loaded_step * DEPTH, W, COPY)
        ampere.async_copy.commit_group()
        a_words, b_words = a_ring.index(i % STAGES), b_ring.index(i % STAGES)
        for k in gl.static_range(0, DEPTH, STEP):
            acc = mma_popc(a_words.slice(k, STEP, 1), b_words.slice(k, STEP, 1), acc, SUMS)
        a_ones += count_ones_of_rows(a_words.load(A_ROWS))
        b_ones += count_ones_of_rows(b_words.load(B_ROWS))
    ampere.async_copy.wait_group(0)  # zeros from beyond the last word: the conversions may use the ring's memory

    acc = gl.convert_layout(acc.reshape([TILE_M, TILE_N]), SUMS, assert_trivial=True)
    a_ones = gl.convert_layout(a_ones, gl.SliceLayout(1, SUMS))
    b_ones = gl.convert_layout(b_ones, gl.SliceLayout(0, SUMS))
    value = COLUMNS - 2 * (gl.expand_dims(a_ones, 1) + gl.expand_dims(b_ones, 0)) + 4 * acc
    row = (m + gl.arange(0, TILE_M, layout=gl.SliceLayout(1, SUMS))).to(gl.int64)
    column = n + gl.arange(0, TILE_N, layout=gl.SliceLayout(0, SUMS))
    inside = gl.expand_dims(row < rows, 1) & gl.expand_dims(column < N, 0)
    store_or_add(y + (gl.expand_dims(row * N, 1) + gl.expand_dims(column, 0)), inside, value.to(gl.float32), scalars, MODE)


@gluon
def async_load(to, words, first, rows, column, W: gl.constexpr, COPY: gl.constexpr):
    """Start cp.async of a stage `to` (rows, DEPTH) from `words` (rows, W): rows from `first` on, words from `column` on; zeros
    beyond the matrix."""
    row = first + gl.arange(0, to.shape[0], layout=gl.SliceLayout(1, COPY))
    at = column + gl.arange(0, to.shape[1], layout=gl.SliceLayout(0, COPY))
    inside = gl.expand_dims(row < rows, 1) & gl.expand_dims(at < W, 0)
    pointers = words + (gl.expand_dims(row.to(gl.int64) * W, 1) + gl.expand_dims(at, 0))
    ampere.async_copy.async_copy_global_to_shared(to, pointers, mask=inside)


@gluon
def mma_popc(a_words, b_words, acc, SUMS: gl.constexpr):
    """acc (blocks of 8 rows, 8, blocks of 8 columns, 8) plus ones(a and b) over STEP words: a_words (TILE_M, STEP), b_words
    (TILE_N, STEP) in shared memory.

    A thread's operands become tensors with the shape and the layout of its sums, so that an elementwise function of four elements
    is one instruction: those of a are broadcast over all columns, those of b over all rows. No conversion moves data."""
    ACC_LAYOUT: gl.constexpr = acc.type.layout
    a = a_words.load(gl.DotOperandLayout(0, SUMS, 1)).reshape([acc.shape[0], 8, 2, 4]).permute((0, 1, 3, 2))
    b = b_words.permute((1, 0)).load(gl.DotOperandLayout(1, SUMS, 1))
    b = b.reshape([2, 4, acc.shape[2], 8]).permute((3, 2, 1, 0))
    a = gl.convert_layout(a.reshape([acc.shape[0], 8, 1, STEP]), ACC_LAYOUT, assert_trivial=True)
    b = gl.convert_layout(b.reshape([1, 8, acc.shape[2], STEP]), ACC_LAYOUT, assert_trivial=True)
    a, b = gl.broadcast(a, acc)[0], gl.broadcast(b, acc)[0]
    return gl.inline_asm_elementwise(AND_POPC, REGISTERS, [a, b, acc], gl.int32, is_pure=True, pack=4)


@device
def popcount(x):
    """Population count of each word (uint32). The compiler knows this arithmetic and makes one instruction of it, popc."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return (((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@gluon
def count_ones_of_rows(words):
    """The number of ones in each row of words (rows, DEPTH) i32."""
    return gl.sum(popcount(words.to(gl.uint32, bitcast=True)).to(gl.int32), 1)


def launch(op: Any, c: Lowering) -> None:
    """Append a BinaryMatmul: y (rows, N) of a (rows, W) and b (N, W) words. Results are integers, so no tile changes them."""
    N, W = (int(n) for n in op.b.shape)
    rows, most = c.rows(op.y), op.y.size // N
    tile = next((t for t in TILES if ceil_div(most, t) * ceil_div(N, t) >= gemm_config.WAVE), TILES[-1])
    depth = min(ROW, max(STEP.value, pow2(W)))
    c.launch(
        binary_mma,
        {"y": op.y, "a": op.a, "b": op.b, "rows": rows},
        {
            "N": N, "W": W, "COLUMNS": int(op.columns), "TILE_M": tile, "TILE_N": tile, "DEPTH": depth,
            "UNIT": gcd(W, VECTOR), "STAGES": min(STAGES, 1 + ceil_div(W, depth)), "MODE": mode(op, "y"),
        },
        grid=lambda s: (ceil_div(rows(s), tile), ceil_div(N, tile)),
        writes="y",
    )  # fmt: skip
