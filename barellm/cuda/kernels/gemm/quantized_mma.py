"""Products of up to 8 rows with weights of 4 bits on tensor cores: each code is read once, for all rows.

Shapes: x (rows, K) of 16 bits, read as words of two elements; codes (tiles, BLOCKS, 16 words), scales (tiles, GROUPS + 1, 16), y
(rows, N). A word of codes has the elements k, k + 1, k + 4 and k + 5 of two neighbouring columns: all eight that a thread has of an
operand of mma.m16n8k16, if the rows of that operand are a tile's columns, even ones first, and its depth are two blocks. So the 32
words of two blocks go to the 32 lanes of a warp, and the codes become numbers in the registers that the product takes:

    prmt    the bytes of one column, a zero behind each
    lop3    the bits of 128 (in fp16 of 1024), twice, with a code in the last places of each
    fma     minus 136 (1032), in pairs: the code's value is left, exactly

That is 12 instructions for 8 weights (10 in fp16, where a code may stand four places higher: no shift), and one for their
products with 8 rows. The numbers of nf4 are looked up in registers by prmt (`looked_up`). Sums are fp32; a group's are multiplied
by its scale. The warps of a program take parts of a tile's depth.
"""

from __future__ import annotations

import struct
from typing import Any

from barellm.cuda.kernel import Lowering
from barellm.cuda.kernels.common import store_or_add
from barellm.cuda.kernels.pointwise.activations import value_of
from barellm.cuda.lang import constant, gl, gluon
from barellm.program.quantization import BLOCK, INTEGERS, NORMAL_QUANTILES, Scheme
from barellm.runtime.lowering import part, view_stride

WARPS = constant(8)
TURN = constant(16)  # blocks that a warp multiplies in one turn
GROUPS_OF_BLOCKS = (4, 8, 16)  # that share a scale
ALIGN = 4  # bytes of a word
DTYPES = ("bf16", "fp16")

HEAD = """{
.reg .b32 p, q, a0, a1, a2, a3, one, less, part, most;
prmt.b32 p, $4, 0, 0x4140;
prmt.b32 q, $4, 0, 0x4342;
"""
BF16 = constant(HEAD + """mov.b32 one, 0x3f803f80;
mov.b32 less, 0xc308c308;
lop3.b32 a0, p, 0x000f000f, 0x43004300, 0xea;
lop3.b32 a1, q, 0x000f000f, 0x43004300, 0xea;
shr.u32 p, p, 4;
shr.u32 q, q, 4;
lop3.b32 a2, p, 0x000f000f, 0x43004300, 0xea;
lop3.b32 a3, q, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 a0, a0, one, less;
fma.rn.bf16x2 a1, a1, one, less;
fma.rn.bf16x2 a2, a2, one, less;
fma.rn.bf16x2 a3, a3, one, less;
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {a0, a1, a2, a3}, {$8, $9}, {$12, $13, $14, $15};
}""")  # fmt: skip
FP16 = constant(HEAD + """mov.b32 one, 0x3c003c00;
mov.b32 less, 0xe408e408;
mov.b32 part, 0x2c002c00;
mov.b32 most, 0xd480d480;
lop3.b32 a0, p, 0x000f000f, 0x64006400, 0xea;
lop3.b32 a1, q, 0x000f000f, 0x64006400, 0xea;
lop3.b32 a2, p, 0x00f000f0, 0x64006400, 0xea;
lop3.b32 a3, q, 0x00f000f0, 0x64006400, 0xea;
fma.rn.f16x2 a0, a0, one, less;
fma.rn.f16x2 a1, a1, one, less;
fma.rn.f16x2 a2, a2, part, most;
fma.rn.f16x2 a3, a3, part, most;
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, {a0, a1, a2, a3}, {$8, $9}, {$12, $13, $14, $15};
}""")  # fmt: skip


