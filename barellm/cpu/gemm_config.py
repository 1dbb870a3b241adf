"""GemmConfig: the blocking of a GEMM (BLIS's MR x NR micro-tile, MC, NC and KC), the default one, and what may be tuned.

Loops from the outside: work items of MC rows x NC columns; KC of the depth; panels of NR columns, packed for B; tiles of MR rows.
A config changes only the speed, never a bit of the result: each element is one accumulation chain over the whole depth, whose
sum waits in fp32 between two KC blocks. The split of a weight gradient's depth into chunks of tokens, each with sums of its own,
follows from the shape alone, so it is no part of a config."""

from dataclasses import dataclass

from barellm.cpu import processor
from barellm.cpu.isa import ISA
from barellm.program.integers import ceil_div, round_up

# The first word of a GEMM's kind (fprop, dgrad, wgrad); the names of its epilogues may follow.
GEMM_KINDS = ("forward", "input_gradient", "weight_gradient")
SKINNY_KIND = "few"  # the first word of a skinny GEMM's kind
ORDERS = ("rows", "columns")
OVERLAPS = ("prefetch", "pack", "none")
PREFETCH_LEVELS = (0, 1, 2)  # cache levels of a SkinnyGemmConfig's prefetches
MC, LONG_MC = 384, 1152  # multiples of every tile's MR
ITEMS_PER_THREAD = 8  # of LONG_MC rows, half as many where an item is several panels: dynamic scheduling evens out disturbances
ACCUMULATOR_BYTES = 3 << 18  # of a LONG_MC block's fp32 sums, kept between two KC blocks
AMX_MC, AMX_PANELS = 512, 12  # of a work item on AMX: its sums and a KC block of A fill half of an L2 of 2 MiB
# KC blocks that follow each other for one panel of a row-major (N, K) weight: so much of a row is one piece of memory, which the
# hardware prefetcher streams. The MC rows of A stay in the L2 meanwhile.
AMX_K_GROUP = 3
AMX_ITEMS_PER_THREAD = 1  # at least: each item reads all of A
PACKED_A_BYTES = 3 << 18  # of a weight gradient's packed block of dy: with two panels it nearly fits the L2
MIN_ITEMS = 16  # work items of a weight gradient: enough for many threads, few enough to pack little
SMALL_FMAS = 1 << 26  # half as many items below so many multiply-adds, and where several chunks of tokens make items longer
KC_BYTES = 1536  # of a packed column: longer depths are cut into even KC blocks of about as many bytes,
NARROW_KC_BYTES = 4096  # where 16 registers make panels narrow: as much in the caches, and sums go to memory less often
KC_UNIT = 32  # KC is a multiple of it
ONE_BLOCK_BYTES = 3328  # but VNNI pairs of bf16 up to so many stay one block; fp32 would start cold with twice as much to pack
TOKEN_CHUNKS = {32: 2048, 16: 512}  # tokens of a weight gradient's chunk, by register count: `token_chunk` has the reason
SHORT_CHUNK = 1024  # tokens: a packed block of dy with fewer stays in the L2 from one item to the next

MIN_CHAINS, FULL_CHAINS = 6, 8  # independent multiply-adds that nearly hide, and fully hide, the latency of one

L1_WAY_BYTES = 4096  # of an L1 set-associative cache: rows a multiple of it apart compete for the ways of one set
L1_CONFLICT = 1.1  # how much longer a tile takes whose rows exceed the L1's ways (6 to 17 % on Zen 4)

# {register count: {vectors of NR: MR}}: the accumulators, a row of the B panel and one broadcast of A fit.
TILES = {32: {3: 8, 2: 12, 4: 6, 1: 24}, 16: {2: 6, 3: 4, 1: 12}}


@dataclass(frozen=True)
class Tile:
    """A micro-tile: mr rows x nr = `vectors` * lanes columns of accumulators in registers."""

    mr: int
    vectors: int

    def tail(self) -> "Tile":
        """The smallest tile that hides the multiply-add's latency: for the last rows of a block."""
        enough = [n for n in range(1, self.mr) if self.mr % n == 0 and n * self.vectors >= MIN_CHAINS]
        full = [n for n in enough if n * self.vectors >= FULL_CHAINS]
        return Tile(full[0] if full else max(enough, default=self.mr), self.vectors)

    def nr(self, isa: ISA) -> int:
        """NR: columns of the micro-tile and of a packed B panel."""
        return self.vectors * isa.lanes


