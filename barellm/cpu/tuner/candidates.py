"""Which GemmConfigs are worth measuring: those that fit the registers, pruned by an analytical cost model.

The model counts cycles of one core for the whole GEMM: multiply-adds, packing, bytes from beyond the L2, and the load imbalance
of work items over threads. It need not be exact: it only skips what it puts far behind its best.

KC and the overlap, which the model does not know, are tried with the best of those."""

from dataclasses import replace
from math import ceil
from typing import Any

from barellm.cpu import gemm_config, processor
from barellm.cpu.isa import ISA
from barellm.cpu.kernels.gemm import amx, skinny_gemm
from barellm.cpu.kernels.gemm.packing import can_overlap_packing, panel_bytes, uses_vnni
from barellm.cpu.tuner.problem import GemmProblem
from barellm.program.dtypes import itemsize
from barellm.program.integers import round_up

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
HEIGHTS = (24, 48, 96, 192, 384)  # MC of a weight gradient: rows of its packed block of dy
AMX_HEIGHTS, AMX_PANELS = (256, 512, 1024), (6, 12, 24)  # of a work item on AMX: its sums fit the L2, or nearly
KC_BYTES = (768, 1536, 3072)  # of a packed column in a KC block; the full depth is tried too
HOPELESS = 1.4  # times the model's best
MOST = 16
PACK_INTERLEAVED, PACK_TRANSPOSED = 2.5, 5.0  # cycles for a vector of a panel
BYTES_A_CYCLE = 6.0  # of one core from beyond its L2


def candidates(problem: GemmProblem, isa: ISA, threads: int) -> list[Any]:
    """The configs to measure: the default first, then others by the model's cost. For a skinny GEMM or AMX all are tried."""
    if problem.skinny:
        return skinny_gemm.skinny_configs(isa, problem.dtype, problem.cols, problem.depth)
    first = problem.default(isa)
    if _on_tiles(problem, isa):
        return [first, *(c for c in possible(problem, isa) if c != first)]
    costs = {config: cost(problem, config, isa, threads) for config in possible(problem, isa)}
    best = min(costs.values())
    hopeful = sorted((c for c in costs if c != first and costs[c] <= HOPELESS * best), key=lambda c: costs[c])
    return [first, *hopeful[:MOST]]


def _on_tiles(problem: GemmProblem, isa: ISA) -> bool:
    """Whether it is a GEMM on AMX tiles, which the model does not know: its configs are few, and all are tried."""
    return amx.uses_tiles(isa, problem.dtype) and problem.operation != "weight_gradient"


