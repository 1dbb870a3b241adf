"""Binary matmul (XNOR-popcount) of signs packed in 32-bit words, packing and unpacking. Shapes: x, signs (rows, K), words (rows,
W), b (N, W), y (rows, N), with W = ceil(K / 32). Bit k % 32 of word k / 32 is 1 where element k is not negative.

It runs on tensor cores with 1-bit instructions (binary_mma.py), from sm_80 to sm_90. Later cards have no such instruction, and
ptxas would make a call of it. There ones are counted by popc, 16 words a clock and multiprocessor."""

from __future__ import annotations

from typing import Any

from barellm.cuda.kernel import Lowering, lowering, mode
from barellm.cuda.kernels.common import flat_indices, kernel, pow2, store_or_add
from barellm.cuda.kernels.gemm import binary_mma
from barellm.cuda.kernels.gemm.binary_mma import popcount
from barellm.cuda.lang import device, tl
from barellm.program.dtypes import PLANES
from barellm.program.integers import ceil_div
from barellm.program.ops.pointwise.binary import BITS
from barellm.runtime.lowering import weight_operand

TILE = 64  # rows and columns of a matmul's program
WORDS = 4  # of a row, that one program packs
ELEMENTS = 2048  # of x, that one program packs
COLUMNS = 128  # of a row, that one program unpacks


@device
def pack_signs(words, x, rows, K: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Pack the signs of x into words, WORDS of ROWS rows for each program. The sum of 32 different bits is their union."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * WORDS * 32 + tl.arange(0, WORDS * 32)
    inside = (row < rows)[:, None] & (column < K)[None, :]
    value = tl.load(x + row[:, None] * K + column[None, :], mask=inside, other=-1.0).to(tl.float32)
    bits = tl.where(value >= 0, 1, 0).to(tl.uint32) << (column % 32).to(tl.uint32)[None, :]
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    packed = tl.sum(tl.reshape(bits, (ROWS, WORDS, 32)), axis=2).to(tl.int32, bitcast=True)
    tl.store(words + row[:, None] * W + word[None, :], packed, mask=(row < rows)[:, None] & (word < W)[None, :])


@lowering("pack_signs", also={"x": PLANES, "words": "i32"})
def lower_pack_signs(op: Any, c: Lowering) -> None:
    K, W, rows = int(op.x.shape[-1]), int(op.words.shape[-1]), c.rows(op.words)
    tall = ELEMENTS // (BITS * WORDS)
    c.launch(
        pack_signs, {"words": op.words, "x": weight_operand(op.x), "rows": rows},
        {"K": K, "W": W, "ROWS": tall, "WORDS": WORDS}, grid=lambda s: (ceil_div(rows(s), tall), ceil_div(W, WORDS)),
        writes="words",
    )  # fmt: skip


@device
def unpack_signs(
    signs, words, scalars, rows, K: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    MODE: tl.constexpr,
):  # fmt: skip
    """signs = 1.0 or -1.0 of each bit of words, ROWS x COLUMNS of them for each program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < K)[None, :]
    word = tl.load(words + row[:, None] * W + (column // 32)[None, :], mask=inside, other=0).to(tl.uint32, bitcast=True)
    one = (word >> (column % 32).to(tl.uint32)[None, :]) & 1
    store_or_add(signs + row[:, None] * K + column[None, :], inside, tl.where(one != 0, 1.0, -1.0), scalars, MODE)


@lowering("unpack_signs", starts="signs", also={"words": "i32"})
def lower_unpack_signs(op: Any, c: Lowering) -> None:
    K, rows, tall = int(op.columns), c.rows(op.signs), ELEMENTS // COLUMNS
    c.launch(
        unpack_signs, {"signs": op.signs, "words": op.words, "rows": rows},
        {"K": K, "W": int(op.words.shape[-1]), "ROWS": tall, "COLUMNS": COLUMNS, "MODE": mode(op, "signs")},
        grid=lambda s: (ceil_div(rows(s), tall), ceil_div(K, COLUMNS)), writes="signs",
    )  # fmt: skip


@kernel("straight_through", starts="dx", also={"x": PLANES})
@device
def straight_through(dx, dy, x, scalars, units, UNIT: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr):
    """The straight-through estimator: dx = dy where |x| <= 1, else 0."""
    i, mask = flat_indices(units, UNIT, BLOCK)
    near = tl.abs(tl.load(x + i, mask=mask, other=0.0).to(tl.float32)) <= 1
    value = tl.load(dy + i, mask=mask, other=0.0).to(tl.float32)
    store_or_add(dx + i, mask, tl.where(near, value, 0.0), scalars, MODE)


@device
def binary_matmul(
    y, a, b, scalars, rows, N: tl.constexpr, W: tl.constexpr, COLUMNS: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """A TILE_M x TILE_N tile of y (rows, N) = COLUMNS - 2 popcount(a xor b), COLUMNS = K: one word of each row of a and of b at a
    time."""
    row = tl.program_id(0).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    column = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    differ = tl.zeros((TILE_M, TILE_N), tl.uint32)
    for w in range(W):
        word = tl.load(a + row * W + w, mask=row < rows, other=0).to(tl.uint32, bitcast=True)
        other = tl.load(b + column.to(tl.int64) * W + w, mask=column < N, other=0).to(tl.uint32, bitcast=True)
        differ += popcount(word[:, None] ^ other[None, :])
    inside = (row < rows)[:, None] & (column < N)[None, :]
    value = (COLUMNS - 2 * differ.to(tl.int32)).to(tl.float32)
    store_or_add(y + row[:, None] * N + column[None, :], inside, value, scalars, MODE)


@lowering("binary_matmul", starts="y", also={"a": "i32", "b": "i32"})
def lower_binary_matmul(op: Any, c: Lowering) -> None:
    if binary_mma.FIRST_ARCH <= c.target.arch <= binary_mma.LAST_ARCH:
        binary_mma.launch(op, c)
        return
    (N, W), rows = (int(n) for n in op.b.shape), c.rows(op.y)
    wide = min(TILE, max(16, pow2(N)))
    c.launch(
        binary_matmul, {"y": op.y, "a": op.a, "b": op.b, "rows": rows},
        {"N": N, "W": W, "COLUMNS": int(op.columns), "TILE_M": TILE, "TILE_N": wide, "MODE": mode(op, "y")},
        grid=lambda s: (ceil_div(rows(s), TILE), ceil_div(N, wide)), writes="y",
    )  # fmt: skip
