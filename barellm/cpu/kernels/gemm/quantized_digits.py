"""Skinny GEMM (M <= 4) with a quantized weight, by an integer dot product (vpdpbusd, usdot): four products of unsigned and signed
bytes are added to a 32-bit lane.

A group of x becomes fixed-point numbers, with a power of two for all of them, and each number two or three signed bytes, its digits
to the base 256. Of bf16 two are enough: 14 bits beside the largest of the group, where bf16 has 8; of fp32 and fp16 it is three, 22
bits. Codes are unsigned bytes as they are, or the two digits of a whole number out of a table. So the sums of a group are whole
numbers, without rounding, in whatever order they are added. They begin with what takes back the offset that makes codes unsigned.

Shapes: x (rows, depth), codes (tiles, blocks, 128), scales (tiles, groups + 1, 16)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

from barellm.cpu.kernel import ISA, Pointer, Value
from barellm.cpu.kernels.gemm import packing, quantized_few
from barellm.cpu.kernels.numbers import FP32_FRACTION, FP32_MAGNITUDE
from barellm.program.integers import ceil_div, round_up
from barellm.program.quantization import BLOCK, TILE, Scheme, scheme

WHOLE_ROW = 64  # elements of a group of x where the weight has a scale for a whole row
# Digits of a fixed-point number -> bits of its magnitude: one less than they hold, for rounding may reach the next power of 2.
BITS = {2: 14, 3: 22}
BASE = 256  # of digits: each is a byte
LEAST_EXPONENT = 32  # of fp32's field: smaller groups are rounded as if they reached 2^-95
LANE = 4  # bytes that the instruction adds up
# Formats whose products are faster with numbers in registers (quantized_few.py), by instruction set: Zen 4 starts a product of
# pairs of bf16 as often as one of bytes, and has two ports that shuffle, where a Xeon has one (speeds: docs/quantization.md).
DEQUANTIZED = {"avx512_bf16": ("nf4", "nf4-v1", "int8")}


def uses_integer_dot(isa: ISA, weights: str) -> bool:
    """Whether skinny GEMMs with weights of this scheme use the integer dot product."""
    return isa.byte_dot and weights.partition("/")[0] not in DEQUANTIZED.get(isa.name, ())


def digits_of(dtype: str) -> int:
    """Bytes of a number of x."""
    return 2 if dtype == "bf16" else 3


@dataclass(frozen=True)
class IntegerCodes:
    """The integers that stand for a scheme's weights, of one or two unsigned bytes (`digits`). A weight is `unit` times what is
    left of its integer after `offset` is subtracted from the most significant byte."""

    unit: float
    offset: int
    table: tuple[int, ...] = ()  # the integer of each code; (): codes are bytes as they are

    @property
    def digits(self) -> int:
        return 2 if self.table else 1


def integer_codes(how: Scheme) -> IntegerCodes:
    """The integer codes of a quantization scheme. The offset makes them unsigned, as the instruction wants one operand."""
    if not how.table:
        return IntegerCodes(1.0, 128)  # int8: -128 to 127, whose sign bit is flipped
    if how.table == tuple(range(-8, 8)):
        return IntegerCodes(1.0, 8)  # int4: the codes 0 to 15 stand for -8 to 7
    unit, offset = 2.0**-11, 8  # NF4: numbers between -1 and 1 are multiples of 2^-11, +-2048; with 8 * 256 none is below zero
    numbers = tuple(v / unit + offset * BASE for v in how.table)
    assert all(n == int(n) and 0 <= n < BASE * BASE for n in numbers), how
    return IntegerCodes(unit, offset, tuple(int(n) for n in numbers))


def products_of_a_weight(weights: str, dtype: str) -> int:
    """Products of bytes that a weight takes: those of each of its digits with each digit of a number of x."""
    return integer_codes(scheme(weights)).digits * digits_of(dtype)


def group_of(how: Scheme) -> int:
    """Elements of x that share a power of two."""
    return how.group or WHOLE_ROW


def row_bytes(how: Scheme, dtype: str, depth: int) -> int:
    """Scratch for a row of x: its digits, and of each group the power of two and what the sums begin with."""
    count, groups = digits_of(dtype), ceil_div(depth, group_of(how))
    return round_up(groups * (group_of(how) * count + 4 + 4 * count), packing.LINE)


class IntegerSkinnyGemm(quantized_few.QuantizedSkinnyGemm):
    """One thread's part of a product with FEW rows at most."""

    def _prepare_x(self) -> None:
        """Quantize x to fixed point, digits to the base 256, in this thread's scratch: each thread needs all of it. A row of
        scratch: `count` planes of a byte an element; the groups' scales (fp32); for each digit the first sums (i32)."""
        k = self.k
        self.integers, self.count, self.group = integer_codes(self.how), digits_of(self.x.dtype), group_of(self.how)
        self.x_groups = ceil_div(self.depth, self.group)
        self.plane = self.x_groups * self.group  # bytes of one digit of a row
        self.scales_at = self.count * self.plane
        self.row_bytes = row_bytes(self.how, self.x.dtype, self.depth)
        self.digits = k.thread_scratch()
        self.bytes = f"<{LANE * k.lanes} x i8>"
        if self.integers.table:
            self.tables = [self.codes.table_of([n // BASE**d % BASE for n in self.integers.table]) for d in range(2)]
        with k.loop(0, self.rows) as row, k.loop(0, self.x_groups) as group:
            self._quantize_group(self.x.at(row * self.stride), self.digits.bytes(row * self.row_bytes), group)

    def _quantize_group(self, x, row, group) -> None:
        """Quantize group `group` of a row x (depth) to fixed point and store it to `row` of scratch (`_prepare_x`): digits, scale
        (NaN where a number is infinite or NaN) and -offset * sum(digits), with which the integer sums begin."""
        k, bits = self.k, BITS[self.count]
        first = group * self.group
        numbers = []
        for v in range(0, self.group, k.lanes):
            mask = k.mask_first(self.depth - (first + v)) if self.depth % self.group else None
            numbers.append(x.load(first + v, mask))
        # The largest magnitude gives the group's exponent: the integer order of fp32 bits is that of magnitudes.
        magnitudes = [k.bitcast(x, k.ivec) & FP32_MAGNITUDE for x in numbers]
        largest = reduce(k.max, magnitudes)
        field = k.maximum(largest) >> FP32_FRACTION  # fp32's biased exponent; 255: infinity or NaN
        exponent = k.max(field, LEAST_EXPONENT) + (1 - bits)  # biased, of the fixed-point unit
        infinite = field > 254  # or NaN
        scale = k.op("float", f"bitcast i32 {(exponent << FP32_FRACTION).ref} to float") * self.integers.unit
        k.line(f"store float {k.select(infinite, float('nan'), scale).ref}, ptr {self._scale(row, group).ref}, align 4")
        times = k.splat(k.op("float", f"bitcast i32 {((254 - exponent) << FP32_FRACTION).ref} to float"))  # 1 / the unit
        sums: list[Any] = [None] * self.count  # of each digit, in lanes
        for v, number in enumerate(numbers):
            for d, digit in enumerate(self._digits_of(number * times)):
                sums[d] = digit if v == 0 else sums[d] + digit
                small = k.op(f"<{k.lanes} x i8>", f"trunc {digit.typed} to <{k.lanes} x i8>")
                at = row.bytes(first + (d * self.plane + v * k.lanes))
                k.line(f"store {small.typed}, ptr {at.ref}, align 1")
        for d, total in enumerate(sums):
            begin = k.sum(total) * -self.integers.offset
            k.line(f"store {begin.typed}, ptr {self._begin(row, group, d).ref}, align 4")

    def _digits_of(self, x) -> Iterator[Value]:
        """The `count` digits (i32 lanes) of fp32 lanes x, rounded to integers: signed bytes, lowest first; the last is the rest."""
        k = self.k
        rounded = k.call(f"llvm.rint.v{k.lanes}f32", k.vec, x)
        rest = k.op(k.ivec, f"fptosi {rounded.typed} to {k.ivec}")
        for d in range(self.count):
            digit = rest if d + 1 == self.count else _arithmetic_shift(k, rest << 24, 24)  # the low byte, signed
            rest = _arithmetic_shift(k, rest - digit, 8)  # the difference is divisible by 256
            yield digit

    def _scale(self, row, group) -> Pointer:
        return row.bytes(group * 4 + self.scales_at)

    def _begin(self, row, group, digit: int) -> Pointer:
        return row.bytes(group * 4 + (self.scales_at + (digit + 1) * 4 * self.x_groups))

    def _sums_of_tile(self, tile, rows: int) -> list[list[Value]]:
        """The finished sums of 16 columns, a vector, of each row: [row][0]."""
        self.x_rows = [self._digits_of_row(r) for r in range(rows)]
        return super()._sums_of_tile(tile, rows)

    def _apply_powers(self, tile, totals) -> list[list[Value]]:
        """Also times the scale of the columns where a whole row has one."""
        if not self.how.group:
            scale = self.scales.load(tile, self.k.int(0), 0)
            for [total] in totals:
                total.value = total.value * scale
        return super()._apply_powers(tile, totals)

    def _digits_of_row(self, row: int) -> Pointer:
        """The quantized row of x in scratch. Rows that do not exist are the last one."""
        k = self.k
        return self.digits.bytes((k.int(row) if row == 0 else k.min(self.rows - 1, row)) * self.row_bytes)

    def _accumulate_group(self, tile, group, blocks: int, totals) -> None:
        """totals[r][0] += x @ weight over `blocks` blocks of group number `group` of x, for the 16 columns of a tile. The product
        of a digit of the weight and one of x counts 256 to the sum of their places: there is an integer sum for each such power,
        and Horner's scheme combines them in the end."""
        k, places, x_rows = self.k, self.count + self.integers.digits - 1, self.x_rows  # powers of 256
        sums = []
        for p in x_rows:
            begins = [k.const(0, k.ivec)] * (self.integers.digits - 1)
            for d in range(self.count):
                at = self._begin(p, group, d)
                begins.append(k.splat(k.op("i32", f"load i32, ptr {at.ref}, align 4")))
            sums.append([k.var(begin) for begin in begins])
        first = group * (self.group // BLOCK)
        for b in range(blocks):
            self._accumulate_block(self.codes.block(tile, first + b), first + b, x_rows, sums)
        scale = self.scales.load(tile, group, 0) if self.how.group else None
        for p, row_sums, [total] in zip(x_rows, sums, totals, strict=True):
            value = k.to(row_sums[places - 1].value, k.vec)
            for place in reversed(range(places - 1)):
                value = k.fma(value, k.const(float(BASE), k.vec), k.to(row_sums[place].value, k.vec))
            power = k.splat(k.op("float", f"load float, ptr {self._scale(p, group).ref}, align 4"))
            if scale is None:
                total.value = k.fma(value, power, total.value)
            else:
                total.value = k.fma(value * power, scale, total.value)

    def _accumulate_block(self, p, block, x_rows, sums) -> None:
        """sums[row][place] (i32) += the byte products of block number `block`, whose codes are at p: 8 elements of 16 columns.
        `x_rows`: the rows' digits in scratch."""
        k = self.k
        for line in range(0, self.codes.block_bytes, packing.LINE):
            k.prefetch(p.bytes(quantized_few.PREFETCH_BLOCKS * self.codes.block_bytes + line))
        for half, codes in enumerate(self._load_digits(p)):
            for row, row_sums in zip(x_rows, sums, strict=True):
                for d in range(self.count):
                    at = row.bytes(block * BLOCK + (d * self.plane + half * LANE))
                    x = k.splat(k.op("i32", f"load i32, ptr {at.ref}, align 4"))
                    for place, digit in enumerate(codes):
                        row_sums[place + d].value = multiply_bytes(k, row_sums[place + d].value, digit, x)

    def _load_digits(self, p) -> list[list[Value]]:
        """A block of the weight, its codes at p, as [half][digit] vectors of unsigned bytes: a lane has 4 bytes of a column,
        elements 0 to 3 in the first half, 4 to 7 in the second."""
        k = self.k
        if not self.how.table:
            order = [row * TILE + column for column in range(TILE) for row in range(LANE)]
            halves = [self._load(p.bytes(half * LANE * TILE)) for half in range(2)]
            return [[k.shuffle(x, None, order) ^ -128] for x in halves]  # flips the sign bit: unsigned
        # A byte's two codes are those of elements e and e + 4; in a group of 16 bytes columns come before pairs of elements.
        order = [16 * g + t % 4 // 2 * 8 + t // 4 * 2 + t % 2 for g in range(k.lanes // 4) for t in range(16)]
        both = k.shuffle(self._load(p), None, order)
        halves = [both & 15, both >> 4]
        return [[self.codes.look_up(table, x) for table in self.tables] if self.integers.table else [x] for x in halves]

    def _load(self, p) -> Value:
        return self.k.op(self.bytes, f"load {self.bytes}, ptr {p.ref}, align 1")


def multiply_bytes(k, total, unsigned, signed) -> Value:
    """total (i32 lanes) + the sum of the four products of unsigned and signed bytes of each lane: vpdpbusd."""
    quads = f"<{LANE * k.lanes} x i8>"
    operands = [k.bitcast(v, quads) for v in (unsigned, signed)]
    return k.call("llvm.x86.avx512.vpdpbusd.512", k.ivec, total, *operands)


def _arithmetic_shift(k, v, places: int) -> Value:
    """v shifted to the right by `places` bits, with copies of the sign."""
    return k.op(v.type, f"ashr {v.typed}, {k.const(places, v.type).ref}")
