"""How a matrix product is cut: the register tile, what one claim computes, the order of the claims.

Only speed depends on a choice, never a bit of the result: each element is one accumulation chain over the whole contraction. Parts
of the depth that follow each other leave it one, for its sum waits in fp32. Where it is split into sums of their own (weight
gradients: in chunks of tokens) the shape alone says how, so that split is no choice.
"""

from __future__ import annotations

from dataclasses import dataclass

from barellm.cpu import processor
from barellm.cpu.isa import ISA
from barellm.program.integers import ceil_div, round_up

ROLES = (
    "forward",
    "input_gradient",
    "weight_gradient",
)  # the first words of a role; behind them what follows the product
FEW_ROLE = "few"  # the first word of products of few rows
ORDERS = ("rows", "columns")
AHEAD = ("fetch", "pack", "nothing")
FETCHES = (0, 1, 2)  # caches that a FewChoice may ask for
BLOCK, LONG_BLOCK = 384, 1152  # rows that share one packing of a weight panel: multiples of every tile's rows
BUSY = 8  # claims a thread of long blocks, half as many where a claim is several panels, to even out disturbances
SUMS_BYTES = 3 << 18  # of a long block's sums, kept between two parts of the depth
TILE_ROWS, TILE_PANELS = (
    512,
    12,
)  # of a claim of AMX tiles: its sums and a part of its rows fill half of a second cache of 2 MiB
# Parts of the depth that follow each other for one panel of a weight with rows along the depth: so much of a row is one piece of
# memory, which the processor fetches ahead. The rows of a claim wait in the second cache meanwhile.
TILE_TURN = 3
TILE_BUSY = 1  # of these claims a thread at least: each of them reads all of the left operand
LEFT_BYTES = 3 << 18  # of a weight gradient's packed block of dy: beside two panels it nearly fits the second cache
CLAIMS = 16  # at least so many claims a weight gradient: enough for many threads, few enough to pack little
SMALL = 1 << 26  # half as many below so many multiply-adds, and where chunks of tokens make them longer
PART_BYTES = 1536  # of a column of a packed panel: longer ones are multiplied in about as long parts,
NARROW_PART_BYTES = (
    4096  # where 16 registers make panels narrow: as much in the caches, and sums go to memory less often
)
PART_UNIT = 32  # a part of the depth is a multiple of it
WHOLE_BYTES = 3328  # but for pairs of bf16 up to so many; fp32 would begin cold with twice as much to pack unhidden
CHUNKS = {32: 2048, 16: 512}  # tokens of a weight gradient's chunk, by register count: `chunk_of` says why
SHORT = 1024  # tokens: a packed block of fewer is short

ENOUGH, IN_FLIGHT = 6, 8  # multiply-adds in turn that keep a processor about busy, and busy

SETS_BYTES = (
    4096  # lines so far apart lie in one set of the first cache, which has a place for each so many of its bytes
)
CROWDED = 1.1  # how much longer a tile takes whose rows have no place in their set (6 to 17 % on Zen 4)

# Vectors a panel -> rows of the tile, by register count: accumulators + panel + one broadcast fit.
TILES = {32: {3: 8, 2: 12, 4: 6, 1: 24}, 16: {2: 6, 3: 4, 1: 12}}


@dataclass(frozen=True)
class Tile:
    """A micro-tile: mr rows x nr = `vectors` * lanes columns of accumulators in registers."""

    mr: int
    vectors: int

    def tail(self) -> Tile:
        """The least part of it that keeps the multiplier busy: what is left of a block goes in these."""
        busy = [n for n in range(1, self.mr) if self.mr % n == 0 and n * self.vectors >= ENOUGH]
        best = [n for n in busy if n * self.vectors >= IN_FLIGHT]
        return Tile(best[0] if best else max(busy, default=self.mr), self.vectors)

    def nr(self, isa: ISA) -> int:
        """Columns of the panel that the tile multiplies with."""
        return self.vectors * isa.lanes


