"""Rung 4, 1-D tile: each thread has eight sums of one column in registers. A number of B that it loads from shared memory is
used eight times, so a step costs nine loads for eight multiply-adds instead of sixteen. A block's tile grows to 64 x 64 with
half as many threads, and each number from memory is used 64 times.
"""

from __future__ import annotations

from anatomy.gpu.r03_shared import launch_tiled
from anatomy.gpu_rung import gpu_rung


@gpu_rung("1-D tile", dtype="fp32")
def launch(p):
    launch_tiled(p, (64, 64, 8), each=(8, 1), lanes=(1, 32), warps=(8, 2))
