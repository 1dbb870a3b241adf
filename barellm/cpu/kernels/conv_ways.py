"""Which multiplications a direct convolution of bf16 images takes: AMX tiles, dot products of pairs, or fp32.

A way is worth its speed, in products of fp32, times the share of what it multiplies that is not padding: channels are padded to
pairs or to tiles, positions and output channels to tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

from barellm.cpu.gemm_config import Tile, vector_tiles
from barellm.cpu.isa import ISA
from barellm.cpu.kernels import amx
from barellm.cpu.kernels.conv_lines import Grid
from barellm.cpu.kernels.conv_planes import Planes
from barellm.program.integers import round_up

TILES, DOTS = 6.0, 1.5  # times as fast as fp32, measured
LONGEST = 4096  # outputs of a line: its planes should stay in the second cache
COPIED = 16  # positions of all planes for each of the output, at most: widely dilated filters see many lines of which few are used


@dataclass(frozen=True)
class Way:
    """Products of `rows` x `vectors` tiles; `tiled`: in tile registers."""

    tile: Tile
    tiled: bool


def filled(size: int, multiple: int) -> float:
    return size / round_up(size, multiple)


def best(ways: list[tuple[float, Way]], plain: float) -> Way | None:
    """The way of most worth; None: fp32's is more."""
    worth, way = max(ways, key=lambda pair: pair[0], default=(0.0, None))
    return way if worth > plain else None


def possible(isa: ISA, dtype: str, grid: Grid) -> bool:
    """Whether there are products of pairs for these images at all."""
    if dtype != "bf16" or not isa.dot or not grid.taps or grid.outputs[1] > LONGEST:
        return False
    planes = Planes(grid, grid.outputs[0], 1)
    return len(planes.remainders()) * planes.size <= COPIED * planes.positions


def forward_way(isa: ISA, dtype: str, grid: Grid, columns: int) -> Way | None:
    """Of a product with `columns` output channels of a group (conv_pairs.py)."""
    if not possible(isa, dtype, grid):
        return None
    (P, Q), pitch = grid.outputs, Planes(grid, grid.outputs[0], 1).pitch

    def worth(tile: Tile, together: int, channels: int, speed: float, tiled: bool) -> tuple[float, Way]:
        of_positions = P * Q / round_up(P * pitch, together)
        fill = of_positions * filled(grid.channels, channels) * filled(columns, tile.nr(isa))
        return speed * fill, Way(tile, tiled)

    ways = [worth(tile, tile.mr, 2, DOTS, False) for tile in vector_tiles(isa)]
    if isa.tiles:
        ways.append(worth(Tile(4 * amx.SIDE, 1), amx.SIDE, amx.TILE_K, TILES, True))
    return best(ways, filled(columns, 8))


def gradient_way(isa: ISA, dtype: str, grid: Grid, rows: int) -> Way | None:
    """Of a gradient of filters with `rows` output channels of a group (conv_pairs_gradient.py)."""
    if not possible(isa, dtype, grid):
        return None
    (P, Q), pitch = grid.outputs, Planes(grid, grid.outputs[0], 1).pitch

    def worth(tile: Tile, together: int, speed: float, tiled: bool) -> tuple[float, Way]:
        of_positions = P * Q / round_up(P * pitch, together)
        return speed * of_positions * filled(rows, tile.mr) * filled(grid.channels, tile.nr(isa)), Way(tile, tiled)

    ways = [worth(tile, 2, DOTS, False) for tile in vector_tiles(isa)]
    if isa.tiles:
        ways.append(worth(Tile(amx.MR, amx.NR // isa.lanes), amx.TILE_K, TILES, True))
    return best(ways, 1.0)