@dataclass(frozen=True)
class GemmConfig:
    """A claim computes `rows` x `columns` of the result in tiles, or less for an even share; `long_rows` instead of `rows`
    where each thread has BUSY claims then: only the run knows how many rows and threads there are. `rows` are multiples of
    the tile's, but for a weight gradient's default, and `columns` of its panel's. `order`: what stays the same from one claim
    to the next as long as possible, the block of "rows" or that of "columns".

    `part`: of the depth that is multiplied at a time; None: `part_of` says it. `ahead`: what is done while a tile is multiplied,
    but on AMX tiles. "fetch" asks for the memory that comes next (rows, lines of the result) and packs the next panel, where the
    registers allow that; "pack" only packs; with "nothing" a panel is packed when it is wanted, and the loop over the depth is in
    one piece. A processor that starts two multiply-adds a cycle has half as many cycles for everything else.
    """

    tile: Tile
    rows: int
    long_rows: int
    columns: int
    order: str = "rows"
    part: int | None = None
    ahead: str = AHEAD[0]

    def __str__(self) -> str:
        rows = f"{self.rows}" if self.rows == self.long_rows else f"{self.rows}/{self.long_rows}"
        part = f",{self.part} deep" if self.part else ""
        ahead = "" if self.ahead == AHEAD[0] else f",{self.ahead} ahead"
        return f"{self.tile.mr}x{self.tile.vectors}v,{rows}x{self.columns},{self.order}{part}{ahead}"


@dataclass(frozen=True)
class SkinnyGemmConfig:
    """How a product of few rows walks its weight: a claim has `spans` of columns, of which one row is multiplied with so many
    `together`, tiles on AMX; `fetch`: the cache into which the kernel asks for those that come next, 1 or 2, or 0 where it leaves
    that to the processor. No bit depends on it."""

    spans: int
    together: int
    fetch: int

    def __str__(self) -> str:
        return (
            f"{self.spans} spans,{self.together} together,{f'fetched to {self.fetch}' if self.fetch else 'not fetched'}"
        )


