"""How a matrix product is cut: the tile of a program, and into how many parts the sum over tokens of a weight gradient is split.

A tile changes speed and no bit of the result: each element is one chain over the contraction. The split does change bits, so it
is a function of the shape alone. Both count programs against WAVE, the multiprocessors of an H100, whatever card is there.
"""

from __future__ import annotations

from dataclasses import dataclass

WAVE = 132
LEAST_ROWS = 256  # of one part of a split sum
MOST_SPLITS = 64
SPLIT_ROWS = 5  # writing and reading one more partial tile takes as long as multiplying this many rows into a tile


@dataclass(frozen=True)
class Tile:
    """`rows` x `cols` of the result in one program, `depth` of the contraction a turn, `stages` turns in flight."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int


# Largest first. Shared memory is stages * (rows + cols) * depth * itemsize; accumulators rows * cols / (32 * warps) registers.
_BF16 = {
    80: (Tile(128, 256, 32, 8, 3), Tile(128, 128, 32, 4, 4), Tile(128, 64, 32, 4, 4), Tile(64, 64, 32, 4, 4)),
    89: (Tile(128, 128, 32, 8, 4), Tile(128, 64, 32, 4, 4), Tile(64, 64, 32, 4, 4)),
    90: (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 4, 4), Tile(64, 128, 64, 4, 4), Tile(64, 64, 64, 4, 4)),
    100: (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 4, 4), Tile(128, 64, 64, 4, 4), Tile(64, 64, 64, 4, 4)),
}
_FP32 = (Tile(128, 64, 16, 8, 3), Tile(64, 64, 16, 4, 3), Tile(32, 64, 16, 4, 3), Tile(32, 32, 16, 2, 3))


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def tile(role: str, rows: int, cols: int, depth: int, dtype: str, arch: int) -> Tile:
    """For a result of (rows, cols) and a contraction of `depth`: the tile that leaves the least idle and padded work. A smaller
    tile loads more for each product, which counts as a tenth of its time a step down the list. Weight gradients ("tn") are split
    until they fill the card."""
    best, least = None, 0.0
    for step, t in enumerate(_FP32 if dtype == "fp32" else _BF16[arch]):
        count = cdiv(rows, t.rows) * cdiv(cols, t.cols)
        if role == "tn":
            count *= splits(count, depth)
            work = cdiv(rows, t.rows) * cdiv(cols, t.cols) / count
        else:
            work = 1.0
        time = cdiv(count, WAVE) * work * t.rows * t.cols * (1 + 0.1 * step)
        if best is None or time < least:
            best, least = t, time
    assert best is not None
    return best


def splits(tiles: int, rows: int) -> int:
    """Into how many parts a sum over `rows` tokens is split where the result has `tiles` tiles: as many as fill the card best, the
    partial results counted. Rows are taken down to a power of two, so that few shapes need be asked for the most."""
    rows = 1 << (max(rows, 1).bit_length() - 1)

    def time(s: int) -> int:
        return cdiv(tiles * s, WAVE) * cdiv(rows, s) + (SPLIT_ROWS * tiles * s if s > 1 else 0)

    return min(range(1, min(MOST_SPLITS, max(rows // LEAST_ROWS, 1)) + 1), key=time)


def most_splits(tiles: int, rows: int) -> int:
    """The largest `splits` of any number of rows up to `rows`."""
    return max(splits(tiles, 1 << i) for i in range(max(rows, 1).bit_length()))
