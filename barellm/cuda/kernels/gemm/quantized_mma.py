"""Skinny GEMM, up to 8 rows, with 4-bit weights (int4, NF4) on tensor cores: each code is read once, for all rows.

Shapes: x (rows, K) of 16 bits, read as words of two elements; codes (tiles, BLOCKS, 16 words), scales (tiles, GROUPS + 1, 16), y
(rows, N). A word of codes has the elements k, k + 1, k + 4 and k + 5 of two neighbouring columns: all eight that a thread has of an
operand of mma.m16n8k16, if the rows of that operand are a tile's columns, even ones first, and its depth are two blocks. So the 32
words of two blocks go to the 32 lanes of a warp, and the codes become numbers in the registers that the mma takes (below). That is
12 instructions for 8 weights (10 in fp16, where a code may stand four places higher: no shift), and one for their products with 8
rows. The numbers of nf4 are looked up in registers by prmt (`nf4_assembly`). Sums are fp32; a group's are multiplied by its scale.
The WARPS of a program take parts of a tile's depth (K).

A thread's operands of the inline assembly: $0-$3 its four sums, $4 a word of codes (given four times, as $4-$7), $8 and $9 words of
x, the b operand (again as $10, $11), $12-$15 the sums before."""

import struct
from typing import Any

from barellm.cuda.kernel import Lowering
from barellm.cuda.kernels.common import store_or_add
from barellm.cuda.kernels.pointwise.activations import value_of
from barellm.cuda.lang import compile_time, constant, gl, gluon
from barellm.program.quantization import BLOCK, INTEGERS, NORMAL_QUANTILES, Scheme
from barellm.runtime.lowering import part, view_stride

WARPS = constant(8)
WARP_BLOCKS = constant(16)  # blocks that a warp multiplies in one iteration
GROUPS_OF_BLOCKS = (4, 8, 16)  # that share a scale
ALIGN = 4  # bytes of a word
DTYPES = ("bf16", "fp16")

