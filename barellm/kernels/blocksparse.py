"""Block-sparse matmul on arrays."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from barellm.errors import WrongType
from barellm.kernels.call import call
from barellm.kernels.function_spec import FunctionSpec

if TYPE_CHECKING:
    from barellm.kernels.arrays import Array
    from barellm.program.block_layouts import BlockLayout
    from barellm.program.builder import Program
    from barellm.program.tensor import Tensor


def _blocksparse(p: Program, x: Tensor, blocks: Tensor, *, layout: BlockLayout, **tables: Any) -> Tensor:
    from barellm.program.ops import BlockMatmul

    if x.dtype != blocks.dtype:
        found = f"{x.dtype} and {blocks.dtype} were given"
        raise WrongType(f"blocksparse_matmul expects x and blocks of one dtype, {found}")
    return p.apply(BlockMatmul, x=x, weight=blocks, layout=layout, **tables).y


@cache
def _rule(columns: int) -> FunctionSpec:
    """The rule of a result with so many columns, which the layout says and no argument shows."""
    tables = {"columns": "L", "rows": "M", "places": "P"}
    shapes = {"x": "... C", "blocks": "(N b) b"} | tables
    return FunctionSpec("blocksparse_matmul", shapes, (f"... {columns}",), _blocksparse, dict.fromkeys(tables, ("i32",)))


def blocksparse_matmul(x: Array, blocks: Array, layout: BlockLayout, *, out: Array | None = None) -> Array:
    """Block-sparse matmul x W: only some blocks of W exist (Gray, Radford and Kingma 2017). Accumulated in fp32.

    Shapes: x (..., C), blocks (N, b, b) in the layout's order -> (..., K). The layout is (C / b, K / b) blocks, N of them there.
    Formula: y = x W, where W has blocks[n] at the n-th of `layout.places`, and zeros elsewhere, which are not computed.
    Dtypes: float32 or bfloat16, the same for x and blocks.
    Source: `barellm/cpu/kernels/gemm/block_matmul.py`, `block_gradient.py`.

        layout = block_layouts.block_layout(there, 32)  # barellm.program.block_layouts; there: (C / 32, K / 32) bool
        y, vjp_fn = kernels.vjp(kernels.blocksparse_matmul, x, blocks, layout)
        dx, dblocks = vjp_fn(dy)"""
    from barellm.program.block_layouts import BlockLayout

    if not isinstance(layout, BlockLayout):
        raise WrongType(f"blocksparse_matmul expects a BlockLayout, layout is of type {type(layout).__name__}")
    columns = layout.shape[1] * layout.block
    return call(_rule(columns), {"x": x, "blocks": blocks, **layout.tables}, out, layout=layout)[0]