@dataclass(frozen=True)
class GemmConfig:
    """The blocking of a GEMM: a work item is `mc` x `nc` of the result (less for an even share), in micro-tiles.

    `long_mc` replaces `mc` where each thread gets ITEMS_PER_THREAD items then; the number of rows and threads is known at run time
    only. `mc` is a multiple of MR (a weight gradient's default aside), `nc` of NR. `order`: which block consecutive items share,
    that of "rows" or that of "columns". `kc`: depth of a packed block; None: `default_kc`.

    `overlap`: what the micro-kernel's loop does besides its multiply-adds (not on AMX). "prefetch": prefetch the next rows of A and
    lines of C, and pack the next B panel where registers allow it; "pack": pack only; "none": pack each panel when it is needed,
    and run the loop over the depth in one piece. A core that starts two multiply-adds a cycle has half as many spare cycles."""

    tile: Tile
    mc: int
    long_mc: int
    nc: int
    order: str = "rows"
    kc: int | None = None
    overlap: str = OVERLAPS[0]

    def __str__(self) -> str:
        mc = f"{self.mc}" if self.mc == self.long_mc else f"{self.mc}/{self.long_mc}"
        kc = f",kc={self.kc}" if self.kc else ""
        overlap = "" if self.overlap == OVERLAPS[0] else f",overlap={self.overlap}"
        return f"{self.tile.mr}x{self.tile.vectors}v,mc={mc},nc={self.nc}{kc},{self.order}{overlap}"


@dataclass(frozen=True)
class SkinnyGemmConfig:
    """How a skinny GEMM walks its weight: `panels` of columns a work item, `unroll` columns (AMX: tiles) at a time with one row,
    `prefetch`: the cache level of software prefetches, 0 for none. No bit depends on it."""

    panels: int
    unroll: int
    prefetch: int

    def __str__(self) -> str:
        prefetch = f"prefetch=L{self.prefetch}" if self.prefetch else "no prefetch"
        return f"panels={self.panels},unroll={self.unroll},{prefetch}"


