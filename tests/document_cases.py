"""Cases of the ops in program/ops/documents.py, for the kernel tests of both backends."""

from __future__ import annotations

import numpy as np

from barellm.program import ops
from tests.check import Given, tokens


def bigram_case(shape: tuple[int, int], buckets: int, reserved: bool) -> dict:
    """Tokens of every size: products beyond 32 bits too."""
    r = np.random.default_rng(buckets)
    x = np.where(r.random(shape) < 0.5, r.integers(0, 50304, shape), r.integers(0, 2**31, shape))
    return {"op_type": ops.BigramIds, "given": {"tokens": tokens(x, "i32")}, "buckets": buckets, "reserved": reserved}


def boundary_case(shape: tuple[int, int]) -> dict:
    """Rows with many separators, with one at each end, with none, and with nothing else."""
    r = np.random.default_rng(shape[1])
    x = r.integers(0, 4, shape)
    x[0, [0, -1]] = 2
    x[1:2] = 1
    x[2:3] = 2
    return {"op_type": ops.CuSeqlens, "given": {"tokens": tokens(x, "i32")}, "separator": 2, "plan": (5, shape[1] + 3)}


def document_case(seqlens: list[list[int]], T: int) -> dict:
    """`seqlens`: where the documents of each row begin, padded with T."""
    given = {"tokens": tokens(np.zeros((len(seqlens), T)), "i32"), "cu_seqlens": Given(np.array(seqlens), "i32", "sequences")}
    plan = len(seqlens) + 1, T + 2
    return {"op_type": ops.DocumentStarts, "given": given, "plan": plan}
