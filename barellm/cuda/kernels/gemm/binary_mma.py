"""Products of signs on tensor cores: y = COLUMNS - 2 ones(a xor b). Shapes: a (rows, W), b (N, W) words of 32 signs; y (rows, N).

An instruction, mma.m16n8k256, counts the ones of `a and b` for 16 rows, 8 columns and 8 words of each. The xor follows from it:

    ones(a xor b) = ones(a) + ones(b) - 2 ones(a and b)

(The instruction has a xor of its own, of which ptxas makes two BMMA; of the and it makes one.) Four warps do a tile of TILE_M x
TILE_N, each a quarter of it. Words come to shared memory by cp.async, in a ring of STAGES buffers of DEPTH words of each row, whose
units of 16 bytes are exchanged so that no bank is met twice: neither by ldmatrix, which brings operands to the tensor cores, nor
where a lane reads a row to count its ones.
"""

from __future__ import annotations

from math import gcd
from typing import Any

from barellm.cuda import choices
from barellm.cuda.kernel import Lowering, mode
from barellm.cuda.kernels.common import pow2, store_or_add
from barellm.cuda.lang import ampere, constant, device, gl, gluon
from barellm.program.integers import ceil_div

FIRST, LAST = 80, 90  # compute capabilities whose tensor cores multiply single bits
TILES = (128, 64)  # rows and columns of a block's tile, the first where that fills the card
STAGES = 3  # buffers of the ring
VECTOR = 4  # words of 16 bytes, the most that one copy brings
ROW = 32  # words of a row in shared memory, at most: a row of all banks
STEP = constant(8)  # words of a row that one instruction multiplies
# The operands in the order in which `product` has a thread's values, where it is lane 4 g + t of its warp: words t and t + 4 of
# a's row g, then of row g + 8; the same of b's column g, twice; sums of columns 2 t and 2 t + 1 in row g, then in row g + 8.
AND_POPC = constant(
    "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc "
    "{$0, $1, $2, $3}, {$4, $6, $5, $7}, {$8, $9}, {$12, $13, $14, $15};"
)
REGISTERS = constant("=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r")


