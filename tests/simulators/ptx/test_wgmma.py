"""Triton's kernels as they are compiled for sm_90a, with the tiles that are shipped: cp.async into shared memory, wgmma from there
and from registers."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from barellm.cuda.compile import compiled
from barellm.cuda.kernel import Target
from barellm.cuda.step import lower_and_plan
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.tensor import Dim
from barellm.tools.inspect import device_code
from tests.cases import attention_both, backward_case, forward_case
from tests.cuda import check
from tests.cuda.check import EPS, check_op, persistent, tokens
from tests.cuda.sass import overwritten
from tests.simulators.ptx import launch
from tests.simulators.ptx.test_hopper_products import nth

pytestmark = pytest.mark.extended

TRITON = Target(arch=90, plain_attention=True)


@pytest.fixture(autouse=True)
def compiled_code(monkeypatch):
    monkeypatch.setattr(check, "DEVICE", "ptx-sm_90")


@pytest.mark.parametrize("shape", [(1, 200, 1, 64), pytest.param((1, 130, 1, 128), marks=pytest.mark.slow)], ids=str)
@pytest.mark.extended
def test_attention(shape):
    check_op(ops.Attention, **forward_case(shape, "bf16"), target=TRITON)
    check_op(ops.AttentionBackward, **backward_case(shape, "bf16"), target=TRITON)


def test_products_too_small_for_hopper():
    """Rows of an odd number of bytes: Triton's kernel does these, on any architecture."""

    def random_normal(*shape: int, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).standard_normal(shape)

    x, dy = tokens(random_normal(1, 70, 203, seed=1), "bf16"), tokens(random_normal(1, 70, 73, seed=2), "bf16")
    weight = persistent(random_normal(73, 203, seed=3), "bf16_i16")
    check_op(ops.Matmul, {"x": x, "weight": weight}, bounds={"y": 8 * EPS * 203})
    check_op(ops.MatmulDx, {"dy": dy, "weight": weight}, bounds={"dx": 8 * EPS * 203})
    check_op(ops.MatmulDw, {"dy": dy, "x": x}, bounds={"dweight": 8 * EPS * 203}, target=Target(arch=90))


FENCED = r"(cp\.async\.wait_group[ \t]+\d+;)\s*fence\.proxy\.async\.shared::cta;"
MUTANTS = {
    "what Triton 3.6 leaves out": (lambda ptx: re.sub(FENCED, r"\1", ptx), "without a fence"),
    "copies are not awaited": (nth(r"cp\.async\.wait_group[^;]*;", ""), "still arriving"),
    "more groups under way": (nth(r"(cp\.async\.wait_group[ \t]+)[1-9]\d*;", r"\g<1>9;"), "still arriving"),
    "copies of other warps are not awaited": (nth(FENCED + r"\s*bar\.sync[^;]*;", r"\1"), "fence|barrier|arriving"),
    "sums are read too early": (nth(r"wgmma\.wait_group\.sync\.aligned[ \t]+0;", ""), ""),
}


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.extended
def test_a_mutant_fails(name, monkeypatch):
    mutate, message = MUTANTS[name]
    code_of = launch.code_of

    def mutated(spec, arch):
        code = code_of(spec, arch)
        return replace(code, cubin=mutate(code.cubin.decode()).encode())

    monkeypatch.setattr(launch, "code_of", mutated)
    with pytest.raises(AssertionError, match=message or None):
        check_op(ops.Attention, **forward_case((1, 300, 1, 64), "bf16"), target=TRITON)


LOOP = """
.L_x_1:
        /*0010*/                   F2FP.BF16.F32.PACK_AB R34, R92, R95 ;
        /*0020*/                   WARPGROUP.ARRIVE ;
        /*0030*/                   HGMMA.64x32x16.F32.BF16 R40, R32, gdesc[UR36].tnspB, R40, gsb0 ;
        /*0040*/                   LDS.128 R28, [R5] ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0060*/                   IMAD.WIDE R32, R5, 0x4, R6 ;
        /*0070*/              @P0  BRA `(.L_x_1) ;
"""


def test_registers_of_a_product_under_way_are_seen():
    assert overwritten(LOOP) == []
    assert overwritten(LOOP.replace("LDS.128 R28", "LDS.128 R29")) == ["0040: LDS.128 R29, [R5]"]
    waits = "/*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"
    around = overwritten(LOOP.replace(waits, "/*0050*/                   NOP ;"))
    assert [line[:4] for line in around] == ["0060", "0010", "0060"]


@pytest.mark.slow
@pytest.mark.parametrize("columns", [32, 64])
def test_attention_keeps_the_registers_that_products_read(columns):
    p, dims = Program(Store(), compute="bf16"), (Dim("batch", 1), Dim("seq", 3))
    attention_both(p, dims, heads=1, D=columns, rate=0.1)
    needed = lower_and_plan({"both": p}, Target(90)).specs
    texts = [device_code.disassembled(code.cubin) for code in compiled(needed, 90, processes=1).values()]
    assert sum(bool(re.search(r"HGMMA\S* R\d+, R\d+", text)) for text in texts) == 3
    assert not [line for text in texts for line in overwritten(text)]