# p, q: the two bytes of the word's lower and upper column, a zero behind each (prmt 0x4140, 0x4342: byte 4 is 0). a0 to a3: the a
# operand of the mma, pairs (k, k + 1) of both columns, then (k + 4, k + 5). In 16 bits, with bf16's magic number 128 = 0x4300:
#
#     p                  0000 0000 hhhh nnnn      n: code k or k + 1, h: code k + 4 or k + 5
#     p & 15 | magic     0100 0011 0000 nnnn      = 128 + n (lop3 0xea is (a & b) | c; p >> 4 first for h; fp16: 1024 + n or 16 h)
#     one x + less       the value n - 8          less: -136 in bf16 (0xc308), -1032 in fp16 (0xe408)
#
# Of fp16's upper codes x / 16 - 72 (part, most: 0x2c00, 0xd480) instead of the shift.
HEAD = """{
.reg .b32 p, q, a0, a1, a2, a3, one, less, part, most;
prmt.b32 p, $4, 0, 0x4140;
prmt.b32 q, $4, 0, 0x4342;
"""
INT4_BF16 = constant(HEAD + """mov.b32 one, 0x3f803f80;
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
INT4_FP16 = constant(HEAD + """mov.b32 one, 0x3c003c00;
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


def nf4_assembly(form: str, kind: str) -> str:
    """The PTX, as one string, that dequantizes the eight NF4 codes of a word and multiplies them by mma: a table look-up in
    registers. `kind`: the dtype of x as PTX names it; `form`: the same as `struct` packs it ("" for bf16, the upper half of fp32).
    prmt picks bytes of eight table entries (low or high byte of each number) from two registers by three bits of each code; a
    second prmt picks between the two halves of the table by the fourth."""
    numbers = b"".join(struct.pack("<f", v)[2:] if kind == "bf16" else struct.pack(form, v) for v in NORMAL_QUANTILES)
    low, high = (struct.unpack("<4I", numbers[first::2]) for first in (0, 1))
    lines = []
    for column in range(2):  # the lower half of the word, then the upper one
        # s: three bits of each code, selectors of table bytes; t: for byte i of the result byte i of p, or of q if the fourth bit
        # is 1
        lines += ["shr.u32 w, $4, 16;" if column else "mov.b32 w, $4;", "and.b32 s, w, 0x7777;", "shr.u32 t, w, 1;"]
        lines += ["lop3.b32 t, t, 0x4444, 0x3210, 0xea;"]
        for name, words in (("low", low), ("high", high)):
            lines += [f"prmt.b32 p, {words[0]}, {words[1]}, s;", f"prmt.b32 q, {words[2]}, {words[3]}, s;"]
            lines += [f"prmt.b32 {name}, p, q, t;"]
        # bytes to numbers: codes 0 and 2 (elements k and k + 1), and codes 1 and 3 (k + 4 and k + 5)
        lines += [f"prmt.b32 a{column}, low, high, 0x6240;", f"prmt.b32 a{2 + column}, low, high, 0x7351;"]
    product = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    lines += [f"{product} {{$0, $1, $2, $3}}, {{a0, a1, a2, a3}}, {{$8, $9}}, {{$12, $13, $14, $15}};"]
    return "\n".join(["{", ".reg .b32 w, s, t, p, q, low, high, a0, a1, a2, a3;", *lines, "}"])


NF4_BF16, NF4_FP16 = constant(nf4_assembly("", "bf16")), constant(nf4_assembly("<e", "f16"))
REGISTERS = constant("=f,=f,=f,=f,r,r,r,r,r,r,r,r,f,f,f,f")


@compile_time
def mma_sums_layout():
    """The registers of the sums (WARPS, 2, 8, 4, 2) of mma.m16n8k16, whose axes are (warp, odd column, pair of columns, lane of
    four, one of two rows): register bit 0 is the row, bit 1 the odd column; lane bits 0 and 1 the lane of four, 2 to 4 the pair."""
    registers = [[0, 0, 0, 0, 1], [0, 1, 0, 0, 0]]
    lanes = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [0, 0, 4, 0, 0]]
    warps = [[1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [8, 2, 8, 4, 2])


@gluon
def quantized_mma(
    out, pre, x, codes, scales, bias, other, scalars, rows,
    N, K, BLOCKS, GROUPS, GROUP, FP16, NF4, EPILOGUE, MODE, X_STRIDE, OUT_STRIDE, PRE_STRIDE, OTHER_STRIDE,
):  # fmt: skip
    """out (rows, N) = epilogue(x (rows, K) weight^T) on tensor cores, up to 8 rows: one tile of 16 columns a program. The WARPS sum
    over different blocks of K (8 elements), and are added at the end.

    x: bf16 or FP16, as i32 words of two elements, rows X_STRIDE words apart; codes: i32 words of 4-bit integers or NF4, scales
    fp16, `quantization.pack` wrote them. BLOCKS, GROUPS: of K; GROUP: blocks that share a scale, 4, 8 or 16. bias, pre, other,
    EPILOGUE: epilogue.py (of activations' derivatives none); NAME_STRIDE: elements from a row to the next."""
    SUMS: gl.constexpr = mma_sums_layout()
    WORD: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])  # a word of codes a lane
    PAIR: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])  # two words of x a lane
    # Scales: element 16 warp + 2 pair + odd; the lanes of four (lowest two bits of the lane) have the same ones.
    SCALE: gl.constexpr = gl.DistributedLinearLayout([[1]], [[0], [0], [2], [4], [8]], [[16], [32], [64]], [], [16 * WARPS])
    tile = gl.program_id(0)  # 16 columns of out
    # Block (of a warp's iteration) and place in it of each element of three layouts: words of codes, words of x, scales. Lane 4 r +
    # c of a warp has row r of the mma's operands (a pair of the tile's columns; of x a row), elements 2 c and 2 c + 1 of its depth.
    i = gl.arange(0, 32 * WARPS, layout=WORD)
    word_block, word = i // 32 * WARP_BLOCKS + i % 4 // 2, i % 32 // 8 * 4 + i % 2 * 2 + i // 4 % 2
    j = gl.arange(0, 64 * WARPS, layout=PAIR)
    x_block, x_row = j // 64 * WARP_BLOCKS + j % 8 // 4, j % 64 // 8
    x_at = x_row * X_STRIDE + j // 2 % 2 + j % 2 * 2
    c = gl.arange(0, 16 * WARPS, layout=SCALE)
    scale_block = c // 16 * WARP_BLOCKS  # the warp's first
    codes += tile.to(gl.int64) * (BLOCKS * 16)  # 16 words of a block
    exponents = scales + (tile * ((GROUPS + 1) * 16) + GROUPS * 16)  # the row behind the groups' scales
    scales += tile * ((GROUPS + 1) * 16) + c % 16
    total = gl.zeros([WARPS, 2, 8, 4, 2], gl.float32, SUMS)
    for first in range(0, BLOCKS, WARPS * WARP_BLOCKS):
        for g in gl.static_range(0, WARP_BLOCKS, GROUP):
            block = first + g + scale_block
            scale = gl.load(scales + block // GROUP * 16, mask=block < BLOCKS, other=0.0).to(gl.float32)
            scale = gl.convert_layout(scale.reshape([WARPS, 8, 2, 1, 1]).permute((0, 2, 1, 3, 4)), SUMS, assert_trivial=True)
            group_sums = gl.zeros([WARPS, 2, 8, 4, 2], gl.float32, SUMS)  # of the products of one group
            for s in gl.static_range(0, GROUP, 2):
                block = first + g + s + word_block
                words = gl.load(codes + block * 16 + word, mask=block < BLOCKS, other=0)
                block = first + g + s + x_block
                pairs = gl.load(x + x_at + block * 4, mask=(block < BLOCKS) & (x_row < rows), other=0)
                group_sums = dequantize_mma(words, pairs, group_sums, FP16, NF4)
            total += group_sums * scale

    # The sums of all warps, as (rows, columns).
    COLUMNS: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0])
    y = gl.convert_layout(gl.sum(total, 0).permute((2, 3, 1, 0)).reshape([8, 16]), COLUMNS)
    row = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(1, COLUMNS)), 1)
    column = tile * 16 + gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, COLUMNS)), 0)
    inside = (row < rows) & (column < N)
    y *= ((gl.load(exponents + column % 16).to(gl.int32) + 127) << 23).to(gl.float32, bitcast=True)  # the columns' powers of two
    if bias is not None:
        y += gl.load(bias + column, mask=column < N, other=0.0).to(gl.float32)
    if pre is not None:
        gl.store(pre + (row * PRE_STRIDE + column), y, mask=inside)
        y = value_of(y, EPILOGUE)
    elif other is not None:  # a residual
        y += gl.load(other + (row * OTHER_STRIDE + column), mask=inside, other=0.0).to(gl.float32)
    store_or_add(out + (row * OUT_STRIDE + column), inside, y, scalars, MODE)


