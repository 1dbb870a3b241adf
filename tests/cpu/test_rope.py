from __future__ import annotations

import numpy as np
import pytest

from barellm.cpu.kernels import loops
from barellm.cpu.kernels.attention import rope
from barellm.program import ops
from barellm.program.ops.attention.rope import frequencies
from tests.cases import normal
from tests.cpu.check import EPS, ISAS, changed, check_op, isa_named, persistent, tokens

# (batch, length, heads that turn, head size, columns that pass)
SHAPES = [(1, 1, 1, 2, 0), (2, 7, 3, 10, 5), (2, 5, 2, 64, 64), (1, 37, 3, 128, 0), (1, 3, 1, 144, 33), (1, 2, 2, 640, 7)]
each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)
each_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16"])


def check(isa, shape, dtype, *, inverse=False, pos=0, mode="store", view=False, positions=None):
    B, T, heads, D, rest = shape
    W = heads * D + rest
    x = normal(B, T, W + 3 if view else W)
    angle = np.arange(pos + T + 4)[:, None] * frequencies(D, theta=500.0)
    tables = {"cos": persistent(np.cos(angle), role="constant"), "sin": persistent(np.sin(angle), role="constant")}
    given = {"whole" if view else "x": tokens(x, dtype), **tables}
    given |= {} if positions is None else {"positions": tokens(positions, "i32")}
    views = {"x": ("whole", 3, W)} if view else {}
    modes = {"y": mode} if mode != "store" else {}
    scalars, attrs = {"pos": pos}, {"heads": heads, "inverse": inverse}
    bounds = {"y": 4 * EPS * np.abs(x).max() + (2 * EPS * 6 if mode == "add" else 0)}
    check_op(ops.Rope, isa, given, views=views, modes=modes, scalars=scalars, bounds=bounds, plan=(B + 1, T + 2), **attrs)


@each_isa
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_dtype
def test_rope(isa, shape, dtype):
    check(isa, shape, dtype)


@each_isa
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2], SHAPES[4]], ids=str)
@each_dtype
def test_turning_back_is_added_to_what_is_there(isa, shape, dtype):
    check(isa, shape, dtype, inverse=True, mode="add")


@each_isa
@each_dtype
@pytest.mark.parametrize("pos, T", [(0, 3), (11, 1), (5, 4)])
def test_positions_of_a_view_begin_at_pos(isa, dtype, pos, T):
    check(isa, (2, T, 3, 8, 2), dtype, pos=pos, view=True)
    check(isa, (2, T, 1, 64, 64), dtype, pos=pos, inverse=True)


@each_isa
@each_dtype
@pytest.mark.parametrize("inverse", [False, True])
def test_each_token_turns_by_its_own_position(isa, dtype, inverse):
    for shape in (SHAPES[1], (2, 4, 1, 64, 64), SHAPES[4]):
        B, T = shape[:2]
        check(isa, shape, dtype, inverse=inverse, positions=np.random.default_rng(3).integers(0, T + 4, (B, T), dtype=np.int32))


@each_isa
@each_dtype
@pytest.mark.parametrize("shape", [(2, 3, 2, 64, 64), (2, 3, 2, 64, 7), (1, 5, 2, 24, 16)], ids=str)
def test_results_written_past_the_caches(isa, dtype, shape, monkeypatch):
    """With the limit at zero; where rows are no whole lines they cannot go there."""
    for module in (rope, loops):
        changed(monkeypatch, module, STREAM_BYTES=0)
    check(isa, shape, dtype)
