"""Rung 9, larger tile: a block has 128 x 128 sums instead of 64 x 64, and loads half as many bytes for each operation. A tile of
R x C does R C / (R + C) operations for each byte of its bf16 operands: 32 before, 64 now. It also waits half as often for
memory, because each filling of the buffer holds four times the work. The sums take 128 registers of each thread.
"""

from __future__ import annotations

from anatomy.gpu.r08_wgmma import launch_wgmma
from anatomy.gpu_rung import gpu_rung


@gpu_rung("larger tile", dtype="bf16")
def launch(p):
    launch_wgmma(p, 128, 128, 64)
