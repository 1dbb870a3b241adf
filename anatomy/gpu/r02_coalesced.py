"""Rung 2, coalesced: neighbouring threads have neighbouring columns, and nothing else changes. A warp's load from B is now one
line of 128 bytes, used whole; its load from A is one number for all 32 threads; its results are one line of C. One word of
the code decides this: the shape in which the threads of a warp stand.
"""

from __future__ import annotations

from anatomy.gpu_rung import gpu_rung
from barellm.cuda.lang import gl, gluon
from barellm.program.integers import ceil_div


@gluon
def coalesced(c, a, b, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr):
    THREADS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [32, 1], [1, 0])  # a warp has 32 columns of one row
    row = gl.program_id(1) * 32 + gl.arange(0, 32, layout=gl.SliceLayout(1, THREADS))
    column = gl.program_id(0) * 32 + gl.arange(0, 32, layout=gl.SliceLayout(0, THREADS))
    total = gl.zeros([32, 32], gl.float32, THREADS)
    for k in range(K):
        x = gl.load(a + row * K + k, mask=row < M, other=0.0)
        y = gl.load(b + k * N + column, mask=column < N, other=0.0)
        total += gl.expand_dims(x, 1) * gl.expand_dims(y, 0)
    inside = gl.expand_dims(row < M, 1) & gl.expand_dims(column < N, 0)
    gl.store(c + gl.expand_dims(row, 1) * N + gl.expand_dims(column, 0), total, mask=inside)


@gpu_rung("coalesced", dtype="fp32")
def launch(p):
    p.launch(coalesced, {"c": p.c, "a": p.a, "b": p.b}, (ceil_div(p.N, 32), ceil_div(p.M, 32)), warps=32)
