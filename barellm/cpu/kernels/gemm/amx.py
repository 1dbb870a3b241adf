"""The bf16 GEMM micro-kernel on AMX tile registers, in place of microkernel.py where the ISA has them.

A tile register holds 16 rows of 64 bytes. One instruction adds A B to a tile of 16 x 16 fp32: A is 16 rows of 16 pairs along the
depth, B 16 such pairs of 16 columns each. Four accumulators of 32 x 32 results, two tiles of A, two of B: eight, all there are.

B is packing.py's panel in VNNI layout, [depth / 2][32][2]. A are rows of an activation, read in place; columns beyond the last full
tile and rows of a partial tile are first copied into a zero-padded block, so that nothing out of bounds is read. A weight gradient
has no operand with pairs along the depth in its rows: its A is transposed and VNNI-packed once and used with every panel.

It ran on an Intel Xeon with AMX. On processors without, tests emulate its instructions (tests/simulators/amx_emulator.py)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from barellm.cpu.kernel import ISA, Pointer, Value
from barellm.cpu.kernels import loops
from barellm.cpu.lang.vector import transpose
from barellm.program.integers import ceil_div, round_up

SIDE = 16  # rows of a tile, and its columns of 4 bytes
MR = NR = 2 * SIDE  # of the micro-tile: four accumulators, 2 x 2 tile registers
TILE_K = 2 * SIDE  # bf16 of a tile row: one step of the depth
LINE = 4 * SIDE  # bytes of a row of a tile
TILE_BYTES = SIDE * LINE
A, B = 4, 6  # the first tile registers of A and of B, two each; 0 to 3 are the accumulators
KC = 256  # such that a panel's KC block stays in the L1 while rows pass
CORNERS = [(i, j) for i in range(2) for j in range(2)]  # accumulator 2 * i + j: rows from 16 i on, columns from 16 j on


def uses_tiles(isa: ISA, dtype: str) -> bool:
    return isa.tiles and dtype == "bf16"


def padded(depth: int) -> int:
    """The depth rounded up to TILE_K."""
    return round_up(depth, TILE_K)


def kc_of(depth: int) -> int:
    """KC for a depth: even blocks, multiples of TILE_K."""
    return ceil_div(depth, ceil_div(depth, KC) * TILE_K) * TILE_K


def padded_a_bytes(depth: int) -> int:
    """Scratch bytes of a zero-padded block of MR rows of A."""
    return MR * padded(depth) * 2


@dataclass(frozen=True)
class TileA:
    """A, two tiles of SIDE rows of it a step, from `pointer` on: rows `stride` bytes apart, the second tile `below` bytes after the
    first, the next step's tiles `step` bytes after this one's."""

    pointer: Pointer
    stride: int
    step: int
    below: Any


def row_major(pointer, stride: int) -> TileA:
    return TileA(pointer, stride, 4 * SIDE, SIDE * stride)


def configure(k) -> None:
    """LDTILECFG: all eight tile registers at full size. Per-thread state: a kernel configures first, and releases."""
    config = Pointer(k, k.alloca("i64", 8), "i64")
    rows = int.from_bytes(bytes([SIDE] * 8), "little")  # SIDE in each of 8 bytes
    columns = 4 * SIDE * 0x0001000100010001  # 64 bytes in each of 4 words of 16 bits
    # Palette 1; 8 x 16 bits of bytes a row; 8 x 8 of rows.
    for i, word in enumerate((1, 0, columns, columns, 0, 0, rows, 0)):
        config.put(k.int(word), i)
    intrinsic(k, "ldtilecfg", ("ptr", config.ref))


def release(k) -> None:
    intrinsic(k, "tilerelease")


@contextmanager
def tile_registers(k, used: bool) -> Iterator[None]:
    """Configures and releases the tile registers around a kernel that uses them."""
    if used:
        configure(k)
    yield
    if used:
        release(k)


def microkernel(k, out, panel, parts: list[tuple[TileA, Any]], *, begun=None,
        overlap: Callable[[Value], None] | None = None) -> None:  # fmt: skip
    """The micro-kernel: out [MR][NR] fp32 in scratch = A @ panel, or where `begun` (i1; None: never) out += A @ panel. `panel`: a B
    panel in VNNI layout, [pair][NR]. `parts`: pieces of A along the depth, each with its number of steps of TILE_K. `overlap(step)`
    is called in each step of the first piece, to overlap packing and prefetches."""
    row = 4 * NR  # bytes from a row of out, or of pairs of the panel, to the next
    load_accumulators(k, out, begun, row=row)
    at = panel
    for i, (left, steps) in enumerate(parts):
        accumulate_steps(k, left, at, k.int(steps), overlap=None if i else overlap)
        at = at.bytes(k.int(steps) * (SIDE * row))
    store_accumulators(k, out, row=row)


def load_accumulators(k, out, begun, *, row: int) -> None:
    """Set the accumulators: zero, or where `begun` (i1, or known here) loaded from out [MR][NR] fp32 with row pitch `row` bytes."""

    def load() -> None:
        for i, j in CORNERS:
            intrinsic(k, "tileloadd64", 2 * i + j, *_accumulator_address(out, i, j, row))

    _init_accumulators(k, begun, load)


def _init_accumulators(k, begun, load: Callable[[], None]) -> None:
    """Set the accumulators: `load()` emits the loads where `begun` (i1, or known here; None: never), else they are zeroed."""
    if isinstance(begun, Value):
        with k.when(begun):
            load()
    if begun is True:
        load()
        return
    with k.otherwise(begun) if isinstance(begun, Value) else nullcontext():
        for tile in range(4):
            intrinsic(k, "tilezero", tile)


def accumulate_steps(k, left: TileA, panel, steps, *, row: int = 4 * NR, overlap: Callable[[Value], None] | None = None) -> None:
    """The accumulators (tile registers 0 to 3) += A @ panel over `steps` of TILE_K; unrolled where that is a Python integer.
    `left`: A, two tiles a step; `panel`: VNNI pairs [pair][..], rows `row` bytes apart. `overlap(step)` is called in each step."""
    for u in loops.steps(k, 0, steps, unrolled=isinstance(steps, int)):
        here = replace(left, pointer=left.pointer.bytes(u * left.step))
        _outer_product_step(k, here, panel.bytes(u * (SIDE * row)), row)
        if overlap is not None:
            overlap(u)


def store_accumulators(k, out, *, row: int) -> None:
    """out (MR, NR) = the accumulators; row pitch `row` bytes."""
    for i, j in CORNERS:
        intrinsic(k, "tilestored64", 2 * i + j, *_accumulator_address(out, i, j, row))


def microkernel_column(k, out, count: int, left: Callable[[Value], Pointer], right, steps, *, begun=None) -> None:
    """out [16 count][16] fp32 = A @ B over `steps` of TILE_K, or where `begun` (i1; None: never) out += A @ B. A step has `count`
    <= 4 tiles of A, contiguous from `left(step)` on, and one tile of B at right + step * TILE_BYTES (VNNI). So only one new tile is
    read a step where A's tiles are those of other steps too, and come from the L1 (a convolution's taps)."""
    row = ("i64", str(LINE))

    def transfer_accumulators(name: str) -> None:
        for i in range(count):
            intrinsic(k, name, i, ("ptr", out.bytes(i * TILE_BYTES).ref), row)

    _init_accumulators(k, begun, lambda: transfer_accumulators("tileloadd64"))
    with k.loop(0, steps) as s:
        at = left(s)
        intrinsic(k, "tileloadd64", B + 1, ("ptr", right.bytes(s * TILE_BYTES).ref), row)
        for i in range(count):  # A has three tile registers here, in turn, and B one
            intrinsic(k, "tileloadd64", A + i % 3, ("ptr", at.bytes(i * TILE_BYTES).ref), row)
            intrinsic(k, "tdpbf16ps", i, A + i % 3, B + 1)
    transfer_accumulators("tilestored64")


def _accumulator_address(out, i: int, j: int, row: int) -> tuple[tuple[str, str], tuple[str, str]]:
    """Where an accumulator of a block with rows of `row` bytes lies, as operands of an instruction."""
    return ("ptr", out.bytes(i * SIDE * row + 4 * SIDE * j).ref), ("i64", str(row))


def gemm_accumulate(k, out, left: TileA, right, steps, *, rows: int, cols: int, begins: bool = False) -> None:
    """out [rows][cols] fp32 += A @ B over `steps` of TILE_K, or with `begins` out = A @ B; rows, cols: multiples of 32. `left`: A's
    first 32 rows; `left.below` bytes from 16 rows to the next 16. `right`: B in VNNI layout, [TILE_K / 2 * steps][cols] pairs."""
    row = 4 * cols  # bytes from a row of out, or of pairs, to the next
    for i0 in range(0, rows, MR):
        for j0 in range(0, cols, NR):
            block = out.bytes(i0 * row + 4 * j0)
            load_accumulators(k, block, not begins, row=row)
            left_rows = replace(left, pointer=left.pointer.bytes(i0 // SIDE * left.below))
            accumulate_steps(k, left_rows, right.bytes(4 * j0), steps, row=row)
            store_accumulators(k, block, row=row)


def _outer_product_step(k, left: TileA, b, row: int) -> None:
    """One step of TILE_K: the accumulators += two tiles of A @ two of B (VNNI), whose row pitch is `row` bytes."""
    for i in range(2):
        a = left.pointer.bytes(k.int(left.below) * i)
        intrinsic(k, "tileloadd64", A + i, ("ptr", a.ref), ("i64", str(left.stride)))
        for j in range(2):
            if i == 0:
                intrinsic(k, "tileloadd64", B + j, ("ptr", b.bytes(4 * SIDE * j).ref), ("i64", str(row)))
            intrinsic(k, "tdpbf16ps", 2 * i + j, A + i, B + j)


def peak_loop(k, iterations) -> None:
    """`iterations` times four independent products of tiles, on zeros: the peak rate of the processor."""
    configure(k)
    for tile in range(8):
        intrinsic(k, "tilezero", tile)
    with k.loop(0, iterations):
        for tile in range(4):
            intrinsic(k, "tdpbf16ps", tile, A + tile // 2, B + tile % 2)
    release(k)


PEAK_FLOPS = 4 * SIDE * SIDE * TILE_K * 2  # floating-point operations of one iteration of `peak_loop`


def microkernel_rows(k, out, a, count, panel, block, *, depth: int, stride: int, **options) -> None:
    """out [MR][NR] fp32 = rows [0, count) of a (rows, depth) bf16, row stride `stride` elements, @ panel (VNNI); `count` None: MR
    rows. What an AMX tile would read beyond the depth or beyond the last row is first copied to `block`, zero-padded scratch of
    `padded_a_bytes(depth)`. `options` are for `microkernel`."""
    whole = depth // TILE_K if count is None else 0  # steps that are read in place
    parts: list[tuple[TileA, Any]] = [(row_major(a, 2 * stride), whole)] if whole else []
    rest = padded(depth) - whole * TILE_K
    if rest:
        rows = MR if count is None else count
        _copy_padded_rows(k, block, a, rows, first=whole * TILE_K, depth=depth, stride=stride, width=rest)
        parts.append((row_major(block, 2 * rest), rest // TILE_K))
    microkernel(k, out, panel, parts, **options)


def _copy_padded_rows(k, dst, a, count, *, first: int, depth: int, stride: int, width: int) -> None:
    """dst [count][width] bf16 = columns [first, depth) of `count` rows of a, row stride `stride`, zero-padded to `width`."""
    end = first + (depth - first) // k.lanes * k.lanes  # of the whole vectors
    with k.loop(0, count) as r:
        source, target = a.at(r * stride), dst.as_dtype("bf16").at(r * width)
        if end > first:
            with k.loop(first, end, k.lanes) as c:
                target.store_raw(source.load_raw(c), c - first)
        for c in range(end, first + width, k.lanes):
            inside = max(0, min(depth - c, k.lanes))  # lanes of this vector that exist
            raw = source.load_raw(c, k.mask_first(inside)) if inside else k.const(0, f"<{k.lanes} x i16>")
            target.store_raw(raw, c - first)


def pad_panel(k, panel, depth) -> None:
    """Zero-pad a packed panel of `depth` to a multiple of TILE_K."""
    pairs = k.ceil_div(depth, 2)
    with k.loop(pairs, (pairs + (SIDE - 1)) & -SIDE) as u:
        for v in range(0, NR, k.lanes):
            panel.as_dtype("fp32").store(0.0, u * NR + v)


def pack_a(k, block, b, col, depth, *, stride: int, width: int, cols: int | None) -> None:
    """Pack A of a weight gradient: columns [col, col + width) of b (depth, stride) bf16, whose rows are tokens, as A tiles whose
    rows are b's columns: block [width / 16][steps][16 columns][16 pairs of tokens]. `cols`: b's columns where `width` may exceed
    them, else None; what exceeds, and tokens beyond `depth`, are zero-padded."""
    steps = k.ceil_div(depth, TILE_K)

    def pack_step(s, *, tail: bool) -> None:
        """Pack the tiles [column][pair] of the TILE_K tokens from s * TILE_K on; `tail`: some of them lie beyond `depth`."""
        with k.loop(0, width, SIDE) as c:
            rows = []
            for i in range(TILE_K):
                token = s * TILE_K + i
                lanes = k.int(SIDE) if cols is None else cols - (col + c)
                if tail:
                    lanes = k.select(token < depth, lanes, 0)
                mask = None if cols is None and not tail else k.mask_first(lanes)
                rows.append(b.at(token * stride + col + c).load_raw(0, mask))
            pairs = [k.bitcast(k.interleave(x, y), k.ivec) for x, y in zip(rows[::2], rows[1::2], strict=True)]
            target = block.as_dtype("i32").bytes(((c // SIDE) * steps + s) * TILE_BYTES)
            for i, row in enumerate(transpose(k, pairs)):
                target.store_raw(row, i * SIDE)

    whole = depth // TILE_K
    with k.loop(0, whole) as s:
        pack_step(s, tail=False)
    with k.when(whole < steps):
        pack_step(whole, tail=True)


def intrinsic(k, name: str, *args: int | tuple[str, str]) -> None:
    """An AMX intrinsic with constant tile registers: LLVM's own allocation of tiles needs passes that do not run here."""
    kinds = ["i8 immarg" if isinstance(a, int) else a[0] for a in args]
    k.declare(f"void @llvm.x86.{name}({', '.join(kinds)})")
    values = [f"i8 {a}" if isinstance(a, int) else f"{a[0]} {a[1]}" for a in args]
    k.line(f"call void @llvm.x86.{name}({', '.join(values)})")
