"""GEMM with quantized weights: 8- and 4-bit integers and NF4 (`program.quantization`).

Shapes: x (rows, K), codes (tiles, blocks, 128), scales (tiles, groups + 1, 16) fp16, y (rows, N). A tile is 16 columns of y, a
block 8 elements of K; a scale serves a group of blocks of one column, and the last row of scales has each column's power of two.
Codes are read as words of 32 bits: 16 of a block of 4-bit codes (`code_value`), 32 of 8-bit ones (WIDE).

Few rows (skinny GEMM) of 16 bits with 4-bit codes are multiplied on tensor cores (quantized_mma.py). Of others, a program reads a
tile, BLOCKS_AT_ONCE blocks at a time, and dequantizes the words in registers. It reads them again for each row, from L2. An integer
of 4 bits becomes an fp32 by a magic exponent: the bits of a number 2^m + n are those of 2^m with n in the lowest mantissa bits, so
a mask, an "or" and one subtraction make n - 8, exactly. A value of a table is cut out of four constants of 64 bits (T0 to T3, four
bf16 in each; None for integers). More rows: the matrix is dequantized in the dtype of x, and multiplied as any other."""

import struct
from typing import Any

from barellm.cuda import gemm_config
from barellm.cuda.kernel import MODES, Lowering, Size, lowering
from barellm.cuda.kernels.common import pow2, view_strides
from barellm.cuda.kernels.gemm.epilogue import epilogue_operands, epilogue_tile
from barellm.cuda.kernels.gemm.matmul import append_gemm
from barellm.cuda.kernels.gemm.quantized_mma import fits_quantized_mma, launch_quantized_mma
from barellm.cuda.kernels.gemm.skinny_gemm import GridIf, RowsWhere
from barellm.cuda.lang import device, tl
from barellm.program.integers import ceil_div
from barellm.program.quantization import BLOCK, INTEGERS, TILE, Scheme, scheme
from barellm.runtime.lowering import Region, part

BLOCKS_AT_ONCE = 64  # that a program multiplies at a time: eight words of 4-bit codes for each of 128 threads
BLOCKS_DEQUANTIZED = 64  # of a tile, by one program


@device
def code_value(words, NIBBLE, T0, T1, T2, T3):
    """The fp32 value, without its scale, of the 4-bit code n number NIBBLE of each 32-bit word: n - 8, or element n of a table of
    16 bf16 in four 64-bit constants T0 to T3 (None for integers). Of neighbouring columns c, c + 1 and elements k of a block:

        NIBBLE   7      6      5      4      3      2      1      0
        bits   31-28  27-24  23-20  19-16  15-12  11-8    7-4    3-0
        holds   k+5    k+1    k+4     k     k+5    k+1    k+4     k        (0-3 of column c, 4-7 of column c + 1)"""
    lowest_bit: tl.constexpr = 4 * NIBBLE
    if T0 is not None:
        n = (words >> lowest_bit) & 15
        four = tl.where(n < 8, tl.where(n < 4, T0, T1), tl.where(n < 12, T2, T3)).to(tl.int64)
        bits = (four >> ((n & 3) * 16).to(tl.int64)).to(tl.int32) << 16  # of those four bf16 number n & 3, as fp32
        value = bits.to(tl.float32, bitcast=True)
    elif lowest_bit <= 16:  # in the mantissa: with the exponent of 2^(23 - lowest_bit) that bit counts 1
        bits = words & (15 << lowest_bit) | ((150 - lowest_bit) << 23)
        value = bits.to(tl.float32, bitcast=True) - (2.0 ** (23 - lowest_bit) + 8)
    else:  # above them: shifted down by 12 first
        bits = (words >> 12) & (15 << (lowest_bit - 12)) | ((162 - lowest_bit) << 23)
        value = bits.to(tl.float32, bitcast=True) - (2.0 ** (35 - lowest_bit) + 8)
    return value


@device
def signed_byte(words, BYTE):
    """The 8-bit code number BYTE of each 32-bit word in fp32: a shift up and an arithmetic shift down extend its sign."""
    return ((words << (24 - 8 * BYTE)) >> 24).to(tl.float32)


