"""Skinny GEMM (M <= 4) with a quantized weight, by an integer dot product (vpdpbusd, usdot): four products of unsigned and signed
bytes are added to a 32-bit lane.

A group of x becomes fixed-point numbers, with a power of two for all of them, and each number two or three signed bytes, its digits
to the base 256. Of bf16 two are enough: 14 bits beside the largest of the group, where bf16 has 8; of fp32 and fp16 it is three, 22
bits. Codes are unsigned bytes as they are, or the two digits of a whole number out of a table. So the sums of a group are whole
numbers, without rounding, in whatever order they are added. They begin with what takes back the offset that makes codes unsigned.

Shapes: x (rows, depth), codes (tiles, blocks, 128), scales (tiles, groups + 1, 16).
"""

from __future__ import annotations

from dataclasses import dataclass

from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels.gemm.codes import LOOK_UPS
from barellm.cpu.kernels.gemm.packing import LINE
from barellm.cpu.kernels.gemm.quantized_few import FEW, PREFETCH_BLOCKS, QuantizedSkinnyGemm
from barellm.cpu.lang import Pointer, Value, Var
from barellm.program.integers import ceil_div, round_up
from barellm.program.quantization import BLOCK, TILE, Scheme, scheme

WHOLE_ROW = 64  # elements of a group of x where the weight has a scale for a whole row
BITS = {
    2: 14,
    3: 22,
}  # of a number's magnitude, by its digits: rounded up to the next power of two it has as many digits still
BASE = 256
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
class Whole:
    """Codes as whole numbers: an element is (the digits of its code - `offset` of the last one) times `unit`."""

    unit: float
    offset: int
    table: tuple[int, ...] = ()  # of codes that are looked up

    @property
    def digits(self) -> int:
        return 2 if self.table else 1


def whole(how: Scheme) -> Whole:
    """The whole numbers of a scheme: every table of `program.quantization` has some."""
    if not how.table:
        return Whole(1.0, 128)
    steps = tuple(int(v) for v in how.table)
    if steps == how.table and steps == tuple(range(-8, 8)):
        return Whole(1.0, 8)
    unit, offset = 2.0**-11, 8
    numbers = tuple(v / unit + offset * BASE for v in how.table)
    assert all(n == int(n) and 0 <= n < BASE * BASE for n in numbers), how
    return Whole(unit, offset, tuple(int(n) for n in numbers))


def products_of_a_weight(weights: str, dtype: str) -> int:
    """Products of bytes that a weight takes: those of each of its digits with each digit of a number of x."""
    return whole(scheme(weights)).digits * digits_of(dtype)


def group_of(how: Scheme) -> int:
    """Elements of x that share a power of two."""
    return how.group or WHOLE_ROW


def row_bytes(how: Scheme, dtype: str, depth: int) -> int:
    """Scratch for a row of x: its digits, and of each group the power of two and what the sums begin with."""
    count, groups = digits_of(dtype), ceil_div(depth, group_of(how))
    return round_up(groups * (group_of(how) * count + 4 + 4 * count), LINE)


def digits_scratch_bytes(how: Scheme, dtype: str, depth: int) -> int:
    """Bytes of a thread's own scratch."""
    return FEW * row_bytes(how, dtype, depth)


