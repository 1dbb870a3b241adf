"""Dequantization in registers: codes of quantized weights as vectors of numbers.

A block holds eight elements of each of sixteen columns. Of 4-bit codes it has 64 bytes. The lower and the upper halves of the bytes
are looked up in two tables of 16 bytes, which have the upper and the lower byte of a bf16 for each code. Interleaving both in
groups of 16 bytes gives pairs of bf16 that lie in a 32-bit lane: the element k of the lane's column and, above it, element k + 1. A
shift makes the first an fp32, and a mask the second. Processors that multiply bf16 take the pairs as they are.

For four vectors of bytes and their halves this takes two instructions to split them, 8 look-ups, 8 to interleave and 16 to widen.
"""

import struct
from collections.abc import Iterator

from barellm.cpu.kernel import Pointer, Value
from barellm.cpu.kernels.numbers import FP32_BIAS, FP32_FRACTION
from barellm.program.quantization import BLOCK, TILE, Scheme

LOOK_UPS = {16: "llvm.x86.avx512.pshuf.b.512", 8: "llvm.x86.avx2.pshuf.b"}  # by lanes; of 4 lanes NEON alone has one
NEON_LOOK_UP = "llvm.aarch64.neon.tbl1.v16i8"


class Codes:
    """Packed codes (tiles, `blocks`, 128) of a scheme. Vectors are of `lanes` columns, which all lie in one tile."""

    def __init__(self, k, p, how: Scheme, blocks: int) -> None:
        """`p`: the packed codes; `blocks`: of a column, its depth / 8. The table of 16 values is in registers, as its upper and
        lower bytes, where there is a byte look-up, else in stack memory."""
        self.k, self.p, self.how, self.blocks = k, p, how, blocks
        self.block_bytes = TILE * BLOCK if how.codes == "i8" else TILE * BLOCK // 2
        self.bytes = f"<{4 * k.lanes} x i8>"
        # With AVX, and with NEON, which alone has 4 lanes and 32 registers.
        self.vector_look_up = k.lanes > 4 or k.isa.registers == 32
        if how.table and self.vector_look_up:
            words = [struct.unpack("<I", struct.pack("<f", v))[0] >> 16 for v in how.table]  # bf16 bits of the table's values
            self.high, self.low = (self.table_of([w >> s & 255 for w in words]) for s in (8, 0))
        elif how.table:
            self.table = Pointer(k, k.alloca("float", 16), "fp32")
            self.found = Pointer(k, k.alloca("float", BLOCK * k.lanes), "fp32")
            for i, v in enumerate(how.table):
                self.table.put(v, i)

    def block(self, tile, block) -> Pointer:
        """The address of a block."""
        return self.p.bytes((self.k.int(tile) * self.blocks + block) * self.block_bytes)

    def values(self, block, column) -> Iterator[Value]:
        """The dequantized elements 0 to 7 of `block` for `lanes` columns from `column` of the tile on: a vector of fp32 each,
        before scaling. Each is emitted when it is taken, so that few of them are alive at a time."""
        k = self.k
        if not self.how.table:
            small = f"<{k.lanes} x i8>"
            for e in range(BLOCK):
                code = k.op(small, f"load {small}, ptr {block.bytes(k.int(column) + e * TILE).ref}, align 1")
                yield k.op(k.vec, f"sitofp {k.op(k.ivec, f'sext {code.typed} to {k.ivec}').typed} to {k.vec}")
        elif self.vector_look_up:
            for pair in self.pairs(block, column):
                yield k.bitcast(pair << 16, k.vec)  # the even element
                yield k.bitcast(pair & -0x10000, k.vec)  # the odd one, the upper half
        else:
            yield from self._scalar_look_up(block, column)

    def pairs(self, block, column) -> Iterator[Value]:
        """The same 4-bit codes as pairs of bf16: a vector of i32 for elements 0 and 1, and so on."""
        k = self.k
        both = k.op(self.bytes, f"load {self.bytes}, ptr {block.bytes(k.int(column) * 4).ref}, align 1")
        for upper in (False, True):
            codes = both >> 4 if upper else both & 15
            low, high = (self.look_up(table, codes) for table in (self.low, self.high))
            for half in (0, 8):  # punpcklbw, punpckhbw: low and high bytes interleaved in groups of 16
                order = [g + half + i + j for g in range(0, 4 * k.lanes, 16) for i in range(8) for j in (0, 4 * k.lanes)]
                yield k.bitcast(k.shuffle(low, high, order), k.ivec)

    def table_of(self, entries: list[int]) -> Value:
        """A table of 16 bytes, in each group of 16 lanes."""
        lanes = entries if self.k.lanes == 4 else entries * (self.k.lanes // 4)
        return Value(self.k, self.bytes, "<" + ", ".join(f"i8 {v - 256 if v > 127 else v}" for v in lanes) + ">")

    def look_up(self, table, codes) -> Value:
        return self.k.call(LOOK_UPS.get(self.k.lanes, NEON_LOOK_UP), self.bytes, table, codes)

    def _scalar_look_up(self, block, column) -> Iterator[Value]:
        """One code after the other through memory, for processors that cannot look up bytes in a register."""
        k, lanes = self.k, self.k.lanes
        first = block.bytes(k.int(column) * 4)
        with k.loop(0, 4 * lanes) as b:
            code = k.op("i64", f"zext i8 {k.op('i8', f'load i8, ptr {first.bytes(b).ref}, align 1').ref} to i64")
            at = (b // 8 * 2 + b % 2) * lanes + b % 8 // 2
            self.found.put(self.table.get(code & 15), at)
            self.found.put(self.table.get(code >> 4), at + 4 * lanes)
        yield from [self.found.load(e * lanes) for e in range(BLOCK)]  # all now: another vector may come next


class Scales:
    """Packed scales (tiles, groups + 1, 16), of which the last are exponents."""

    def __init__(self, k, p, groups: int) -> None:
        self.k, self.p, self.groups = k, p, groups

    def load(self, tile, group, column) -> Value:
        """The scales of a group of `lanes` columns from `column` of the tile on, as fp32, without the powers of two."""
        return self.p.load((self.k.int(tile) * (self.groups + 1) + group) * TILE + column)

    def powers(self, tile, column) -> Value:
        """The powers of two by which all scales of these columns are multiplied."""
        k = self.k
        return k.bitcast((k.to(self.load(tile, self.groups, column), k.ivec) + FP32_BIAS) << FP32_FRACTION, k.vec)
