"""What arithmetic alone decides about tiles: what one reuses, where a swizzle puts it, what edges and waves waste."""

from __future__ import annotations

from barellm.program.integers import ceil_div

CHUNKS = 8  # of 16 bytes, that lie in all 32 banks of shared memory: a row of 128 bytes


def reuse(rows: int, columns: int) -> float:
    """Operations for each number loaded, of a tile of sums in registers."""
    return 2 * rows * columns / (rows + columns)


def intensity(rows: int, columns: int, itemsize: int = 2) -> float:
    """Operations for each byte loaded, of a block's tile whose operands have numbers of `itemsize` bytes."""
    return reuse(rows, columns) / itemsize


def swizzled(row: int, chunk: int) -> int:
    """The place of chunk `chunk` within its row of 128 bytes, in the swizzle of 128 bytes: address bits 4 to 6 are xored with bits
    7 to 9, which number the row."""
    return chunk ^ row % CHUNKS


def conflicts(places: list[int]) -> int:
    """How often the busiest banks are asked when chunks at these places, one a row, are read together: 1 is free of conflicts."""
    return max(places.count(place) for place in places)


def wave_efficiency(tiles: int, processors: int) -> float:
    """The share of processors that have a tile to do, on average over the waves."""
    return tiles / (processors * ceil_div(tiles, processors))


def efficiency(M: int, N: int, tile: tuple[int, int], processors: int) -> float:
    """The share of the work of all waves that belongs to C: the rest are processors without a tile and parts of tiles beyond C's
    edge."""
    rows, columns = ceil_div(M, tile[0]), ceil_div(N, tile[1])
    inside = M * N / (rows * tile[0] * columns * tile[1])
    return inside * wave_efficiency(rows * columns, processors)
