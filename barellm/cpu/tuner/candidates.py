"""Which choices are worth a measurement: those that fit the registers, less what a model of the caches gives no hope.

The model counts cycles of one core for the whole product: multiply-adds, packing, what must come from beyond the L2, and the
claims that the slowest thread gets more than the others. It need not be exact: it only skips what it puts far behind its best.

Of the best of those, what the model does not know is tried: how deep the parts are, and what is done beside a tile.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

from barellm.cpu import processor
from barellm.cpu.gemm_config import (
    AHEAD,
    BUSY,
    ORDERS,
    GemmConfig,
    Tile,
    chunk_of,
    claim_columns,
    even_part,
    packed_itemsize,
    part_of,
    tiles,
)
from barellm.cpu.isa import ISA
from barellm.cpu.kernels.gemm import amx
from barellm.cpu.kernels.gemm.packing import beside, panel_bytes, uses_vnni
from barellm.cpu.kernels.gemm.skinny_gemm import skinny_configs
from barellm.cpu.tuner.work import Work
from barellm.program.dtypes import itemsize
from barellm.program.integers import round_up

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
HEIGHTS = (24, 48, 96, 192, 384)  # rows of a weight gradient's claim: its packed left block has them
TILE_HEIGHTS, TILE_PANELS = (256, 512, 1024), (6, 12, 24)  # of a claim of AMX tiles: its sums fit the L2, or nearly
PARTS = (768, 1536, 3072)  # bytes of a packed column in a part of the depth; the whole depth is tried too
HOPELESS = 1.4  # times the model's best
MOST = 16
PACK_INTERLEAVED, PACK_TRANSPOSED = 2.5, 5.0  # cycles for a vector of a panel
BYTES_A_CYCLE = 6.0  # of one core from beyond its L2


def candidates(work: Work, isa: ISA, threads: int) -> list[Any]:
    """The default first, then the others by the model's cost. The ways of few rows are few, and all are tried."""
    if work.few:
        return skinny_configs(isa, work.dtype, work.cols, work.depth)
    first = work.default(isa)
    if _on_tiles(work, isa):
        return [first, *(c for c in possible(work, isa) if c != first)]
    costs = {choice: cost(work, choice, isa, threads) for choice in possible(work, isa)}
    best = min(costs.values())
    hopeful = sorted((c for c in costs if c != first and costs[c] <= HOPELESS * best), key=lambda c: costs[c])
    return [first, *hopeful[:MOST]]


def _on_tiles(work: Work, isa: ISA) -> bool:
    """Whether it is a product on AMX tiles, which the model does not know: its claims are few, and all are tried."""
    return amx.uses_tiles(isa, work.dtype) and work.role != "weight_gradient"


