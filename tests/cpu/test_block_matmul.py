"""Block-sparse products on every instruction set against the float64 reference with a whole matrix."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.cpu import jit
from barellm.cpu.isa import cross
from barellm.cpu.step import Lowered
from barellm.program import ops
from barellm.program.block_layouts import block_layout
from barellm.program.builder import Program, Store
from barellm.program.tensor import Dim
from barellm.tools.inspect import machine_code
from barellm.tools.inspect.kernels import X86_TRIPLE
from tests.block_cases import LAYOUTS, block_case
from tests.cpu.check import ISAS, check_op, isa_named

each_isa = pytest.mark.parametrize("isa", [isa_named(name) for name in ISAS], ids=ISAS)
OPS = (ops.BlockMatmul, ops.BlockMatmulDx, ops.BlockMatmulDw)
KINDS = {"holes of 8": "fp32", "small world of 16": "bf16", "hubs of 32": "bf16", "one of 64": "fp32"}
CASES = [(op_type, name, dtype) for op_type in OPS for name, dtype in KINDS.items()]
CASES += [(ops.BlockMatmul, "long columns of 16", "fp32"), (ops.BlockMatmulDx, "long rows of 16", "bf16")]


@each_isa
@pytest.mark.parametrize("op_type, name, dtype", CASES)
@pytest.mark.extended
def test_products(isa, op_type, name, dtype):
    """Tokens that are no multiple of a tile, and one, whose product is added to what is there."""
    for batch, seq in ((2, 71), (1, 1)):
        mode = "store" if seq > 1 else "add"
        check_op(op_type, isa, **block_case(op_type, LAYOUTS[name], dtype, batch=batch, seq=seq, mode=mode))


@each_isa
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gradients_of_more_tokens_than_a_chunk(isa, dtype):
    """The run ends in the second of three planned chunks, and it begins with what an earlier micro-batch left."""
    case = block_case(ops.BlockMatmulDw, LAYOUTS["holes of 8"], dtype, batch=3, seq=201, mode="start")
    check_op(ops.BlockMatmulDw, isa, **case | {"plan": (6, 204), "scalars": {"accumulate": 1}})


@pytest.mark.parametrize("block, dtype, widest", [(8, "fp32", "ymm"), (8, "bf16", "ymm"), (16, "fp32", "zmm")])
def test_vectors_of_avx_512_are_no_wider_than_a_block(block, dtype, widest):
    """Compiled and not run: a unit of the depth is a multiply-add for each of 24 tokens, and none is half empty."""
    isa, layout = cross("avx512_bf16", X86_TRIPLE), block_layout(np.ones((4, 4), bool), block)
    p = Program(Store(), compute=dtype)
    x = p.input("x", (Dim("batch", 1), Dim("seq", 96), 4 * block), dtype)
    tables = {name: p.constant(name, values, "i32") for name, values in layout.tables.items()}
    p.apply(ops.BlockMatmul, x=x, weight=p.parameter("weight", (16 * block, block)), **tables, layout=layout)
    code = [machine_code.read(jit.assembly(c.spec.ir(isa), isa)) for c in Lowered(p, isa, 1).calls]
    inner = max((loop for c in code for loop in c.loops), key=lambda loop: loop.products)
    assert inner.widest == widest and not inner.vector_spills, inner
    assert inner.products == 24 * (block if dtype == "fp32" else block // 2), inner
