"""Rung 6, vector loads: one instruction moves four neighbouring numbers, 128 bits for each thread. A thread loads its part of
the two tiles with two instructions instead of eight. The tile of A is stored by columns, so that the eight numbers that a
thread needs of a column lie side by side, as those of B do. (On rung 5 the compiler found wide reads of A too, along the
depth: it reads all eight steps at once, which costs a few registers more.)
"""

from __future__ import annotations

from anatomy.gpu.r03_shared import launch_tiled
from anatomy.gpu_rung import gpu_rung


@gpu_rung("vector loads", dtype="fp32")
def launch(p):
    launch_tiled(p, (128, 128, 8), each=(8, 8), lanes=(2, 16), warps=(8, 1), vector=4, columns_of_a=True)