def tiles(isa: ISA, dtype: str) -> list[Tile]:
    """The tiles whose accumulators, panel and broadcast fit into the registers. On AMX it is the one tile of its tile registers."""
    from barellm.cpu.kernels.gemm import amx  # kernels import this module

    if amx.uses_tiles(isa, dtype):
        return [Tile(amx.MR, amx.NR // isa.lanes)]
    return register_tiles(isa)


def register_tiles(isa: ISA) -> list[Tile]:
    """The same of vector registers."""
    table = TILES[isa.registers] if isa.fma else {2: 4, 1: 8}  # without fma the product needs a register of its own
    return [Tile(rows, vectors) for vectors, rows in table.items()]


def part_of(isa: ISA, depth: int, itemsize: int) -> int:
    """Depth of a product that is packed and multiplied at a time where no choice says it; `itemsize` of a packed element. Sums are
    kept in fp32 between two parts, so each element is one accumulation chain still. A panel of a whole long depth would leave the
    second cache, and its columns in a row-major weight displace each other there."""
    if itemsize == 2 and depth * itemsize <= WHOLE_BYTES:
        return depth
    return even_part(depth, itemsize, PART_BYTES if isa.registers == 32 else NARROW_PART_BYTES)


def even_part(depth: int, itemsize: int, nbytes: int) -> int:
    """The depth of parts that are as long as each other, about `nbytes` of a packed column."""
    parts = max(1, (depth * itemsize + nbytes // 2) // nbytes)
    return min(ceil_div(depth, PART_UNIT * parts) * PART_UNIT, depth)


def packed_itemsize(isa: ISA, dtype: str) -> int:
    """Bytes of an element in a packed panel."""
    return 2 if dtype == "bf16" and isa.dot else 4


def claim_columns(isa: ISA, tile: Tile, *, parts: bool) -> int:
    """Columns of a claim. Where the depth goes in parts, a block of the left operand is read once for all its panels."""
    span = tile.nr(isa)
    return max(SUMS_BYTES // (4 * LONG_BLOCK * span) if parts else 1, 1) * span


def chunk_of(isa: ISA) -> int:
    """Tokens of one chunk of a weight gradient: part of the result's definition, not a choice. With 16 registers a tile is small
    and reads its panel often, so a chunk's panel must be near."""
    return CHUNKS[isa.registers]


def default_tile(isa: ISA, dtype: str, cols: int, pitch: int = 0) -> Tile:
    """The panel width that takes the least time for `cols` columns and the padding behind them; the wider one where equal, for it
    loads less. Each step loads `rows` + `vectors` times, and as many loads as multiply-adds fit into a cycle: a tile that is one
    vector wide waits for its loads. `pitch`: bytes from a row of the left operand to the next, where rows are read as they lie.
    Those of a tile then may displace each other in the first cache at each step."""
    ways = processor.caches().get(1, processor.TYPICAL[1]) // SETS_BYTES

    def cost(tile: Tile) -> float:
        loads = (tile.mr + tile.vectors) / (tile.mr * tile.vectors)
        crowded = pitch > 0 and pitch % SETS_BYTES == 0 and tile.mr > ways
        return round_up(cols, tile.nr(isa)) * max(1.0, loads) * (CROWDED if crowded else 1.0)

    return min(tiles(isa, dtype), key=cost)


def default(isa: ISA, role: str, dtype: str, cols: int, depth: int, rows: int) -> GemmConfig:
    """The choice where nothing was tuned. `cols` and `rows` are those of the result. For a weight gradient it makes as many claims
    as are needed, an even number for two threads. They are as high as LEFT_BYTES allow, then about as wide as high, because each
    claim packs its rows and its columns."""
    from barellm.cpu.kernels.gemm import amx  # kernels import this module

    assert role.startswith(ROLES), role
    pitch = 0 if role == "weight_gradient" else depth * (4 if dtype == "fp32" else 2)
    tile = default_tile(isa, dtype, cols, pitch)
    span = tile.nr(isa)
    itemsize = packed_itemsize(isa, dtype)
    if role != "weight_gradient":
        if amx.uses_tiles(isa, dtype):
            return GemmConfig(tile, TILE_ROWS, TILE_ROWS, TILE_PANELS * span)
        return GemmConfig(
            tile, BLOCK, LONG_BLOCK, claim_columns(isa, tile, parts=part_of(isa, depth, itemsize) < depth)
        )
    chunk = min(depth, chunk_of(isa))  # tokens of a packed block
    most = max(LEFT_BYTES // (chunk * itemsize), tile.mr)
    # A claim packs its block of dy again for each chunk: of several, fewer and longer claims pack less.
    claims = CLAIMS if depth == chunk and rows * cols * depth >= SMALL else CLAIMS // 2
    kept = 2 if chunk < SHORT else 1  # a short block of dy stays in the second cache for the claims beside it
    row_blocks, column_blocks = ceil_div(rows, most), 1
    while row_blocks * column_blocks < claims or row_blocks * column_blocks % 2:
        height, columns = ceil_div(rows, row_blocks), ceil_div(cols, column_blocks)
        if columns > span and kept * columns >= height:
            column_blocks *= 2
        elif height > tile.mr:
            row_blocks *= 2
        else:
            break
    if amx.uses_tiles(isa, dtype):
        row_blocks = _filled(rows, row_blocks, tile.mr, 1 + column_blocks % 2)
    even = rows % row_blocks == 0 and not amx.uses_tiles(isa, dtype)
    height = rows // row_blocks if even else _even(rows, row_blocks, tile.mr)
    columns = _even(cols, column_blocks, span)
    return GemmConfig(tile, height, height, columns)


def _even(size: int, blocks: int, multiple: int) -> int:
    """The multiple of `multiple` that cuts `size` into `blocks` blocks as evenly as possible."""
    return ceil_div(size, blocks * multiple) * multiple


def _filled(size: int, blocks: int, multiple: int, step: int) -> int:
    """`blocks`, or a few more, `step` at a time, where the last block would be much shorter than the others: high tiles leave
    one of two threads a twelfth more to do."""
    for n in range(blocks, blocks + blocks // 4 + 1, step):
        height = _even(size, n, multiple)
        if size - (n - 1) * height >= height * 3 // 4:
            return n
    return blocks