def tiles(isa: ISA, dtype: str) -> list[Tile]:
    """The micro-tiles that fit the registers; on AMX the one of its tile registers."""
    from barellm.cpu.kernels.gemm import amx  # kernels import this module

    if amx.uses_tiles(isa, dtype):
        return [Tile(amx.MR, amx.NR // isa.lanes)]
    return vector_tiles(isa)


def vector_tiles(isa: ISA) -> list[Tile]:
    """The micro-tiles that fit the vector registers."""
    table = TILES[isa.registers] if isa.fma else {2: 4, 1: 8}  # without fma the product needs a register
    return [Tile(rows, vectors) for vectors, rows in table.items()]


def default_kc(isa: ISA, depth: int, itemsize: int) -> int:
    """KC where a config does not give it; `itemsize` of a packed element. A panel of a whole long depth would not stay in the L2,
    and its columns in a row-major weight conflict there."""
    if itemsize == 2 and depth * itemsize <= ONE_BLOCK_BYTES:
        return depth
    return even_kc(depth, itemsize, KC_BYTES if isa.registers == 32 else NARROW_KC_BYTES)


def even_kc(depth: int, itemsize: int, nbytes: int) -> int:
    """The KC of blocks as equal as can be, of about `nbytes` of a packed column."""
    blocks = max(1, (depth * itemsize + nbytes // 2) // nbytes)
    return min(ceil_div(depth, KC_UNIT * blocks) * KC_UNIT, depth)


def packed_itemsize(isa: ISA, dtype: str) -> int:
    """Bytes of an element in a packed panel."""
    return 2 if dtype == "bf16" and isa.dot else 4


def default_nc(isa: ISA, tile: Tile, *, several_kc: bool) -> int:
    """NC: with several KC blocks an MC x KC block of A is read once for all panels of an item, else an item is one panel."""
    nr = tile.nr(isa)
    return max(ACCUMULATOR_BYTES // (4 * LONG_MC * nr) if several_kc else 1, 1) * nr


def token_chunk(isa: ISA) -> int:
    """Tokens of one chunk of a weight gradient: part of the result's definition, not of a config. With 16 registers a tile is small
    and reads its panel often, so a chunk's panel must be in a near cache."""
    return TOKEN_CHUNKS[isa.registers]


def default_tile(isa: ISA, dtype: str, cols: int, pitch: int = 0) -> Tile:
    """The micro-tile that takes the least time for `cols` columns, padding included; of equal ones the wider, which loads less.
    A step of the depth loads `mr` + `vectors` times, and as many loads as multiply-adds fit into a cycle, so a tile one vector wide
    is bound by its loads. `pitch`: bytes from a row of A to the next where A is read unpacked: a multiple of L1_WAY_BYTES makes
    the rows of a tile conflict misses in the L1."""
    ways = processor.caches().get(1, processor.TYPICAL[1]) // L1_WAY_BYTES

    def cost(tile: Tile) -> float:
        loads = (tile.mr + tile.vectors) / (tile.mr * tile.vectors)
        conflict = pitch > 0 and pitch % L1_WAY_BYTES == 0 and tile.mr > ways
        return round_up(cols, tile.nr(isa)) * max(1.0, loads) * (L1_CONFLICT if conflict else 1.0)

    return min(tiles(isa, dtype), key=cost)


def default(isa: ISA, kind: str, dtype: str, cols: int, depth: int, rows: int) -> GemmConfig:
    """The untuned config of a GEMM with a result (rows, cols). A weight gradient gets as many work items as are needed, an even
    number for two threads; each packs its rows and its columns, so they are as high as PACKED_A_BYTES allow, and about as wide."""
    from barellm.cpu.kernels.gemm import amx  # kernels import this module

    assert kind.startswith(GEMM_KINDS), kind
    pitch = 0 if kind == "weight_gradient" else depth * (4 if dtype == "fp32" else 2)
    tile = default_tile(isa, dtype, cols, pitch)
    nr = tile.nr(isa)
    itemsize = packed_itemsize(isa, dtype)
    if kind != "weight_gradient":
        if amx.uses_tiles(isa, dtype):
            return GemmConfig(tile, AMX_MC, AMX_MC, AMX_PANELS * nr)
        return GemmConfig(tile, MC, LONG_MC, default_nc(isa, tile, several_kc=default_kc(isa, depth, itemsize) < depth))
    chunk = min(depth, token_chunk(isa))  # tokens of a packed block
    most = max(PACKED_A_BYTES // (chunk * itemsize), tile.mr)
    # An item packs its block of dy again for each chunk: of several chunks, fewer and longer items pack less.
    items = MIN_ITEMS if depth == chunk and rows * cols * depth >= SMALL_FMAS else MIN_ITEMS // 2
    kept = 2 if chunk < SHORT_CHUNK else 1  # a short block of dy stays in the L2 for the next item
    row_blocks, column_blocks = ceil_div(rows, most), 1
    while row_blocks * column_blocks < items or row_blocks * column_blocks % 2:
        height, columns = ceil_div(rows, row_blocks), ceil_div(cols, column_blocks)
        if columns > nr and kept * columns >= height:
            column_blocks *= 2
        elif height > tile.mr:
            row_blocks *= 2
        else:
            break
    if amx.uses_tiles(isa, dtype):
        row_blocks = _filled(rows, row_blocks, tile.mr, 1 + column_blocks % 2)
    even = rows % row_blocks == 0 and not amx.uses_tiles(isa, dtype)
    height = rows // row_blocks if even else _even(rows, row_blocks, tile.mr)
    columns = _even(cols, column_blocks, nr)
    return GemmConfig(tile, height, height, columns)


def _even(size: int, blocks: int, multiple: int) -> int:
    """The multiple of `multiple` that divides `size` into `blocks` blocks as evenly as possible."""
    return ceil_div(size, blocks * multiple) * multiple


def _filled(size: int, blocks: int, multiple: int, step: int) -> int:
    """`blocks`, or a few more, `step` at a time, where the last block would be much shorter than the others: high tiles leave
    one of two threads a twelfth more to do."""
    for n in range(blocks, blocks + blocks // 4 + 1, step):
        height = _even(size, n, multiple)
        if size - (n - 1) * height >= height * 3 // 4:
            return n
    return blocks
