"""The fused LM head and cross-entropy in chunks of tokens: logits, losses, in-place logit gradients, and the two GEMMs from them.
The logits of all tokens never exist.

Shapes: x, dx (tokens, C); weight (V, C), or (C, V) where it is `transposed`, dweight as it; targets (tokens) i32."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from barellm.cpu.kernel import Emit, Lowering, Op, Tensor, lowering, part, rows_of
from barellm.cpu.kernels.gemm import linear, quantized
from barellm.cpu.kernels.loops import shape_of
from barellm.cpu.kernels.loss import cross_entropy, softcap
from barellm.program.dtypes import PLANES, itemsize

CHUNK = 1024  # tokens whose logits exist at one time


@dataclass(frozen=True)
class Loss:
    """The kernels of a loss over rows of logits. constants(op, V, like) gives their compile-time constants; scratch(V) the bytes of
    thread scratch that `gradients` needs."""

    losses: Emit
    gradients: Emit  # and losses
    constants: Callable[[Op, int, Tensor], dict[str, Any]]
    scratch: Callable[[int], int] = lambda V: 0


PLAIN = Loss(cross_entropy.row_losses, cross_entropy.row_losses_and_gradients, cross_entropy.constants_of)
SOFTCAPPED = Loss(softcap.row_losses, softcap.row_losses_and_gradients, softcap.constants_of, scratch=lambda V: 4 * V)


@lowering("classifier", "softcapped_classifier", adds="dx", starts="dweight",
          also={"weight": PLANES, "targets": "i32", "loss_scale": "i32"})  # fmt: skip
@lowering("classifier_loss", "softcapped_classifier_loss", also={"weight": PLANES, "targets": "i32"})
@lowering("quantized_classifier_loss", also={"codes": "u4 i8", "targets": "i32"})
def lower_classifier(op: Op, c: Lowering) -> None:
    """Append, for each chunk of CHUNK tokens: the logits (CHUNK, V), their losses and, if the op has a dx, also their
    gradients, in place; then dx and dweight from these; at the end the totals. A quantized head (`weight` None) has losses only."""
    x, weight = op.x, op.inputs.get("weight")
    gradients = "dx" in op.outputs
    loss = SOFTCAPPED if op.name.startswith("softcapped") else PLAIN
    transposed = op.attrs.get("transposed", False)
    width = int(x.shape[-1])
    V = op.columns if weight is None else int(weight.shape[1 if transposed else 0])
    rows = x.size // width
    logits = (part(c.workspace("logits", min(rows, CHUNK) * V * itemsize(x.dtype))), x.dtype)
    totals = {"losses": op.loss} | ({"nexts": op.next_loss} if loss is SOFTCAPPED else {})
    of_rows = {name: c.workspace(name, 4 * rows) for name in totals}  # a loss for each row
    if gradients:
        c.thread_scratch(loss.scratch(V))
    for first in range(0, rows, CHUNK):  # those beyond a run's rows do nothing
        chunk = (first, CHUNK)  # (first row, rows at most)
        x_rows = append_logits(op, c, logits, V, chunk, transposed=transposed)
        operands = {"lse": None, "logits": logits, "targets": rows_of(op.targets, first, rows, 1),
            "loss_scale": op.loss_scale if gradients else None, "row_begin": first, "row_limit": CHUNK}  # fmt: skip
        for name, t in of_rows.items():
            operands[name] = (part(t, 4 * first, min(4 * (first + CHUNK), 4 * rows)), "fp32")
        emit = loss.gradients if gradients else loss.losses
        c.call(emit, operands, loss.constants(op, V, x), writes=" ".join([*totals, *["logits"] * gradients]))
        if gradients and weight is not None:
            linear.append_gemm(c, out=rows_of(op.dx, *chunk, width), a=logits, weight=weight, like=x, transposed=transposed,
                mode=op.modes["dx"], rows=chunk)  # fmt: skip
            if "dweight" not in op.outputs:  # a frozen head
                continue
            dy, by = (x_rows, logits) if transposed else (logits, x_rows)
            mode = op.modes["dweight"] if first == 0 else "add"
            linear.append_weight_gradient(c, op.dweight, dy, by, x, mode, rows=chunk, squares=op.outputs.get("squares"))
    for name, total in totals.items():
        operands = {"loss": total, "losses": (part(of_rows[name]), "fp32")}
        c.call(cross_entropy.total_loss, operands, shape_of(x), writes="loss")


def append_logits(op: Op, c: Lowering, logits, V: int, chunk: tuple[int, int], *, transposed: bool = False) -> Any:
    """Append the GEMM logits (CHUNK, V) = x @ head for the rows (first, count) = `chunk` of x; the head is a weight or quantized
    codes. Returns the operand of those rows of x."""
    x, weight, width = op.x, op.inputs.get("weight"), int(op.x.shape[-1])
    x_rows = rows_of(x, *chunk, width)
    if weight is None:
        head = {"codes": op.codes, "scales": op.scales, "weights": op.weights}
        quantized.append_quantized_gemm(c, out=logits, x=x_rows, like=x, rows=chunk, cols=V, depth=width, **head)
    else:
        linear.append_gemm(c, out=logits, a=x_rows, weight=weight, like=x, transposed=not transposed, rows=chunk)
    return x_rows


@lowering("classifier_scores", also={"weight": PLANES, "targets": "i32"})
@lowering("quantized_classifier_scores", also={"codes": "u4 i8", "targets": "i32"})
def lower_scores(op: Op, c: Lowering) -> None:
    """The loss and the margin (maximum - target's logit) of each target, a chunk of logits at a time."""
    x, weight = op.x, op.inputs.get("weight")
    V = op.columns if weight is None else int(weight.shape[0])
    rows = x.size // int(x.shape[-1])
    logits = (part(c.workspace("logits", min(rows, CHUNK) * V * itemsize(x.dtype))), x.dtype)
    for first in range(0, rows, CHUNK):
        append_logits(op, c, logits, V, (first, CHUNK))
        given = {name: rows_of(getattr(op, name), first, rows, 1) for name in ("losses", "margins", "targets")}
        operands = given | {"logits": logits, "row_begin": first, "row_limit": CHUNK}
        c.call(cross_entropy.row_scores, operands, PLAIN.constants(op, V, x), writes="losses margins")
