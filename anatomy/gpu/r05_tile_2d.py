"""Rung 5, 2-D tile: each thread has 8 x 8 sums. A step loads eight numbers of A and eight of B for 64 multiply-adds, a quarter
of a load for each. This is the register tile of the CPU's rung 5, for the same reason. A block's tile is 128 x 128, so each
number from memory is used 128 times.
"""

from __future__ import annotations

from anatomy.gpu.r03_shared import launch_tiled
from anatomy.gpu_rung import gpu_rung


@gpu_rung("2-D tile", dtype="fp32")
def launch(p):
    launch_tiled(p, (128, 128, 8), each=(8, 8), lanes=(2, 16), warps=(8, 1))
