"""Attention by layout on every instruction set against the float64 reference with a dense mask."""

from __future__ import annotations

import pytest

from tests.cpu.check import ISAS, check_op, isa_named
from tests.layout_cases import BACKWARD, FORWARD, backward_case, forward_case, made, static

each_isa = pytest.mark.parametrize("isa", [isa_named(name) for name in ISAS], ids=ISAS)
each_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16"])

# (batch, length, heads, head size), the layout's length, block, text; heads of keys
CAUSAL = [
    ((2, 67, 2, 5), 67, 16, "local:21", 2),  # partial masks at both ends of a window, a last block of 3
    ((1, 150, 3, 24), 193, 32, "strided:7+local:3, banded:2", 1),  # shorter than planned; many masks; heads differ
    ((1, 131, 2, 64), 131, 48, "fixed:20:3, watts-strogatz:2:0.5:1", 1),
    ((1, 300, 2, 16), 300, 128, "all, barabasi-albert:1:4", 2),
    ((3, 1, 1, 7), 1, 16, "local:1", 1),
]
WHOLE = [((2, 83, 2, 20), 16, "local:9+spread:1:2, all", 2), ((1, 40, 2, 33), 64, "strided:3", 1)]
each_causal = pytest.mark.parametrize("shape, length, block, text, groups", CAUSAL, ids=str)
each_whole = pytest.mark.parametrize("shape, block, text, groups", WHOLE, ids=str)


@each_isa
@each_causal
@each_dtype
def test_causal_layouts(isa, shape, length, block, text, groups, dtype):
    """1 thread takes one pass, 5 threads take two: `check_op` compares the bits."""
    planned, layout = (made(text, shape, length=n, block=block) for n in (length, shape[1]))
    check_op(FORWARD, isa, **forward_case(shape, dtype, planned, groups=groups, packed=False))
    check_op(BACKWARD, isa, **backward_case(shape, dtype, layout, groups=groups))


@each_isa
@each_whole
@each_dtype
def test_layouts_that_look_ahead(isa, shape, block, text, groups, dtype):
    """Gradients are added to what is there."""
    layout, of = made(text, shape, block=block, causal=False), {"groups": groups, "packed": False}
    check_op(FORWARD, isa, **static(forward_case(shape, dtype, layout, **of)))
    modes = dict.fromkeys(("dq", "dk", "dv"), "add")
    check_op(BACKWARD, isa, **static(backward_case(shape, dtype, layout, **of)), modes=modes)