@device
def dot_of_codes(words, v0, v1, v4, v5, FIRST, T0, T1, T2, T3):
    """The dot product of x at the elements k, k + 1, k + 4, k + 5 of a block (v0, v1, v4, v5) and the four 4-bit codes of each word
    from number FIRST on, one column's: 0 the lower, 4 the upper (`code_value` has their order)."""
    total = v0 * code_value(words, FIRST, T0, T1, T2, T3) + v4 * code_value(words, FIRST + 1, T0, T1, T2, T3)
    total += v1 * code_value(words, FIRST + 2, T0, T1, T2, T3) + v5 * code_value(words, FIRST + 3, T0, T1, T2, T3)
    return total


@device
def power_of_two(exponents):
    """2^n in fp32 of the fp16 integers n in the last row of scales: n + 127 is the exponent field."""
    return ((exponents.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@device
def quantized_skinny_gemm(
    out, pre, x, codes, scales, bias, other, scalars, rows,
    N, K, BLOCKS, BB, GROUPS, GROUP, WIDE, T0, T1, T2, T3, EPILOGUE, MODE, X_STRIDE, OUT_STRIDE, PRE_STRIDE, OTHER_STRIDE,
):  # fmt: skip
    """out (rows, N) = epilogue(x (rows, K) weight^T), up to 8 rows, the weight given as codes and scales: one tile of 16 columns a
    program, BB blocks of 8 elements of K at a time, dequantized in registers. Each thread has words of the same two (WIDE: four)
    columns in every block, and a sum a0, a1 (a2, a3) for each of them.

    codes: i32 words, `quantization.pack` wrote them (`code_value` has the layout; WIDE: 8-bit, four columns of one element a word);
    scales fp16, of a group of GROUP blocks. BLOCKS, GROUPS: of K. BB: a power of two. bias, pre, other, EPILOGUE: epilogue.py. T0
    to T3: the table of a code's values, None: integers. NAME_STRIDE: of rows, None: contiguous. MODE: out is stored or added."""
    x_row: tl.constexpr = X_STRIDE if X_STRIDE is not None else K
    block_words: tl.constexpr = 32 if WIDE else 16
    tile = tl.program_id(0)
    j = tl.arange(0, block_words)[None, :]
    first_word = tl.cast(tile, tl.int64) * (BLOCKS * block_words) + j
    scales += tile * ((GROUPS + 1) * 16)  # 16 of a tile's columns for each group, then the columns' powers
    # Of word j: its first element in the block, and its first column in the tile. 8 bits: 4 words are the 16 columns of an element.
    # 4 bits: j counts, from the lowest bit on, pairs of columns (1 bit), pairs of elements (1 bit), groups of 4 columns (2 bits).
    first_element, first_column = (j // 4, j % 4 * 4) if WIDE else (j // 2 % 2 * 2, j // 4 * 4 + j % 2 * 2)
    for row in range(rows):
        # Sums of each thread's columns over its words, and then over all threads.
        a0, a1 = tl.zeros((BB, block_words), tl.float32), tl.zeros((BB, block_words), tl.float32)
        if WIDE:
            a2, a3 = tl.zeros((BB, block_words), tl.float32), tl.zeros((BB, block_words), tl.float32)
        for b0 in range(0, BLOCKS, BB):
            b = b0 + tl.arange(0, BB)[:, None]  # blocks
            b_in = (b < BLOCKS) & (j >= 0)
            words = tl.load(codes + first_word + b * block_words, mask=b_in, other=0)
            scale_ptrs = scales + b // GROUP * 16 + first_column
            s0 = tl.load(scale_ptrs, mask=b_in, other=0.0).to(tl.float32)
            s1 = tl.load(scale_ptrs + 1, mask=b_in, other=0.0).to(tl.float32)
            k = b * 8 + first_element  # the words' first elements
            x_ptrs = x + row * x_row + k
            v0 = tl.load(x_ptrs, mask=k < K, other=0.0).to(tl.float32)
            if WIDE:
                a0 += v0 * s0 * signed_byte(words, 0)
                a1 += v0 * s1 * signed_byte(words, 1)
                s2 = tl.load(scale_ptrs + 2, mask=b_in, other=0.0).to(tl.float32)
                a2 += v0 * s2 * signed_byte(words, 2)
                s3 = tl.load(scale_ptrs + 3, mask=b_in, other=0.0).to(tl.float32)
                a3 += v0 * s3 * signed_byte(words, 3)
            else:
                v1 = tl.load(x_ptrs + 1, mask=k + 1 < K, other=0.0).to(tl.float32)
                v4 = tl.load(x_ptrs + 4, mask=k + 4 < K, other=0.0).to(tl.float32)
                v5 = tl.load(x_ptrs + 5, mask=k + 5 < K, other=0.0).to(tl.float32)
                left = dot_of_codes(words, v0, v1, v4, v5, 0, T0, T1, T2, T3)
                right = dot_of_codes(words, v0, v1, v4, v5, 4, T0, T1, T2, T3)
                a0 += left * s0
                a1 += right * s1
        if WIDE:
            even = tl.join(sum_columns(a0, 8, 1), sum_columns(a2, 8, 1))
            odd = tl.join(sum_columns(a1, 8, 1), sum_columns(a3, 8, 1))
            total = tl.join(even, odd)
        else:
            total = tl.join(sum_columns(a0, 2, 2), sum_columns(a1, 2, 2))
        n0 = tile * 16  # first column of out
        power = power_of_two(tl.load(scales + GROUPS * 16 + tl.arange(0, 16)[None, :]))
        epilogue_tile(
            out, pre, bias, other, scalars, tl.reshape(total, (1, 16)) * power, row, n0, row * N + n0, rows, N, EPILOGUE, MODE, 1,
            OUT_STRIDE, PRE_STRIDE, OTHER_STRIDE,
        )  # fmt: skip


@device
def sum_columns(products, ELEMENTS, PAIRS):
    """Sums (columns,) of products (blocks, words) over the blocks and over the ELEMENTS words of a block that have the same column.
    PAIRS 1 (8-bit codes): 4 columns, their words 4 apart. PAIRS 2 (4-bit codes): 8 column pairs, their words 2 apart."""
    sums = tl.sum(products, 0)
    if PAIRS == 1:
        result = tl.sum(tl.reshape(sums, (ELEMENTS, 4)), 0)
    else:
        result = tl.sum(tl.reshape(sums, (4, ELEMENTS, PAIRS)), 1)
    return result


@device
def dequantize(out, codes, scales, N, K, BLOCKS, BB, GROUPS, GROUP, WIDE, T0, T1, T2, T3):
    """out (N, K) = code value * group's scale * column's power of two, in out's dtype: the dequantized weight, for a GEMM of many
    rows. A program does BB blocks of one tile of 16 columns. Operands and constants are those of `quantized_skinny_gemm`."""
    block_words: tl.constexpr = 32 if WIDE else 16
    tile = tl.program_id(0) // tl.cdiv(BLOCKS, BB)
    b = tl.program_id(0) % tl.cdiv(BLOCKS, BB) * BB + tl.arange(0, BB)[:, None]  # blocks
    j = tl.arange(0, block_words)[None, :]  # words of a block
    b_in = (b < BLOCKS) & (j >= 0)
    words = tl.load(codes + tl.cast(tile, tl.int64) * (BLOCKS * block_words) + b * block_words + j, mask=b_in, other=0)
    scales += tile * ((GROUPS + 1) * 16)  # 16 of a tile's columns for each group, then the columns' powers
    scale = scales + b // GROUP * 16  # pointers, of the block's group
    for i in tl.static_range(4 if WIDE else 8):
        if WIDE:
            k = b * 8 + j // 4  # a word has one element
            c = j % 4 * 4 + i  # of four columns
            value = signed_byte(words, i)
        else:
            k = b * 8 + j // 2 % 2 * 2 + i // 2 % 2 + i % 2 * 4  # code i of word j: `code_value`
            c = j // 4 * 4 + j % 2 * 2 + i // 4  # column in the tile
            value = code_value(words, i, T0, T1, T2, T3)
        n = tile * 16 + c
        value *= tl.load(scale + c, mask=b_in, other=0.0).to(tl.float32)
        value *= power_of_two(tl.load(scales + GROUPS * 16 + c))
        tl.store(out + n.to(tl.int64) * K + k, value, mask=b_in & (k < K) & (n < N))


def constants_of(quantization: Scheme, N: int, K: int) -> dict[str, Any]:
    """The compile-time constants of both kernels, for a weight (N, K) quantized by the scheme; T0 to T3: its table of 16 bf16."""
    blocks = ceil_div(K, BLOCK)
    table: list[int | None] = [None] * 4
    if quantization.table and quantization.table != INTEGERS:
        # bf16 is the upper half of fp32
        halves = b"".join(struct.pack("<f", v)[2:] for v in quantization.table)
        table = list(struct.unpack("<4q", halves))
    return {
        "N": N, "K": K, "BLOCKS": blocks, "GROUPS": quantization.groups(K), "GROUP": quantization.group // BLOCK or blocks,
        "WIDE": quantization.codes == "i8", **{f"T{i}": words for i, words in enumerate(table)},
    }  # fmt: skip


def append_dequantize(c: Lowering, op: Any, rows: Size) -> tuple[Region, str]:
    """Launch the dequantization of an op's weight, in runs in which `rows` is not 0. Returns it (N, K), in the dtype of x."""
    quantization, N, K, dtype = scheme(op.weights), int(op.columns), int(op.x.shape[-1]), op.x.dtype
    out = part(c.scratch("weight", (N, K), dtype)), dtype
    constants = constants_of(quantization, N, K)
    programs = ceil_div(N, TILE) * ceil_div(constants["BLOCKS"], BLOCKS_DEQUANTIZED)
    operands = {"out": out, "codes": (part(op.codes), "i32"), "scales": op.scales}
    c.launch(dequantize, operands, constants | {"BB": BLOCKS_DEQUANTIZED}, grid=GridIf(rows, lambda s: (programs,)), writes="out")
    return out


@lowering("quantized_product", "quantized_matmul", also={"codes": "u4 i8"}, views="x y residual")
def lower_quantized(op: Any, c: Lowering) -> None:
    """Plan a matmul with quantized weights and its epilogue: one launch for runs of up to SKINNY_M rows, on tensor cores if
    quantized_mma fits, and if there may be more rows a dequantization into scratch and a GEMM, empty in those runs."""
    quantization, N, K = scheme(op.weights), int(op.columns), int(op.x.shape[-1])
    epilogue = "".join(name for name in op.attrs.get("epilogues", ()) if name != "bias")
    rows, most = c.rows(op.x), op.x.size // K
    skinny_rows, BB = RowsWhere(rows, skinny=True), min(BLOCKS_AT_ONCE, pow2(ceil_div(K, BLOCK)))
    pre_out, other = epilogue_operands(op.outputs.get("pre"), op.inputs.get("residual"), epilogue)
    operands = {"out": op.y, "pre": pre_out, "x": op.x, "codes": (part(op.codes), "i32"), "scales": op.scales}
    operands |= {"bias": op.inputs.get("bias"), "other": other, "rows": skinny_rows}
    grid = GridIf(skinny_rows, lambda s: (ceil_div(N, TILE),))
    if fits_quantized_mma(quantization, op.x):
        launch_quantized_mma(c, op, quantization, operands, grid, epilogue=epilogue, mode=MODES["store"])
    else:
        constants = constants_of(quantization, N, K) | {"BB": BB, "MODE": MODES["store"], "EPILOGUE": epilogue}
        constants |= view_strides(x=op.x, out=op.y, pre=pre_out, other=other)
        c.launch(quantized_skinny_gemm, operands, constants, grid=grid, writes="out pre")
    if most > gemm_config.SKINNY_M:
        other_rows = RowsWhere(rows, skinny=False)
        weight = append_dequantize(c, op, other_rows)
        append_gemm(
            c, "nt", out=op.y, a=op.x, b=weight, rows=other_rows, most=most, N=N, K=K, bias=op.inputs.get("bias"),
            residual=op.inputs.get("residual"), pre=op.outputs.get("pre"), epilogue=epilogue, mode=MODES["store"],
        )  # fmt: skip