def looked_up(form: str, kind: str) -> str:
    """The instructions for nf4: `form` as `struct` and `kind` as the product have the dtype of x. Bytes of the table's 16 numbers
    are cut out of registers, eight at a time, by three bits of each code; the fourth bit says of which eight."""
    numbers = b"".join(struct.pack("<f", v)[2:] if kind == "bf16" else struct.pack(form, v) for v in NORMAL_QUANTILES)
    low, high = (struct.unpack("<4I", numbers[first::2]) for first in (0, 1))
    lines = []
    for column in range(2):
        lines += ["shr.u32 w, $4, 16;" if column else "mov.b32 w, $4;", "and.b32 s, w, 0x7777;", "shr.u32 t, w, 1;"]
        lines += ["lop3.b32 t, t, 0x4444, 0x3210, 0xea;"]
        for name, words in (("low", low), ("high", high)):
            lines += [f"prmt.b32 p, {words[0]}, {words[1]}, s;", f"prmt.b32 q, {words[2]}, {words[3]}, s;"]
            lines += [f"prmt.b32 {name}, p, q, t;"]
        lines += [f"prmt.b32 a{column}, low, high, 0x6240;", f"prmt.b32 a{2 + column}, low, high, 0x7351;"]
    product = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    lines += [f"{product} {{$0, $1, $2, $3}}, {{a0, a1, a2, a3}}, {{$8, $9}}, {{$12, $13, $14, $15}};"]
    return "\n".join(["{", ".reg .b32 w, s, t, p, q, low, high, a0, a1, a2, a3;", *lines, "}"])


NORMAL_BF16, NORMAL_FP16 = constant(looked_up("", "bf16")), constant(looked_up("<e", "f16"))
REGISTERS = constant("=f,=f,=f,=f,r,r,r,r,r,r,r,r,f,f,f,f")


@gluon
def quantized_mma(
    out, pre, x, codes, scales, bias, other, scalars, rows,
    N: gl.constexpr, K: gl.constexpr, BLOCKS: gl.constexpr, GROUPS: gl.constexpr, GROUP: gl.constexpr, HALF: gl.constexpr,
    NORMAL: gl.constexpr, EPILOGUE: gl.constexpr, MODE: gl.constexpr,
    X_ROW: gl.constexpr, OUT_ROW: gl.constexpr, PRE_ROW: gl.constexpr, OTHER_ROW: gl.constexpr,
):  # fmt: skip
    """16 columns of out, all rows. GROUP blocks share a scale. HALF: x is fp16. NORMAL: codes of nf4. NAME_ROW: elements from a
    row to the next, of x words."""
    # (warp, odd column, pair of columns, lane of four, one of two): a thread has four sums.
    SUMS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 1], [0, 1, 0, 0, 0]],
        [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [0, 0, 4, 0, 0]],
        [[1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]], [], [WARPS, 2, 8, 4, 2],
    )  # fmt: skip
    WORD: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    PAIR: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])
    SCALE: gl.constexpr = gl.DistributedLinearLayout(
        [[1]], [[0], [0], [2], [4], [8]], [[16], [32], [64]], [], [16 * WARPS]
    )
    tile = gl.program_id(0)
    i = gl.arange(0, 32 * WARPS, layout=WORD)
    word_block, word = i // 32 * TURN + i % 4 // 2, i % 32 // 8 * 4 + i % 2 * 2 + i // 4 % 2
    j = gl.arange(0, 64 * WARPS, layout=PAIR)
    x_block, x_row = j // 64 * TURN + j % 8 // 4, j % 64 // 8
    x_at = x_row * X_ROW + j // 2 % 2 + j % 2 * 2
    c = gl.arange(0, 16 * WARPS, layout=SCALE)
    scale_block = c // 16 * TURN
    codes += tile.to(gl.int64) * (BLOCKS * 16)
    exponents = scales + (tile * ((GROUPS + 1) * 16) + GROUPS * 16)
    scales += tile * ((GROUPS + 1) * 16) + c % 16
    total = gl.zeros([WARPS, 2, 8, 4, 2], gl.float32, SUMS)
    for first in range(0, BLOCKS, WARPS * TURN):
        for g in gl.static_range(0, TURN, GROUP):
            block = first + g + scale_block
            scale = gl.load(scales + block // GROUP * 16, mask=block < BLOCKS, other=0.0).to(gl.float32)
            scale = gl.convert_layout(
                scale.reshape([WARPS, 8, 2, 1, 1]).permute((0, 2, 1, 3, 4)), SUMS, assert_trivial=True
            )
            some = gl.zeros([WARPS, 2, 8, 4, 2], gl.float32, SUMS)
            for s in gl.static_range(0, GROUP, 2):
                block = first + g + s + word_block
                words = gl.load(codes + block * 16 + word, mask=block < BLOCKS, other=0)
                block = first + g + s + x_block
                pairs = gl.load(x + x_at + block * 4, mask=(block < BLOCKS) & (x_row < rows), other=0)
                some = multiplied(words, pairs, some, HALF, NORMAL)
            total += some * scale

    COLUMNS: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0])
    y = gl.convert_layout(gl.sum(total, 0).permute((2, 3, 1, 0)).reshape([8, 16]), COLUMNS)
    row = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(1, COLUMNS)), 1)
    column = tile * 16 + gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, COLUMNS)), 0)
    inside = (row < rows) & (column < N)
    y *= ((gl.load(exponents + column % 16).to(gl.int32) + 127) << 23).to(gl.float32, bitcast=True)
    if bias is not None:
        y += gl.load(bias + column, mask=column < N, other=0.0).to(gl.float32)
    if pre is not None:
        gl.store(pre + (row * PRE_ROW + column), y, mask=inside)
        y = value_of(y, EPILOGUE)
    elif other is not None:  # a residual
        y += gl.load(other + (row * OTHER_ROW + column), mask=inside, other=0.0).to(gl.float32)
    store_or_add(out + (row * OUT_ROW + column), inside, y, scalars, MODE)


