"""Rung 7, warp tile: the sums of one warp form squares instead of a strip. Threads of a warp that need the same number get it in
one read of shared memory. A strip of 16 x 128 needs 144 numbers in a step; here the warp has 16 x 32 sums in each of four
quarters of the tile, 2 x 2 of them, and needs 96. A thread's 8 x 8 sums are four pieces of 4 x 4, so that the threads of a
warp read neighbouring vectors: with eight numbers each in a row, they would meet in the same banks.
"""

from __future__ import annotations

from anatomy.gpu.r03_shared import launch_tiled
from anatomy.gpu_rung import gpu_rung


@gpu_rung("warp tile", dtype="fp32")
def launch(p):
    launch_tiled(p, (128, 128, 8), each=(4, 4), lanes=(4, 8), warps=(4, 2), vector=4, columns_of_a=True)
