"""Skinny GEMM on AMX tiles (amx.py), out^T = weight @ x^T: the weight is A, read in place, unpacked.

Vector code uses each loaded weight for two rows and is slower than memory from about eight rows on; a tile uses it for 16. Each
thread packs x into VNNI layout (B) for itself. Accumulators are transposed in the epilogue. An element is one accumulation chain
along the depth, in the order of the tile instruction, so results are batch-invariant."""

from barellm.cpu.gemm_config import SkinnyGemmConfig
from barellm.cpu.kernel import ISA, Value
from barellm.cpu.kernels.gemm import amx
from barellm.cpu.lang.vector import transpose
from barellm.program.integers import round_up

MOST = 64  # rows of x
NR = 64  # columns of a work item
LAST = 7  # tile register
UNROLLS = (1, 2, 4)  # tiles of the weight at a time where x is one tile wide, the best first
WIDTHS = (amx.SIDE, amx.NR, MOST)  # rows of x as packed


def fits(isa: ISA, dtype: str, cols: int, depth: int) -> bool:
    """Whether a GEMM can run so: no tile exceeds the weight."""
    return amx.uses_tiles(isa, dtype) and cols >= NR and depth % amx.TILE_K == 0


def scratch_bytes(isa: ISA, depth: int) -> int:
    """Scratch bytes of a thread: packed x and an item's accumulators, after which as many may be read."""
    return 2 * MOST * depth + 4 * MOST * (2 * NR) if isa.tiles else 0


class SkinnyGemmAmx:
    """One thread's part of a (rows, depth) @ weight (cols, depth)^T; `stride`: row stride of a in elements."""

    def __init__(self, k, a, weight, rows, scratch, *, cols: int, depth: int, stride: int, config: SkinnyGemmConfig) -> None:
        """`scratch`: of the thread, `scratch_bytes`: `x`, packed pairs; `out`, accumulators [NR][width] fp32."""
        self.k, self.a, self.weight, self.rows, self.config = k, a, weight, rows, config
        self.cols, self.depth, self.stride = cols, depth, stride
        self.x = scratch.as_dtype("i32")
        self.out = scratch.bytes(round_up(2 * MOST * depth, 64)).as_dtype("fp32")

    def pack_x(self) -> None:
        """Pack x (rows, depth) bf16 in VNNI layout into this thread's scratch, [depth / 2][width] pairs along the depth, `width`
        being the smallest of WIDTHS; rows beyond the last are zero."""
        k, side = self.k, amx.SIDE
        amx.configure(k)
        zero = k.const(0, k.ivec)
        for width, is_width in self._widths():
            with k.when(is_width):
                for first in range(0, width, side):
                    any_row = self.rows > first
                    with k.when(any_row), k.loop(0, self.depth, amx.TILE_K) as d:
                        lines = []
                        for r in range(first, first + side):
                            at = self.a.at(k.min(self.rows - 1, r) * self.stride + d)
                            line = k.op(k.ivec, f"load {k.ivec}, ptr {at.ref}, align {at.itemsize}")
                            lines.append(k.select(self.rows > r, line, zero))
                        for i, pairs in enumerate(transpose(k, lines)):
                            self.x.store_raw(pairs, (d // 2 + i) * width + first)
                    with k.otherwise(any_row), k.loop(0, self.depth // 2) as pair:
                        self.x.store_raw(zero, pair * width + first)

    def panel_sums(self, column, sums, pitch: int) -> None:
        """sums (rows, NR) fp32, row stride `pitch` elements = the columns [column, column + NR) of the result. Where they would
        exceed it, the last NR columns are computed instead, and stored so far before `sums` that each lies in its place."""
        k, side = self.k, amx.SIDE
        start = k.min(column, self.cols - NR) if self.cols % NR else column  # the first column that is computed
        for width, is_width in self._widths():
            with k.when(is_width):
                self._microkernel(self.weight.at(start * self.depth), width)
                for first in range(0, width, side):
                    with k.when(self.rows > first):
                        for half in range(0, NR, side):
                            at = self.out.at((column - start + half) * width + first)
                            square = transpose(k, [at.load(i * width) for i in range(side)])
                            for i, line in enumerate(square):
                                sums.store(line, (first + i) * pitch + half)

    def _microkernel(self, at, width: int) -> None:
        """self.out [NR][width] fp32 = NR rows of the weight (row-major, from `at` on) @ the packed x [depth / 2][width]. With few
        tiles at a time the weight is read nearly sequentially, which the hardware prefetcher sees. Software prefetches, where the
        config has them, fetch the NR rows behind these, most likely the thread's next work item."""
        k, side = self.k, amx.SIDE
        high, wide = (self.config.unroll, 1) if width == side else (2, 2)  # tiles of the weight, and of x
        x_pitch = ("i64", str(4 * width))  # bytes from a row of pairs, or of results, to the next
        for top in range(0, NR, high * side):
            for first in range(0, width, wide * side):
                for tile in range(high * wide):
                    amx.intrinsic(k, "tilezero", tile)
                with k.loop(0, self.depth // amx.TILE_K) as s:
                    if first == 0 and self.config.prefetch:
                        self._prefetch_next(at, top, s, step_bytes=high * amx.TILE_BYTES)
                    x = self.x.bytes(s * (amx.LINE * width) + 4 * first)
                    for j in range(wide):
                        amx.intrinsic(k, "tileloadd64", LAST - j, ("ptr", x.bytes(amx.LINE * j).ref), x_pitch)
                    self._multiply_step(at, top, s, high, wide)
                for i in range(high):
                    for j in range(wide):
                        result = self.out.bytes(4 * ((top + i * side) * width + first + side * j))
                        amx.intrinsic(k, "tilestored64", i * wide + j, ("ptr", result.ref), x_pitch)

    def _prefetch_next(self, at, top: int, step, *, step_bytes: int) -> None:
        """Prefetch what the next panel reads at row `top` in a `step`: as many bytes of the weight as this step reads."""
        panel_bytes = NR * 2 * self.depth
        ahead = at.bytes(panel_bytes + top * 2 * self.depth + step * step_bytes)
        for line in range(0, step_bytes, amx.LINE):
            self.k.prefetch(ahead.bytes(line), near=self.config.prefetch == 1)

    def _multiply_step(self, at, top: int, step, high: int, wide: int) -> None:
        """Accumulators i * wide + j += tile i of the weight, from row `top` on, x tile j of x, which is in register LAST - j. The
        weight takes the other registers from A on, in turn."""
        weight_registers = range(amx.A, LAST + 1 - wide)
        for i in range(high):
            register = weight_registers[i % len(weight_registers)]
            tile = at.bytes((top + i * amx.SIDE) * 2 * self.depth + step * amx.LINE)
            amx.intrinsic(self.k, "tileloadd64", register, ("ptr", tile.ref), ("i64", str(2 * self.depth)))
            for j in range(wide):
                amx.intrinsic(self.k, "tdpbf16ps", i * wide + j, register, LAST - j)

    def release(self) -> None:
        amx.release(self.k)

    def _widths(self) -> list[tuple[int, Value]]:
        """(width of the packed x, whether this run's x has it): the smallest of WIDTHS that holds all rows."""
        bounds = zip((0, *WIDTHS), WIDTHS, strict=False)
        return [(width, (self.rows > below) & (self.rows <= width)) for below, width in bounds]
