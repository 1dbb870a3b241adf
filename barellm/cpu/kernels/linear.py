"""How products with weights become calls of the GEMM kernels: plain, fused with what follows, and the chunked classifier."""

from __future__ import annotations

from typing import Any

from barellm.cpu.kernel import Lowering, lowering
from barellm.cpu.kernels import cross_entropy, gemm, weight_gradient
from barellm.cpu.kernels.cross_entropy import ALL_ROWS
from barellm.cpu.kernels.loops import shape_of
from barellm.cpu.tuning import choose
from barellm.program.dtypes import itemsize
from barellm.program.ops.base import Op
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import part, rows_of, view_stride, weight_operand

CLASSIFIER_CHUNK = 1024  # tokens whose logits exist at one time


def role_of(transposed: bool, epilogues: tuple[str, ...]) -> str:
    """What a product is called where its choice is kept; its bias makes no difference to it."""
    return "_".join(["forward" if transposed else "input_gradient", *(name for name in epilogues if name != "bias")])


def tokens_of(like: Tensor, rows: tuple[int, int]) -> int:
    """Rows of the activation `like` that a call does where a run is as large as planned; of chunks, a whole one."""
    return min(like.size // int(like.shape[-1]), rows[1])


def views_of(**operands: Any) -> dict[str, Any]:
    """The constant `strides` of a product with operands that are columns of wider tensors; without any there is none."""
    strides = tuple((name, stride) for name, t in operands.items() if (stride := view_stride(t)))
    return {"strides": strides} if strides else {}


def _product(
    c: Lowering, *, out: Any, a: Any, weight: Tensor, like: Tensor, transposed: bool, epilogues: tuple[str, ...] = (),
    second: Any = None, bias: Any = None, other: Any = None, mode: str = "store", rows: tuple[int, int] = (0, ALL_ROWS),
) -> None:  # fmt: skip
    """`like` is the activation whose run-time sizes count the rows; `rows` the (first, count) that this call does."""
    N, K = (int(n) for n in weight.shape)
    cols, depth = (N, K) if transposed else (K, N)
    a_dtype = a[1] if isinstance(a, tuple) else a.dtype
    role = role_of(transposed, epilogues)
    choice = choose(c.isa, role, a_dtype, cols, depth, tokens_of(like, rows), c.threads)
    c.private(gemm.product_private(c.isa, a_dtype, depth, choice))
    operands = {"out": out, "second": second, "a": a, "weight": weight_operand(weight), "bias": bias, "other": other,
                "row_begin": rows[0], "row_limit": rows[1]}  # fmt: skip
    constants = {
        "cols": cols,
        "depth": depth,
        "transposed": transposed,
        "epilogues": epilogues,
        "mode": mode,
        "choice": choice,
        **shape_of(like),
        **views_of(out=out, second=second, a=a, other=other),
    }
    c.call(gemm.product, operands, constants, writes="out second")


def _weight_gradient(
    c: Lowering, dweight: Tensor, dy: Any, x: Any, like: Tensor, mode: str, rows=(0, ALL_ROWS)
) -> None:
    N, K = (int(n) for n in dweight.shape)
    dtype = dy[1] if isinstance(dy, tuple) else dy.dtype
    choice = choose(c.isa, "weight_gradient", dtype, K, tokens_of(like, rows), N, c.threads)
    c.private(weight_gradient.gradient_private(c.isa, dtype, tokens_of(like, rows), choice))
    operands = {"dweight": dweight, "dy": dy, "x": x, "row_begin": rows[0], "row_limit": rows[1]}
    constants = {"N": N, "K": K, "mode": mode, "choice": choice, **shape_of(like), **views_of(dy=dy, x=x)}
    c.call(weight_gradient.weight_gradient, operands, constants, writes="dweight")


@lowering("product", adds="y dx", also={"weight": "split half"}, views="x y pre residual dy dx")
@lowering("matmul_dx", adds="dx", also={"weight": "split half"}, views="dy dx")
@lowering("matmul", adds="y", also={"weight": "split half"}, views="x y")
def product(op: Op, c: Lowering) -> None:
    """A product with a weight or the gradient of its input, with what follows it."""
    epilogues = op.attrs.get("epilogues", ())
    if "dy" in op.inputs:
        _product(
            c, out=op.dx, a=op.dy, weight=op.weight, like=op.dy, transposed=False, mode=op.modes["dx"],
            other=op.inputs.get("pre"), epilogues=epilogues,
        )  # fmt: skip
    else:
        _product(
            c, out=op.y, a=op.x, weight=op.weight, like=op.x, transposed=True, mode=op.modes["y"], bias=op.inputs.get("bias"),
            second=op.outputs.get("pre"), other=op.inputs.get("residual"), epilogues=epilogues,
        )  # fmt: skip


@lowering("matmul_dw", starts="dweight", views="dy x")
def matmul_dw(op: Op, c: Lowering) -> None:
    _weight_gradient(c, op.dweight, op.dy, op.x, op.x, op.modes["dweight"])


def _chunks(x: Tensor) -> list[tuple[int, int]]:
    """(first row, rows) of each classifier chunk, up to the planned maximum; those beyond a run's rows do nothing."""
    rows = x.size // int(x.shape[-1])
    return [(first, CLASSIFIER_CHUNK) for first in range(0, rows, CLASSIFIER_CHUNK)]


def _logits_and_losses(c: Lowering, *, gradients: bool) -> None:
    """For each chunk: logits, losses, and with `gradients` the logit gradients in their place and the two products from them."""
    op, x = c.op, c.op.x
    V, width = (int(n) for n in op.weight.shape)
    rows = x.size // width
    logits = (part(c.scratch("logits", min(rows, CLASSIFIER_CHUNK) * V * itemsize(x.dtype))), x.dtype)
    losses = c.scratch("losses", 4 * rows)
    constants = {"V": V, "valid": op.valid_vocab, **shape_of(x)}
    for i, chunk in enumerate(_chunks(x)):
        first, count = chunk
        x_rows = rows_of(x, first, count, width)
        _product(c, out=logits, a=x_rows, weight=op.weight, like=x, transposed=True, rows=chunk)
        operands = {
            "lse": None,
            "losses": (part(losses, 4 * first, min(4 * (first + count), 4 * rows)), "fp32"),
            "logits": logits,
            "targets": rows_of(op.targets, first, count, 1),
            "loss_scale": op.loss_scale if gradients else None,
            "row_begin": first,
            "row_limit": count,
        }
        if not gradients:
            c.call(cross_entropy.row_losses, operands, constants, writes="losses")
            continue
        c.call(cross_entropy.row_losses_and_gradients, operands, constants, writes="losses logits")
        mode = op.modes["dx"]
        _product(
            c,
            out=rows_of(op.dx, first, count, width),
            a=logits,
            weight=op.weight,
            like=x,
            transposed=False,
            mode=mode,
            rows=chunk,
        )
        mode = op.modes["dweight"] if i == 0 else "add"
        _weight_gradient(c, op.dweight, logits, x_rows, x, mode, rows=chunk)
    operands = {"loss": op.loss, "losses": (part(losses), "fp32")}
    c.call(cross_entropy.total_loss, operands, shape_of(x), writes="loss")


@lowering(
    "classifier", adds="dx", starts="dweight", also={"weight": "split half", "targets": "i32", "loss_scale": "i32"}
)
def classifier(op: Op, c: Lowering) -> None:
    _logits_and_losses(c, gradients=True)


@lowering("classifier_loss", also={"weight": "split half", "targets": "i32"})
def classifier_loss(op: Op, c: Lowering) -> None:
    _logits_and_losses(c, gradients=False)