@gluon
def binary_mma(
    y, a, b, scalars, rows, N: gl.constexpr, W: gl.constexpr, COLUMNS: gl.constexpr, TILE_M: gl.constexpr,
    TILE_N: gl.constexpr, DEPTH: gl.constexpr, UNIT: gl.constexpr, STAGES: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """UNIT: words that one copy may bring, a divisor of W."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8])
    EXCHANGED: gl.constexpr = gl.SwizzledSharedLayout(4, 32 // DEPTH, DEPTH // 4, [1, 0])
    COPY: gl.constexpr = gl.BlockedLayout([1, UNIT], [32 * UNIT // DEPTH, DEPTH // UNIT], [4, 1], [1, 0])
    A_ROWS: gl.constexpr = gl.BlockedLayout([1, DEPTH * TILE_M // 128], [TILE_M // 4, 128 // TILE_M], [4, 1], [0, 1])
    B_ROWS: gl.constexpr = gl.BlockedLayout([1, DEPTH * TILE_N // 128], [TILE_N // 4, 128 // TILE_N], [4, 1], [0, 1])
    m, n = gl.program_id(0) * TILE_M, gl.program_id(1) * TILE_N
    a_ring = gl.allocate_shared_memory(gl.int32, [STAGES, TILE_M, DEPTH], EXCHANGED)
    b_ring = gl.allocate_shared_memory(gl.int32, [STAGES, TILE_N, DEPTH], EXCHANGED)
    for s in gl.static_range(STAGES - 1):
        fetch(a_ring.index(s), a, m, rows, s * DEPTH, W, COPY)
        fetch(b_ring.index(s), b, n, N, s * DEPTH, W, COPY)
        ampere.async_copy.commit_group()
    both = gl.zeros([TILE_M, TILE_N], gl.int32, SUMS).reshape([TILE_M // 8, 8, TILE_N // 8, 8])
    a_ones = gl.zeros([TILE_M], gl.int32, gl.SliceLayout(1, A_ROWS))
    b_ones = gl.zeros([TILE_N], gl.int32, gl.SliceLayout(1, B_ROWS))
    for i in range(gl.cdiv(W, DEPTH)):
        ampere.async_copy.wait_group(STAGES - 2)
        ahead = i + STAGES - 1
        fetch(a_ring.index(ahead % STAGES), a, m, rows, ahead * DEPTH, W, COPY)
        fetch(b_ring.index(ahead % STAGES), b, n, N, ahead * DEPTH, W, COPY)
        ampere.async_copy.commit_group()
        a_words, b_words = a_ring.index(i % STAGES), b_ring.index(i % STAGES)
        for k in gl.static_range(0, DEPTH, STEP):
            both = product(a_words.slice(k, STEP, 1), b_words.slice(k, STEP, 1), both, SUMS)
        a_ones += counted(a_words.load(A_ROWS))
        b_ones += counted(b_words.load(B_ROWS))
    ampere.async_copy.wait_group(0)  # zeros from beyond the last word: the conversions may use the ring's memory

    both = gl.convert_layout(both.reshape([TILE_M, TILE_N]), SUMS, assert_trivial=True)
    a_ones = gl.convert_layout(a_ones, gl.SliceLayout(1, SUMS))
    b_ones = gl.convert_layout(b_ones, gl.SliceLayout(0, SUMS))
    value = COLUMNS - 2 * (gl.expand_dims(a_ones, 1) + gl.expand_dims(b_ones, 0)) + 4 * both
    row = (m + gl.arange(0, TILE_M, layout=gl.SliceLayout(1, SUMS))).to(gl.int64)
    column = n + gl.arange(0, TILE_N, layout=gl.SliceLayout(0, SUMS))
    inside = gl.expand_dims(row < rows, 1) & gl.expand_dims(column < N, 0)
    store_or_add(
        y + (gl.expand_dims(row * N, 1) + gl.expand_dims(column, 0)), inside, value.to(gl.float32), scalars, MODE
    )


@gluon
def fetch(to, words, first, rows, column, W: gl.constexpr, COPY: gl.constexpr):
    """Start to copy words of the rows from `first` on, those from `column` on; what is beyond the matrix becomes zero."""
    row = first + gl.arange(0, to.shape[0], layout=gl.SliceLayout(1, COPY))
    at = column + gl.arange(0, to.shape[1], layout=gl.SliceLayout(0, COPY))
    inside = gl.expand_dims(row < rows, 1) & gl.expand_dims(at < W, 0)
    pointers = words + (gl.expand_dims(row.to(gl.int64) * W, 1) + gl.expand_dims(at, 0))
    ampere.async_copy.async_copy_global_to_shared(to, pointers, mask=inside)


@gluon
def product(a_words, b_words, both, SUMS: gl.constexpr):
    """both (blocks of 8 rows, 8, blocks of 8 columns, 8), plus what STEP words of the rows and of the columns have in common.

    A thread's operands become tensors with the shape and the layout of its sums, so that an elementwise function of four elements
    is one instruction: those of a are the same for all columns, those of b for all rows. No conversion moves anything."""
    LIKE: gl.constexpr = both.type.layout
    a = a_words.load(gl.DotOperandLayout(0, SUMS, 1)).reshape([both.shape[0], 8, 2, 4]).permute((0, 1, 3, 2))
    b = b_words.permute((1, 0)).load(gl.DotOperandLayout(1, SUMS, 1))
    b = b.reshape([2, 4, both.shape[2], 8]).permute((3, 2, 1, 0))
    a = gl.convert_layout(a.reshape([both.shape[0], 8, 1, STEP]), LIKE, assert_trivial=True)
    b = gl.convert_layout(b.reshape([1, 8, both.shape[2], STEP]), LIKE, assert_trivial=True)
    a, b = gl.broadcast(a, both)[0], gl.broadcast(b, both)[0]
    return gl.inline_asm_elementwise(AND_POPC, REGISTERS, [a, b, both], gl.int32, is_pure=True, pack=4)


@device
def ones(x):
    """How many bits of each word (uint32) are set. The compiler knows this arithmetic and makes one instruction of it, popc."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return (((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@gluon
def counted(words):
    """The ones of each row."""
    return gl.sum(ones(words.to(gl.uint32, bitcast=True)).to(gl.int32), 1)


def launch(op: Any, c: Lowering) -> None:
    """Append the product of a BinaryMatmul. Its integers do not depend on the tile."""
    N, W = (int(n) for n in op.b.shape)
    rows, most = c.rows(op.y), op.y.size // N
    tile = next((t for t in TILES if ceil_div(most, t) * ceil_div(N, t) >= choices.WAVE), TILES[-1])
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
