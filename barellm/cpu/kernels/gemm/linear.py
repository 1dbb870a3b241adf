"""Lowering of linear layers to GEMM calls, fprop, dgrad and wgrad, with fused epilogues."""

from typing import Any

from barellm.cpu.gemm_config import SKINNY_KIND
from barellm.cpu.kernel import PLANES, Lowering, Op, Tensor, lowering, view_stride, weight_operand
from barellm.cpu.kernels.gemm import gemm, weight_gradient
from barellm.cpu.kernels.gemm.skinny_gemm import FEW, ScratchLayout, skinny_gemm
from barellm.cpu.kernels.loops import shape_of
from barellm.cpu.kernels.loss.cross_entropy import ALL_ROWS
from barellm.cpu.tuning import select_config, select_skinny_config
from barellm.program.ops.gemm.low_rank import MOST_BLOCKS

CHEAP = ("bias", "rescale")  # epilogues that no config depends on


def gemm_kind(transposed: bool, epilogues: tuple[str, ...]) -> str:
    """The GEMM kind in the tuning database: fprop or dgrad, and its epilogues other than bias and factor."""
    return "_".join(["forward" if transposed else "input_gradient", *(name for name in epilogues if name not in CHEAP)])


def skinny_kind(epilogues: tuple[str, ...]) -> str:
    """The kind of a skinny GEMM."""
    return gemm_kind(True, epilogues).replace("forward", SKINNY_KIND)


def tokens_of(like: Tensor, rows: tuple[int, int]) -> int:
    """Rows of the activation `like` that a call does where a run is as large as planned; of chunks, a whole one."""
    return min(like.size // int(like.shape[-1]), rows[1])


def views_of(**operands) -> dict[str, Any]:
    """The constant `strides` of a GEMM with operands that are columns of wider tensors; without any there is none."""
    strides = tuple((name, stride) for name, t in operands.items() if (stride := view_stride(t)))
    return {"strides": strides} if strides else {}


def append_gemm(c: Lowering, *, out, a, weight: Tensor, like: Tensor, transposed: bool, epilogues: tuple[str, ...] = (),
        second=None, bias=None, other=None, mode: str = "store", rows: tuple[int, int] = (0, ALL_ROWS),
        factor: float | None = None) -> None:  # fmt: skip
    """Append the GEMM call(s) of out (rows, cols) = a (rows, depth) @ weight with `epilogues` (epilogue.py has them, and `second`,
    `bias`, `other`, `factor`). An operand is a Tensor or (Region, dtype). weight (N, K) is read `transposed` (fprop: cols = N) or
    not (dgrad: cols = K). `like`: the activation whose run-time sizes count the rows; `rows`: (first, count) of them that this call
    does. A program that may have few rows gets two calls, of a skinny and a usual GEMM, of which a run does one."""
    N, K = (int(n) for n in weight.shape)
    cols, depth = (N, K) if transposed else (K, N)
    a_dtype = a[1] if isinstance(a, tuple) else a.dtype
    kind = gemm_kind(transposed, epilogues)
    operands = {"out": out, "second": second, "a": a, "weight": weight_operand(weight), "bias": bias, "other": other}
    constants = {"cols": cols, "depth": depth, "epilogues": epilogues, "mode": mode, **shape_of(like), **views_of(out=out,
        second=second, a=a, other=other), **({} if factor is None else {"factor": factor})}  # fmt: skip
    max_rows = tokens_of(like, rows)
    if c.skinny_gemm and transposed and rows == (0, ALL_ROWS):
        c.thread_scratch(ScratchLayout(c.isa, depth).nbytes)
        skinny_config = select_skinny_config(c, skinny_kind(epilogues), a_dtype, cols, depth)
        c.call(skinny_gemm, operands, constants | {"config": skinny_config}, writes="out second")
        if max_rows <= FEW:
            return
        constants |= {"least": FEW + 1}  # the usual GEMM leaves runs with fewer rows to the skinny one
    config = select_config(c, kind, a_dtype, cols, depth, max_rows)
    c.thread_scratch(gemm.gemm_scratch_bytes(c.isa, a_dtype, depth, config))
    operands |= {"row_begin": rows[0], "row_limit": rows[1]}
    constants |= {"transposed": transposed, "config": config}
    c.call(gemm.gemm, operands, constants, writes="out second")


def append_weight_gradient(c: Lowering, dweight: Tensor, dy, x, like: Tensor, mode: str, rows=(0, ALL_ROWS),
        squares: Tensor | None = None) -> None:  # fmt: skip
    """Append the wgrad call dweight (N, K) = dy (tokens, N).T @ x (tokens, K). `like` and `rows` as in `append_gemm`. `squares`
    gets the sums of squares of the blocks of what is stored; a later call overwrites those of an earlier one."""
    N, K = (int(n) for n in dweight.shape)
    dtype = dy[1] if isinstance(dy, tuple) else dy.dtype
    config = select_config(c, "weight_gradient", dtype, K, tokens_of(like, rows), N)
    c.thread_scratch(weight_gradient.wgrad_scratch_bytes(c.isa, dtype, tokens_of(like, rows), config))
    operands = {"dweight": dweight, "dy": dy, "x": x, "row_begin": rows[0], "row_limit": rows[1], "squares": squares}
    constants = {"N": N, "K": K, "mode": mode, "config": config, **shape_of(like), **views_of(dy=dy, x=x)}
    c.call(weight_gradient.weight_gradient, operands, constants, writes="dweight squares")


@lowering("product", adds="y dx", also={"weight": PLANES}, views="x y pre residual dy dx")
@lowering("matmul_dx", adds="dx", also={"weight": PLANES}, views="dy dx")
@lowering("matmul", adds="y", also={"weight": PLANES}, views="x y")
def product(op: Op, c: Lowering) -> None:
    """Fprop or dgrad of a linear layer, with its epilogues."""
    epilogues = op.attrs.get("epilogues", ())
    if "dy" in op.inputs:
        append_gemm(c, out=op.dx, a=op.dy, weight=op.weight, like=op.dy, transposed=False, mode=op.modes["dx"],
            other=op.inputs.get("pre"), epilogues=epilogues, factor=op.attrs.get("forward"))  # fmt: skip
    else:
        append_gemm(c, out=op.y, a=op.x, weight=op.weight, like=op.x, transposed=True, mode=op.modes["y"],
            bias=op.inputs.get("bias"), second=op.outputs.get("pre"), other=op.inputs.get("residual", op.inputs.get("pre")),
            epilogues=epilogues, factor=op.attrs.get("forward"))  # fmt: skip


@lowering("low_rank_update", adds="y", also={f"b{i}": PLANES for i in range(MOST_BLOCKS)}, views="y u")
def low_rank_update(op: Op, c: Lowering) -> None:
    """A GEMM that adds to its columns of y, for each block of an adapter."""
    for y, u, b in op.blocks(op.outputs["y"], op.u):
        append_gemm(c, out=y, a=u, weight=b, like=op.u, transposed=True, mode="add")


@lowering("matmul_dw", starts="dweight", views="dy x")
def matmul_dw(op: Op, c: Lowering) -> None:
    mode, squares = op.modes["dweight"], op.outputs.get("squares")
    append_weight_gradient(c, op.dweight, op.dy, op.x, op.x, mode, squares=squares)
