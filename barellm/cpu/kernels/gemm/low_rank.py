"""Lowering of low-rank adapters (`program.ops.gemm.low_rank`): a GEMM that adds for each block of columns."""

from barellm.cpu.kernel import Lowering, Op, lowering
from barellm.cpu.kernels.gemm import linear
from barellm.program.dtypes import PLANES
from barellm.program.ops.gemm.low_rank import MOST_BLOCKS


@lowering("low_rank_update", adds="y", also={f"b{i}": PLANES for i in range(MOST_BLOCKS)}, views="y u")
def low_rank_update(op: Op, c: Lowering) -> None:
    """y[:, columns of a block] += u[:, columns of a block] @ B^T."""
    for y, u, b in op.blocks(op.outputs["y"], op.u):
        linear.append_gemm(c, out=y, a=u, weight=b, like=op.u, transposed=True, mode="add")
