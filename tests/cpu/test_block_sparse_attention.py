"""Block-sparse attention on every instruction set against the float64 reference with a dense mask."""

from __future__ import annotations

from dataclasses import replace

import pytest

from barellm.cpu.kernel import KernelBuilder
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
@pytest.mark.extended
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


# As above, with the number of distances that have a relative term.
RELATIVE = [
    ((2, 67, 2, 5), 67, 16, "local:21", 2, 9),  # fewer than a block's
    ((1, 150, 3, 24), 193, 32, "strided:7+local:3, banded:2", 1, 50),  # blocks that are not near between such that are
    ((1, 131, 2, 64), 131, 48, "fixed:20:3, watts-strogatz:2:0.5:1", 1, 131),
    ((2, 140, 2, 16), 140, 128, "all, local:90", 2, 1),
]


@each_isa
@pytest.mark.parametrize("shape, length, block, text, groups, distances", RELATIVE, ids=str)
@each_dtype
@pytest.mark.extended
def test_relative_terms(isa, shape, length, block, text, groups, distances, dtype):
    planned, layout = (made(text, shape, length=n, block=block) for n in (length, shape[1]))
    of = {"groups": groups, "distances": distances}
    check_op(FORWARD, isa, **forward_case(shape, dtype, planned, **of))
    check_op(BACKWARD, isa, **backward_case(shape, dtype, layout, packed=False, **of), modes={"drelative": "start"})


@each_isa
@each_dtype
def test_relative_terms_of_a_layout_that_looks_ahead(isa, dtype):
    shape, of = (2, 83, 2, 20), {"packed": False, "distances": 37}
    layout = made("local:9+spread:1:2, all", shape, block=16, causal=False)
    check_op(FORWARD, isa, **static(forward_case(shape, dtype, layout, **of)))
    modes = dict.fromkeys(("dq", "dk", "dv", "drelative"), "add")
    check_op(BACKWARD, isa, **static(backward_case(shape, dtype, layout, **of)), modes=modes)


def pairs_in_fp32(k, acc, a, b):
    """`k.dot` where no instruction does it: the lower and the upper halves of 32 bits are numbers of fp32."""
    for shift in (lambda x: x << 16, lambda x: x & -65536):
        acc = k.fma(k.bitcast(shift(a), k.vec), k.bitcast(shift(b), k.vec), acc)
    return acc


@pytest.mark.parametrize("lanes, dtype, block", [(16, "bf16", 48), (16, "fp32", 64), (4, "bf16", 64)])
@pytest.mark.extended
def test_relative_terms_in_registers_of_other_machines(lanes, dtype, block, monkeypatch):
    """Vectors of AVX-512 and of Neon, and products of pairs of bf16, as this machine's instructions have them. 48 is no multiple of
    two vectors of 16. `guarded` sees what is written behind the scratch."""
    monkeypatch.setattr(KernelBuilder, "dot", pairs_in_fp32)
    isa = replace(isa_named(ISAS[0]), lanes=lanes, registers=32, dot="emulated" if dtype == "bf16" else "")
    shape, of = (1, 150, 2, 10), {"groups": 1, "distances": 70}
    layout = made("local:90, strided:50+local:2", shape, block=block)
    check_op(FORWARD, isa, guarded=True, **forward_case(shape, dtype, layout, **of))
    check_op(BACKWARD, isa, guarded=True, **backward_case(shape, dtype, layout, **of))