class IntegerSkinnyGemm(QuantizedSkinnyGemm):
    """One thread's part of a product with FEW rows at most."""

    def _prepare(self) -> None:
        """x as digits, in this thread's scratch."""
        k = self.k
        self.whole, self.count, self.group = whole(self.how), digits_of(self.x.dtype), group_of(self.how)
        self.parts = ceil_div(self.depth, self.group)
        self.plane = self.parts * self.group  # bytes of one digit of a row
        self.begins = self.count * self.plane  # where the powers of two lie, and behind them what sums begin with
        self.row_bytes = row_bytes(self.how, self.x.dtype, self.depth)
        self.held = k.thread_scratch()
        self.bytes = f"<{LANE * k.lanes} x i8>"
        if self.whole.table:
            self.tables = [self.codes._table([n // BASE**d % BASE for n in self.whole.table]) for d in range(2)]
        with k.loop(0, self.rows) as row, k.loop(0, self.parts) as part:
            self._digits(self.x.at(row * self.stride), self.held.bytes(row * self.row_bytes), part)

    def _digits(self, x: Pointer, held: Pointer, part: Value) -> None:
        """One group of a row."""
        k, bits = self.k, BITS[self.count]
        first = part * self.group
        numbers = []
        for v in range(0, self.group, k.lanes):
            mask = k.mask_first(self.depth - (first + v)) if self.depth % self.group else None
            numbers.append(x.load(first + v, mask))
        sizes = [k.bitcast(x, k.ivec) & 0x7FFFFFFF for x in numbers]
        most = sizes[0]
        for size in sizes[1:]:
            most = k.max(most, size)
        field = k.maximum(most) >> 23
        exponent = k.max(field, LEAST_EXPONENT) + (1 - bits)
        infinite = field > 254
        scale = k.op("float", f"bitcast i32 {(exponent << 23).ref} to float") * self.whole.unit
        k.line(f"store float {k.select(infinite, float('nan'), scale).ref}, ptr {self._scale(held, part).ref}, align 4")
        times = k.splat(k.op("float", f"bitcast i32 {((254 - exponent) << 23).ref} to float"))
        sums: list[Value | None] = [None] * self.count
        for v, number in enumerate(numbers):
            rest = k.op(k.ivec, f"fptosi {k.call(f'llvm.rint.v{k.lanes}f32', k.vec, number * times).typed} to {k.ivec}")
            for d in range(self.count):
                digit = rest if d + 1 == self.count else _arithmetic(k, rest << 24, 24)
                rest = _arithmetic(k, rest - digit, 8)
                before = sums[d]
                sums[d] = digit if before is None else before + digit
                small = k.op(f"<{k.lanes} x i8>", f"trunc {digit.typed} to <{k.lanes} x i8>")
                at = held.bytes(first + (d * self.plane + v * k.lanes))
                k.line(f"store {small.typed}, ptr {at.ref}, align 1")
        for d, total in enumerate(sums):
            assert total is not None
            begin = k.sum(total) * -self.whole.offset
            k.line(f"store {begin.typed}, ptr {self._begin(held, part, d).ref}, align 4")

    def _scale(self, held: Pointer, part: Value) -> Pointer:
        return held.bytes(part * 4 + self.begins)

    def _begin(self, held: Pointer, part: Value, digit: int) -> Pointer:
        return held.bytes(part * 4 + (self.begins + (digit + 1) * 4 * self.parts))

    def _tile(self, tile: Value, rows: int) -> list[list[Value]]:
        k = self.k
        totals = [k.var_vec(0.0) for _ in range(rows)]
        each, rest = self.group // BLOCK, self.blocks % (self.group // BLOCK)
        held = [self._held(r) for r in range(rows)]
        with k.loop(0, self.blocks // each) as part:
            self._part(tile, part, each, held, totals)
        if rest:
            self._part(tile, k.int(self.blocks // each), rest, held, totals)
        power = self.scales.powers(tile, 0)
        if self.how.group:
            return [[total.value * power] for total in totals]
        scale = self.scales.load(tile, k.int(0), 0)
        return [[total.value * scale * power] for total in totals]

    def _held(self, row: int) -> Pointer:
        """The digits of a row. Rows that are not there are the last one."""
        k = self.k
        return self.held.bytes((k.int(row) if row == 0 else k.min(self.rows - 1, row)) * self.row_bytes)

    def _part(self, tile: Value, part: Value, blocks: int, held: list[Pointer], totals: list[Var]) -> None:
        """Adds the products of so many `blocks` of a group of x."""
        k, places = self.k, self.count + self.whole.digits - 1
        sums = []
        for p in held:
            begins = [k.const(0, k.ivec)] * (self.whole.digits - 1)
            for d in range(self.count):
                at = self._begin(p, part, d)
                begins.append(k.splat(k.op("i32", f"load i32, ptr {at.ref}, align 4")))
            sums.append([k.var(begin) for begin in begins])
        first = part * (self.group // BLOCK)
        for b in range(blocks):
            self._products(self.codes.block(tile, first + b), first + b, held, sums)
        scale = self.scales.load(tile, part, 0) if self.how.group else None
        for p, of_row, total in zip(held, sums, totals, strict=True):
            value = k.to(of_row[places - 1].value, k.vec)
            for place in reversed(range(places - 1)):
                value = k.fma(value, k.const(float(BASE), k.vec), k.to(of_row[place].value, k.vec))
            power = k.splat(k.op("float", f"load float, ptr {self._scale(p, part).ref}, align 4"))
            if scale is None:
                total.value = k.fma(value, power, total.value)
            else:
                total.value = k.fma(value * power, scale, total.value)

    def _products(self, p: Pointer, block: Value, held: list[Pointer], sums: list[list[Var]]) -> None:
        """Those of one block."""
        k = self.k
        for line in range(0, self.codes.block_bytes, LINE):
            k.prefetch(p.bytes(PREFETCH_BLOCKS * self.codes.block_bytes + line))
        for half, codes in enumerate(self._quads(p)):
            for row, of_row in zip(held, sums, strict=True):
                for d in range(self.count):
                    at = row.bytes(block * BLOCK + (d * self.plane + half * LANE))
                    x = k.splat(k.op("i32", f"load i32, ptr {at.ref}, align 4"))
                    for place, digit in enumerate(codes):
                        of_row[place + d].value = multiply_bytes(k, of_row[place + d].value, digit, x)

    def _quads(self, p: Pointer) -> list[list[Value]]:
        """The digits of elements 0 to 3 of the tile's columns, a column a lane, and those of elements 4 to 7."""
        k = self.k
        if not self.how.table:
            order = [row * TILE + column for column in range(TILE) for row in range(LANE)]
            halves = [self._load(p.bytes(half * LANE * TILE)) for half in range(2)]
            return [[k.shuffle(x, None, order) ^ -128] for x in halves]
        # A byte's two codes are those of elements e and e + 4; in a group of 16 bytes columns come before pairs of elements.
        order = [16 * g + t % 4 // 2 * 8 + t // 4 * 2 + t % 2 for g in range(k.lanes // 4) for t in range(16)]
        both = k.shuffle(self._load(p), None, order)
        halves = [both & 15, both >> 4]
        return [[self._look_up(table, x) for table in self.tables] if self.whole.table else [x] for x in halves]

    def _load(self, p: Pointer) -> Value:
        return self.k.op(self.bytes, f"load {self.bytes}, ptr {p.ref}, align 1")

    def _look_up(self, table: Value, codes: Value) -> Value:
        return self.k.call(LOOK_UPS[self.k.lanes], self.bytes, table, codes)


def multiply_bytes(k: KernelBuilder, total: Value, unsigned: Value, signed: Value) -> Value:
    """total + the four products of bytes of each lane."""
    quads = f"<{LANE * k.lanes} x i8>"
    operands = [k.bitcast(v, quads) for v in (unsigned, signed)]
    return k.call("llvm.x86.avx512.vpdpbusd.512", k.ivec, total, *operands)


def _arithmetic(k: KernelBuilder, v: Value, places: int) -> Value:
    """Shifted to the right, with copies of the sign."""
    return k.op(v.type, f"ashr {v.typed}, {k.const(places, v.type).ref}")
