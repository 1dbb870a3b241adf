from __future__ import annotations

import numpy as np
import pytest

from barellm.cpu.kernels import loops
from barellm.cpu.kernels.pointwise import transpose
from barellm.cpu.step import CpuSession
from barellm.program import ops
from barellm.program.builder import Program, Store
from tests.cases import normal
from tests.cpu.check import EPS, ISAS, changed, check_op, isa_named, persistent

each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)
# One row, one column, whole squares, some and a bit more.
SHAPES = [(1, 7), (33, 1), (64, 32), (131, 97)]
FORMATS = ["fp32", "bf16", "fp16", "bf16_i16", "fp16_fp32", "bf16_u16", "e6m9", "ue6m10"]


@each_isa
@pytest.mark.parametrize("dtype", FORMATS)
def test_a_copy_keeps_every_bit(isa, dtype):
    for shape in SHAPES:
        check_op(ops.Transpose, isa, {"x": persistent(normal(*shape), dtype)}, modes={"y": "store"}, bounds={"y": 0.0})


@each_isa
@pytest.mark.parametrize("dtype", FORMATS[:6])
@pytest.mark.extended
def test_a_sum_is_added_to_what_is_there(isa, dtype):
    for shape in ((13, 31), (67, 97)):
        given = {"x": persistent(normal(*shape), dtype)}
        check_op(ops.Transpose, isa, given, modes={"y": "add"}, bounds={"y": 2 * EPS * 12})


@each_isa
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "bf16_i16"])
def test_several_tiles_and_results_past_the_caches(isa, dtype, monkeypatch):
    changed(monkeypatch, loops, STREAM_BYTES=0)
    changed(monkeypatch, transpose, STRIPS=1, WIDTH=128)
    for shape in ((64, 131), (33, 64)):
        check_op(ops.Transpose, isa, {"x": persistent(normal(*shape), dtype)}, modes={"y": "store"}, bounds={"y": 0.0})


def test_codes_have_no_sum():
    p = Program(Store())
    a, b = p.state("a", (2, 3), "e6m9"), p.state("b", (3, 2), "e6m9")
    with pytest.raises(ValueError, match=r"^transpose_add expects numbers, not codes: source \(2, 3\) e6m9, target"):
        p.transpose_add(a, b)


@pytest.mark.parametrize("target", [("b", (2, 3), "fp32"), ("b", (3, 2), "bf16"), ("a", (3, 3), "fp32")], ids=str)
def test_what_is_no_transpose_is_refused(target):
    """Another shape, another dtype, and the matrix itself."""
    p = Program(Store())
    source = p.state("a", (2, 3) if target[0] == "b" else (3, 3))
    with pytest.raises(ValueError, match=r"^transpose_copy expects two matrices, \(R, C\) and \(C, R\), of one dtype: "):
        p.transpose_copy(source, p.state(*target))


def test_head_and_embedding_tie_and_untie():
    """What an optimizer does with a pair: gradients meet in one, its weights go to the other, gradients begin at zero."""
    p = Program(Store(), compute="bf16")
    embed, head = p.parameter("embed", (37, 20)), p.parameter("head", (20, 37))
    p.transpose_add(p.gradient_of(embed), p.gradient_of(head))
    p.transpose_copy(head, embed)
    p.fill(p.gradient_of(embed), 0.0)
    session = CpuSession({"optimizer_step": p})
    weights, of_embed, of_head = normal(20, 37), normal(37, 20, seed=2), normal(20, 37, seed=3)
    for name, values in (("head", weights), ("embed.grad", of_embed), ("head.grad", of_head)):
        session.write(name, values)
    session.run("optimizer_step")
    assert (session.read("embed") == session.read("head").T).all()
    np.testing.assert_allclose(session.read("head.grad"), of_head + of_embed.T, rtol=1e-5, atol=1e-6)
    assert (session.read("embed.grad") == 0).all()
    session.close()
