"""Rung 15, shipped: the kernel that barellm trains with on Hopper, called as it is. It has rung 12's structure and adds what
training needs: operands stored along either dimension, weight gradients in parts, bias, GELU and residual in the way out,
which goes in blocks of 8 KiB so that the ring has four buffers. The lower half of a tile starts one product after the upper,
so that one of them multiplies while the other stores. It has no clusters: rung 14 must first show on a GPU what they gain.
Read on in barellm/cuda/kernels/gemm/hopper.py.
"""

from __future__ import annotations

from anatomy.gpu_rung import gpu_rung
from barellm.cuda.kernels.gemm.hopper import launch_hopper_gemm


@gpu_rung("shipped", dtype="bf16")
def launch(p):
    launch_hopper_gemm(p.lowering, "nn", out=p.c, a=p.a, b=p.b, rows=p.M, most=p.M, N=p.K, K=p.N)
