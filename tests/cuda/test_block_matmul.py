"""Block-sparse products, interpreted, against float64."""

from __future__ import annotations

import pytest

from barellm.cuda.kernel import Launch, Sizes
from barellm.cuda.step import Lowered
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.tensor import Dim
from tests.block_cases import LAYOUTS, block_case
from tests.cuda.check import PLAIN, check_op

OPS = (ops.BlockMatmul, ops.BlockMatmulDx, ops.BlockMatmulDw)
KINDS = {"holes of 8": "fp32", "small world of 16": "bf16", "hubs of 32": "fp32"}
CASES = [(op_type, name, dtype) for op_type in OPS for name, dtype in KINDS.items()]
CASES += [(ops.BlockMatmul, "long columns of 16", "fp32"), (ops.BlockMatmulDx, "long rows of 16", "bf16")]


@pytest.mark.parametrize("op_type, name, dtype", CASES)
@pytest.mark.extended
def test_products(op_type, name, dtype):
    """Tokens that are no multiple of a tile, and one, whose product is added to what is there."""
    for batch, seq in ((2, 3 if "long" in name else 39), (1, 1)):
        mode = "store" if seq > 1 else "add"
        check_op(op_type, **block_case(op_type, LAYOUTS[name], dtype, batch=batch, seq=seq, mode=mode))


def test_gradients_have_as_much_scratch_as_the_most_parts_need():
    layout, most = LAYOUTS["one of 64"], 1 << 12
    p = Program(Store())
    x, dy = (p.input(name, (Dim("batch", 1), Dim("seq", most), 64), "fp32") for name in ("x", "dy"))
    places = p.constant("places", layout.tables["places"], "i32")
    into = {"dweight": (p.store.get("dweight", (64, 64), "fp32", "gradient"), "store")}
    op = p.apply(ops.BlockMatmulDw, into=into, dy=dy, x=x, places=places, layout=layout)
    lowered = Lowered(p, PLAIN).of[op]
    launch = lowered.launches[0]
    assert isinstance(launch, Launch)
    parts = max(launch.grid(Sizes(1, 1 << i))[1] for i in range(most.bit_length()))
    assert parts > 1 and [t.size for t in lowered.scratch_tensors] == [parts * 64 * 64]


def test_gradients_of_tokens_in_parts():
    """So many tokens that their sum is split."""
    check_op(ops.BlockMatmulDw, **block_case(ops.BlockMatmulDw, LAYOUTS["one of 64"], "fp32", batch=2, seq=601, mode="add"))
