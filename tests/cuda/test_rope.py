from __future__ import annotations

import numpy as np
import pytest

from barellm.cuda.kernels.attention import rope as kernels
from barellm.program import ops
from tests.cuda.check import EPS, check_op, persistent, tokens

each_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16"])
# (batch, length, heads that turn, columns of a head, columns behind them)
SHAPES = [(1, 1, 1, 2, 0), (2, 7, 3, 6, 5), (3, 5, 2, 64, 128), (1, 13, 5, 10, 1)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def case(shape, dtype, pos: int = 0) -> dict:
    """A position of its own for every angle: positions count from `pos`."""
    B, T, heads, D, behind = shape
    angle = np.random.default_rng(3).uniform(0, 6, (T + pos + 3, D // 2))
    x = np.random.default_rng(1).standard_normal((B, T, heads * D + behind))
    given = {"x": tokens(x, dtype), "cos": persistent(np.cos(angle)), "sin": persistent(np.sin(angle))}
    bounds = {"y": 4 * EPS * (1 + np.abs(x).max())}
    return {"given": given, "bounds": bounds, "scalars": {"pos": pos}, "heads": heads, "plan": (B + 1, T + 2)}


@each_shape
@each_dtype
@pytest.mark.parametrize("inverse", [False, True], ids=["", "inverse"])
def test_rope(shape, dtype, inverse):
    check_op(ops.Rope, **case(shape, dtype), inverse=inverse)


@each_dtype
@pytest.mark.parametrize("mode", ["store", "add"])
def test_a_gradient_turns_back_onto_what_is_there(dtype, mode):
    check_op(ops.Rope, **case((2, 5, 2, 8, 7), dtype), inverse=True, modes={"y": mode})


@pytest.mark.parametrize("pos", [1, 11])
def test_positions_of_a_cache(pos):
    check_op(ops.Rope, **case((2, 3, 2, 8, 16), "fp32", pos), inverse=False)


@pytest.mark.parametrize("behind", [0, 9, 16, 40])
def test_rows_wider_than_a_program(behind, monkeypatch):
    """Several blocks of planes, and of columns behind: none, begun, full."""
    monkeypatch.setattr(kernels, "WIDE", 16)
    check_op(ops.Rope, **case((2, 3, 3, 14, behind), "bf16"), inverse=False)