def possible(problem: GemmProblem, isa: ISA) -> list[gemm_config.GemmConfig]:
    """Every combination of tile, MC, NC and order that makes a difference for this problem; KC and overlap are the default."""
    configs: dict[gemm_config.GemmConfig, None] = {}
    for tile in gemm_config.tiles(isa, problem.dtype):
        nr = tile.nr(isa)
        padded_cols = -(-problem.cols // nr) * nr
        if problem.operation == "weight_gradient":
            heights = {round_up(min(h, problem.rows), tile.mr) for h in HEIGHTS}
            widths = {round_up(ceil(padded_cols / n), nr) for n in SPLITS}
        elif _on_tiles(problem, isa):
            heights = {round_up(min(h, problem.rows), tile.mr) for h in AMX_HEIGHTS}
            widths = {round_up(min(n * nr, padded_cols), nr) for n in AMX_PANELS}
        else:
            heights = {round_up(ceil(problem.rows / n), tile.mr) for n in SPLITS}
            several_kc = gemm_config.default_kc(isa, problem.depth, gemm_config.packed_itemsize(isa, problem.dtype)) < problem.depth
            widths = {nr, min(gemm_config.default_nc(isa, tile, several_kc=several_kc), padded_cols)}
        for rows in sorted(heights):
            for columns in sorted(widths):
                one_block = rows >= problem.rows or columns >= padded_cols
                for order in gemm_config.ORDERS[:1] if one_block else gemm_config.ORDERS:
                    configs[gemm_config.GemmConfig(tile, rows, rows, columns, order)] = None
    return list(configs)


def refined(problem: GemmProblem, best: Any, isa: ISA) -> list[Any]:
    """Configs that differ from the `best` in KC and overlap, for each tile that is not bound by its loads; for a weight gradient,
    whose chunks are fixed, in overlap alone."""
    if problem.skinny or amx.uses_tiles(isa, problem.dtype):
        return []
    if problem.operation == "weight_gradient":
        return [replace(best, overlap=overlap) for overlap in gemm_config.OVERLAPS if overlap != best.overlap]
    configs: dict[gemm_config.GemmConfig, None] = {}
    overlaps = gemm_config.OVERLAPS
    overlaps = overlaps if can_overlap_packing(isa, problem.dtype) else (overlaps[0], overlaps[-1])
    for tile in {best.tile: None} | {t: None for t in gemm_config.tiles(isa, problem.dtype) if t.vectors > 1}:
        for kc in _parts(problem, tile, isa):
            for overlap in overlaps:
                configs[_with(problem, best, tile, kc, overlap, isa)] = None
    return [c for c in configs if c != best]


def _with(
    problem: GemmProblem, best: gemm_config.GemmConfig, tile: gemm_config.Tile, kc: int | None, overlap: str, isa: ISA
) -> gemm_config.GemmConfig:
    """The `best` config with another tile, KC (`part`) and overlap, and an NC such that the sums between KC blocks fit."""
    if (tile, kc) == (best.tile, best.kc):
        return replace(best, overlap=overlap)
    depth = kc or gemm_config.default_kc(isa, problem.depth, gemm_config.packed_itemsize(isa, problem.dtype))
    padded_cols = round_up(problem.cols, tile.nr(isa))
    columns = min(gemm_config.default_nc(isa, tile, several_kc=depth < problem.depth), padded_cols)
    rows, long_rows = (round_up(n, tile.mr) for n in (best.mc, best.long_mc))
    return gemm_config.GemmConfig(tile, rows, long_rows, columns, best.order, kc, overlap)


def _parts(problem: GemmProblem, tile: gemm_config.Tile, isa: ISA) -> list[int | None]:
    """Values of KC: None for the default, then others of which two B panels fit the L2."""
    size = gemm_config.packed_itemsize(isa, problem.dtype)
    fits = processor.caches().get(2, processor.TYPICAL[2]) // 2
    depths = {gemm_config.even_kc(problem.depth, size, nbytes): None for nbytes in KC_BYTES} | {problem.depth: None}
    depths.pop(gemm_config.default_kc(isa, problem.depth, size), None)
    return [None, *(d for d in depths if panel_bytes(isa, problem.dtype, d, tile.nr(isa)) <= fits)]


def cost(problem: GemmProblem, config: gemm_config.GemmConfig, isa: ISA, threads: int) -> float:
    """The model's estimate in cycles of one core: multiply-adds, packing, bytes from beyond the L2, load imbalance. It is
    never reported: only candidates near the least are measured."""
    M, N, K = problem.rows, problem.cols, problem.depth
    tile, nr, size = config.tile, config.tile.nr(isa), itemsize(problem.dtype)
    gradient = problem.operation == "weight_gradient"
    units = K / (2 if uses_vnni(isa, problem.dtype) else 1)  # vectors of a panel's column of vectors
    panels = ceil(N / nr)
    few_items = ceil(M / config.long_mc) * panels < gemm_config.ITEMS_PER_THREAD * threads
    block = config.mc if few_items or gradient else config.long_mc
    row_blocks, column_blocks = ceil(M / block), ceil(panels * nr / config.nc)
    rows = row_blocks * round_up(min(block, M), tile.mr)
    # A multiply-add a cycle; two loads a cycle are enough for tiles that are wide and high.
    loads = (tile.mr + tile.vectors) / (2 * tile.mr * tile.vectors)
    products = rows * panels * tile.vectors * units * max(1.0, loads)
    pack_cost = PACK_TRANSPOSED if problem.operation.startswith("forward") else PACK_INTERLEAVED
    packing = row_blocks * panels * tile.vectors * units * pack_cost
    l2_miss_bytes = row_blocks * K * N * size  # each block of rows reads all of B
    resident = (min(block, M) + nr) * K * size  # a block of A and a panel of B, read again for each panel
    if gradient:
        packing += column_blocks * rows / isa.lanes * units * PACK_INTERLEAVED
        l2_miss_bytes += column_blocks * K * M * size
        resident = (round_up(config.mc, isa.lanes) + nr) * min(K, gemm_config.token_chunk(isa)) * size
    if resident > processor.caches().get(2, processor.TYPICAL[2]):  # more than the L2 holds: A comes anew for each panel
        l2_miss_bytes += panels * M * K * size
    items = row_blocks * column_blocks
    imbalance = ceil(items / threads) * threads / items  # the last round of items, in which some threads have none
    return (products + packing + l2_miss_bytes / BYTES_A_CYCLE) * imbalance