@gluon
def dequantize_mma(words, pairs, sums, FP16, NF4):
    """Dequantize the codes of two blocks and multiply by mma.m16n8k16: sums (WARPS, 2, 8, 4, 2) fp32 plus the dot products of words
    of codes (32 WARPS,) and pairs of x (64 WARPS,). To be one elementwise inline assembly of four elements, `pack`, all operands
    are broadcast to the layout of the sums: each thread's registers already hold what the mma takes, so no data moves."""
    SUMS_LAYOUT: gl.constexpr = sums.type.layout
    words = gl.convert_layout(words.reshape([WARPS, 1, 8, 4, 1]), SUMS_LAYOUT, assert_trivial=True)
    pairs = gl.convert_layout(pairs.reshape([WARPS, 1, 8, 4, 2]), SUMS_LAYOUT, assert_trivial=True)
    words, pairs = gl.broadcast(words, sums)[0], gl.broadcast(pairs, sums)[0]
    if NF4:
        ASSEMBLY: gl.constexpr = NF4_FP16 if FP16 else NF4_BF16
    else:
        ASSEMBLY: gl.constexpr = INT4_FP16 if FP16 else INT4_BF16
    return gl.inline_asm_elementwise(ASSEMBLY, REGISTERS, [words, pairs, sums], gl.float32, is_pure=True, pack=4)


def fits_quantized_mma(quantization: Scheme, x: Any) -> bool:
    """Whether a skinny GEMM takes this kernel: 4-bit codes (integers or NF4) in groups of 4, 8 or 16 blocks, and x of 16 bits whose
    K is a multiple of a block and whose rows are aligned words."""
    K = int(x.shape[-1])
    aligned = K % BLOCK == 0 and (view_stride(x) or K) % 2 == 0 and part(x).start % ALIGN == 0
    return (
        quantization.table in (INTEGERS, NORMAL_QUANTILES)
        and quantization.group // BLOCK in GROUPS_OF_BLOCKS
        and x.dtype in DTYPES
        and aligned
    )


def launch_quantized_mma(
    c: Lowering, op: Any, quantization: Scheme, operands: dict[str, Any], grid: Any, *, epilogue: str, mode: int
) -> None:
    """Plan one launch of quantized_mma for an op whose weight is quantized by `quantization`. `operands`, `grid`: those of
    `quantized_skinny_gemm`."""
    N, K = int(op.columns), int(op.x.shape[-1])
    stride = {name: view_stride(operands[name]) or N for name in ("out", "pre", "other") if operands[name] is not None}
    constants = {
        "N": N, "K": K, "BLOCKS": K // BLOCK, "GROUPS": quantization.groups(K), "GROUP": quantization.group // BLOCK,
        "FP16": op.x.dtype == "fp16", "NF4": quantization.table != INTEGERS,
        "EPILOGUE": epilogue, "MODE": mode, "X_STRIDE": (view_stride(op.x) or K) // 2,
        **{f"{name.upper()}_STRIDE": stride.get(name) for name in ("out", "pre", "other")},
    }  # fmt: skip
    words = operands | {"x": (part(op.x), "i32")}
    c.launch(quantized_mma, words, constants, grid=grid, writes="out pre", warps=WARPS.value)
