"""Rung 13, Hilbert order: the tiles are done along a Hilbert curve, a line that fills a square and never jumps. The 132 tiles
that are under way at a time then form a patch about as wide as high, whatever the shape of the matrix, and the next 132 begin
beside it. So the operands of neighbours are still in L2. The order is a table that the host makes once; the
kernel is that of rung 12.
"""

from __future__ import annotations

import numpy as np

from anatomy.gpu.r12_tma_stores import launch_tma
from anatomy.gpu_rung import gpu_rung
from barellm.program.integers import ceil_div


def point(distance, side):
    """(row, column) of a step of the Hilbert curve through a square of `side`, a power of two."""
    row = column = 0
    size = 1
    while size < side:
        lower = distance // 2 & 1
        right = (distance ^ lower) & 1
        if not right:
            if lower:
                row, column = size - 1 - row, size - 1 - column
            row, column = column, row
        row, column = row + size * lower, column + size * right
        distance, size = distance // 4, size * 2
    return row, column


def hilbert(rows, columns):
    """Numbers of tiles, row by row, in the order of the smallest curve that covers them; what lies outside is left out."""
    side = 1 << (max(rows, columns) - 1).bit_length()
    points = (point(i, side) for i in range(side * side))
    return np.array([r * columns + c for r, c in points if r < rows and c < columns], np.int32)


@gpu_rung("Hilbert order", dtype="bf16")
def launch(p):
    launch_tma(p, p.table(hilbert(ceil_div(p.M, 128), ceil_div(p.N, 256))))