def possible(work: Work, isa: ISA) -> list[GemmConfig]:
    """Every tile, block and order that differ for this product."""
    found: dict[GemmConfig, None] = {}
    for tile in tiles(isa, work.dtype):
        span = tile.nr(isa)
        whole = -(-work.cols // span) * span
        if work.role == "weight_gradient":
            heights = {round_up(min(h, work.rows), tile.mr) for h in HEIGHTS}
            widths = {round_up(ceil(whole / n), span) for n in SPLITS}
        elif _on_tiles(work, isa):
            heights = {round_up(min(h, work.rows), tile.mr) for h in TILE_HEIGHTS}
            widths = {round_up(min(n * span, whole), span) for n in TILE_PANELS}
        else:
            heights = {round_up(ceil(work.rows / n), tile.mr) for n in SPLITS}
            parts = part_of(isa, work.depth, packed_itemsize(isa, work.dtype)) < work.depth
            widths = {span, min(claim_columns(isa, tile, parts=parts), whole)}
        for rows in sorted(heights):
            for columns in sorted(widths):
                one = rows >= work.rows or columns >= whole
                for order in ORDERS[:1] if one else ORDERS:
                    found[GemmConfig(tile, rows, rows, columns, order)] = None
    return list(found)


def refined(work: Work, best: Any, isa: ISA) -> list[Any]:
    """The choices that differ from the `best` in the depth of a part and in what is done ahead, of each tile that need not wait for
    its loads; of a weight gradient, whose chunks are no choice, in what is done ahead."""
    if work.few or amx.uses_tiles(isa, work.dtype):
        return []
    if work.role == "weight_gradient":
        return [replace(best, ahead=ahead) for ahead in AHEAD if ahead != best.ahead]
    found: dict[GemmConfig, None] = {}
    aheads = AHEAD if beside(isa, work.dtype) else (AHEAD[0], AHEAD[-1])
    for tile in {best.tile: None} | {t: None for t in tiles(isa, work.dtype) if t.vectors > 1}:
        for part in _parts(work, tile, isa):
            for ahead in aheads:
                found[_with(work, best, tile, part, ahead, isa)] = None
    return [c for c in found if c != best]


def _with(work: Work, best: GemmConfig, tile: Tile, part: int | None, ahead: str, isa: ISA) -> GemmConfig:
    """The `best` choice with another tile, part and work ahead: its blocks are as high, and what waits between two parts fits."""
    if (tile, part) == (best.tile, best.part):
        return replace(best, ahead=ahead)
    deep = part or part_of(isa, work.depth, packed_itemsize(isa, work.dtype))
    whole = round_up(work.cols, tile.nr(isa))
    columns = min(claim_columns(isa, tile, parts=deep < work.depth), whole)
    rows, long_rows = (round_up(n, tile.mr) for n in (best.rows, best.long_rows))
    return GemmConfig(tile, rows, long_rows, columns, best.order, part, ahead)


def _parts(work: Work, tile: Tile, isa: ISA) -> list[int | None]:
    """What a part of the depth may be: None for what it is by default, then others of which two panels fit the second cache."""
    size = packed_itemsize(isa, work.dtype)
    fits = processor.caches().get(2, processor.TYPICAL[2]) // 2
    depths = {even_part(work.depth, size, nbytes): None for nbytes in PARTS} | {work.depth: None}
    depths.pop(part_of(isa, work.depth, size), None)
    return [None, *(d for d in depths if panel_bytes(isa, work.dtype, d, tile.nr(isa)) <= fits)]


def cost(work: Work, choice: GemmConfig, isa: ISA, threads: int) -> float:
    """Cycles of one core, by the model."""
    tile, span, size = choice.tile, choice.tile.nr(isa), itemsize(work.dtype)
    pair = 2 if uses_vnni(isa, work.dtype) else 1
    units = work.depth / pair  # vectors of a panel's column of vectors
    panels = ceil(work.cols / span)
    few = ceil(work.rows / choice.long_rows) * panels < BUSY * threads
    block = choice.rows if few or work.role == "weight_gradient" else choice.long_rows
    row_blocks = ceil(work.rows / block)
    rows = row_blocks * round_up(min(block, work.rows), tile.mr)
    # A multiply-add a cycle; two loads a cycle are enough for tiles that are wide and high.
    loads = (tile.mr + tile.vectors) / (2 * tile.mr * tile.vectors)
    products = rows * panels * tile.vectors * units * max(1.0, loads)
    level2 = processor.caches().get(2, processor.TYPICAL[2])
    if work.role == "weight_gradient":
        column_blocks = ceil(panels * span / choice.columns)
        chunk = min(work.depth, chunk_of(isa))
        packing = row_blocks * panels * tile.vectors * units * PACK_INTERLEAVED
        packing += column_blocks * rows / isa.lanes * units * PACK_INTERLEAVED
        beyond = row_blocks * work.depth * work.cols * size + column_blocks * work.depth * work.rows * size
        if (round_up(choice.rows, isa.lanes) + span) * chunk * size > level2:
            beyond += panels * work.rows * work.depth * size
        claims = row_blocks * column_blocks
    else:
        each = PACK_TRANSPOSED if work.role.startswith("forward") else PACK_INTERLEAVED
        packing = row_blocks * panels * tile.vectors * units * each
        beyond = row_blocks * work.depth * work.cols * size
        if (min(block, work.rows) + span) * work.depth * size > level2:
            beyond += panels * work.rows * work.depth * size
        claims = row_blocks * ceil(panels * span / choice.columns)
    uneven = ceil(claims / threads) * threads / claims
    return (products + packing + beyond / BYTES_A_CYCLE) * uneven
