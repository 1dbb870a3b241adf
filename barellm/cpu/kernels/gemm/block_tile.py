"""Tiling of a block of a block-sparse matrix into B panels (strips) and micro-tiles, and the micro-kernel over a block."""

from dataclasses import dataclass, replace
from typing import Any

from barellm.cpu.gemm_config import vector_tiles
from barellm.cpu.kernel import ISA, Value
from barellm.cpu.kernels.gemm import amx
from barellm.cpu.kernels.gemm.microkernel import BroadcastA, rank1_update
from barellm.cpu.kernels.gemm.packing import uses_vnni

UNROLL = 8  # of the loop over the depth


def isa_of(isa: ISA, block: int) -> ISA:
    """The instruction set with vectors that are no wider than a block. A processor that multiplies and adds a vector of 512 bits a
    cycle does two of 256 in that time; others lose nothing, since half of the wider vectors would be empty."""
    return replace(isa, lanes=min(isa.lanes, block))


@dataclass(frozen=True)
class Tiling:
    """Strips of `vectors` vectors of columns, and tiles of up to `rows` rows. Packed operands are made of strips; a strip has one
    32-bit unit a column and step of the depth, where a step is `pair` numbers."""

    block: int
    pair: int
    lanes: int
    vectors: int
    rows: int
    tiles: bool = False  # products in AMX's tile registers: two by two of them a strip and `rows`

    @classmethod
    def of(cls, isa: ISA, dtype: str, block: int) -> "Tiling":
        """Of a kernel that uses `isa_of` the same block."""
        isa = isa_of(isa, block)
        if amx.uses_tiles(isa, dtype) and block % amx.NR == 0:
            return cls(block, 2, isa.lanes, amx.NR // isa.lanes, amx.MR, True)
        vectors = 2 if block % (2 * isa.lanes) == 0 else 1
        rows = next(tile.mr for tile in vector_tiles(isa) if tile.vectors == vectors)
        return cls(block, 2 if uses_vnni(isa, dtype) else 1, isa.lanes, vectors, rows)

    @property
    def nr(self) -> int:
        """Columns of a strip."""
        return self.vectors * self.lanes

    @property
    def strips(self) -> int:
        """Strips of a block."""
        return self.block // self.nr

    def steps(self, depth) -> Any:
        return (depth + 1) >> 1 if self.pair == 2 else depth


def multiply_accumulate(k, acc, left: BroadcastA, panel, steps, pair: int) -> None:
    """acc (rows, nr) += A @ panel over `steps` of the depth, an accumulation chain for each element; `pair` numbers a step. `left`:
    the loads of A; `panel`: [step][nr] units."""
    if isinstance(steps, int) and steps <= 2 * UNROLL:
        for u in range(steps):
            rank1_update(k, acc, left, panel, k.int(u), pair == 2)
        return
    whole = steps - steps % UNROLL
    with k.loop(0, whole, UNROLL) as u:
        for i in range(UNROLL):
            rank1_update(k, acc, left, panel, u + i, pair == 2)
    if not isinstance(whole, int) or whole < steps:
        with k.loop(whole, steps) as u:
            rank1_update(k, acc, left, panel, u, pair == 2)


def broadcast(k, rows, step: int, pair: int) -> BroadcastA:
    """The left operand whose row r starts at `rows[r]` and goes on `step` units later."""

    def unit(r: int, u) -> Value:
        p, type_ = rows[r].bytes(u * (4 * step)), "i32" if pair == 2 else "float"
        return k.splat(k.op(type_, f"load {type_}, ptr {p.ref}, align 4"))

    return unit