@gluon
def multiplied(words, pairs, sums, HALF: gl.constexpr, NORMAL: gl.constexpr):
    """sums, plus the products of two blocks: one instruction's operands become tensors with the layout of its sums."""
    LIKE: gl.constexpr = sums.type.layout
    words = gl.convert_layout(words.reshape([WARPS, 1, 8, 4, 1]), LIKE, assert_trivial=True)
    pairs = gl.convert_layout(pairs.reshape([WARPS, 1, 8, 4, 2]), LIKE, assert_trivial=True)
    words, pairs = gl.broadcast(words, sums)[0], gl.broadcast(pairs, sums)[0]
    if NORMAL:
        CODES: gl.constexpr = NORMAL_FP16 if HALF else NORMAL_BF16
    else:
        CODES: gl.constexpr = FP16 if HALF else BF16
    return gl.inline_asm_elementwise(CODES, REGISTERS, [words, pairs, sums], gl.float32, is_pure=True, pack=4)


def fits(how: Scheme, x: Any) -> bool:
    """Whether a product of few rows takes this kernel: 4-bit codes, and x of 16 bits in whole blocks, whose words lie as words
    must."""
    K = int(x.shape[-1])
    whole = K % BLOCK == 0 and (view_stride(x) or K) % 2 == 0 and part(x).start % ALIGN == 0
    return (
        how.table in (INTEGERS, NORMAL_QUANTILES)
        and how.group // BLOCK in GROUPS_OF_BLOCKS
        and x.dtype in DTYPES
        and whole
    )


def launch(c: Lowering, op: Any, how: Scheme, operands: dict[str, Any], grid: Any, *, epilogue: str, mode: int) -> None:
    """Append the product. `operands`, `grid`: as `quantized_few_rows` takes them."""
    N, K = int(op.columns), int(op.x.shape[-1])
    stride = {name: view_stride(operands[name]) or N for name in ("out", "pre", "other") if operands[name] is not None}
    constants = {
        "N": N, "K": K, "BLOCKS": K // BLOCK, "GROUPS": how.groups(K), "GROUP": how.group // BLOCK,
        "HALF": op.x.dtype == "fp16", "NORMAL": how.table != INTEGERS,
        "EPILOGUE": epilogue, "MODE": mode, "X_ROW": (view_stride(op.x) or K) // 2,
        **{f"{name.upper()}_ROW": stride.get(name) for name in ("out", "pre", "other")},
    }  # fmt: skip
    words = operands | {"x": (part(op.x), "i32")}
    c.launch(quantized_mma, words, constants, grid=grid, writes="out pre", warps=WARPS.value)
