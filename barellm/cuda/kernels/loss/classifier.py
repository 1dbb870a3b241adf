"""The classifier head (fused linear cross-entropy), in chunks of tokens: logits, loss, their gradients in place, dx, dweight.

Shapes: x, dx (tokens, C), weight, dweight (V, C), or (C, V) where the head is `transposed`, targets (tokens) i32. Logits exist for
one chunk at a time. A chunk of n tokens costs 6 n V C operations, and besides the GEMMs' operands the logits are written, read
twice and written again once (8 n V bytes in bf16), and dweight is read and written. dweight sums chunks in order."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from barellm.cuda.kernel import MODES, Launch, Lowering, Size, Sizes, lowering, mode
from barellm.cuda.kernels.gemm.matmul import append_gemm
from barellm.cuda.kernels.gemm.quantized import append_dequantize
from barellm.cuda.kernels.gemm.skinny_gemm import GridIf
from barellm.cuda.kernels.loss import softcap
from barellm.cuda.kernels.loss.cross_entropy import launch_rows, launch_total, row_losses, row_scores
from barellm.cuda.lang import DeviceFunction
from barellm.program.dtypes import PLANES, itemsize
from barellm.runtime.lowering import part, rows_of, weight_operand

# Of one chunk, at most: two chunks for gpt2-124m at 64 x 1024. Each chunk but the first reads dweight and writes it again, and each
# ends three GEMMs with a wave that does not fill the card.
LOGITS_BYTES = 4 << 30


def chunk_tokens(V: int, itemsize: int) -> int:
    """The number of tokens of a chunk, a power of two. The order of dweight's sums depends on it, so only the shape decides it."""
    return 1 << max((LOGITS_BYTES // (V * itemsize)).bit_length() - 1, 0)


@dataclass(frozen=True)
class Chunk:
    """A function of the run's sizes: how many of a run's `rows` are in the chunk [first, first + count)."""

    rows: Size
    first: int
    count: int

    def __call__(self, sizes: Sizes) -> int:
        return max(min(self.rows(sizes) - self.first, self.count), 0)


@dataclass(frozen=True)
class Loss:
    """A loss over rows of logits. `rows`: its kernel, a program for each row; more(op, first): the (operands, constants) that this
    kernel has besides those of every loss, for the chunk that begins at row `first`."""

    rows: DeviceFunction
    more: Callable[[Any, int], tuple[dict[str, Any], dict[str, Any]]] = lambda op, first: ({}, {})


PLAIN, SCORES = Loss(row_losses), Loss(row_scores)
SOFTCAPPED = Loss(softcap.softcap_row_losses, lambda op, first: (softcap.position_operands(op, first), softcap.constants_of(op)))


def lower_head(c: Lowering, loss: Loss, *, gradients: bool) -> None:
    """Plan the classifier head and its loss. For each chunk of tokens: logits = x weight^T into scratch (tokens, V), the loss of
    each row and, with `gradients`, dlogits in place of the logits, dx = dlogits weight, and dweight += dlogits^T x. At the end the
    losses are summed; SCORES instead writes the loss and the margin (largest logit - target's) of each token."""
    op: Any = c.op
    transposed = op.attrs.get("transposed", False)
    x, rows, matrix = op.x, c.rows(op.x), op.inputs.get("weight")
    N, K = (op.columns, int(x.shape[-1])) if matrix is None else (int(n) for n in matrix.shape)
    C, V = (N, K) if transposed else (K, N)
    max_tokens = x.size // C
    tokens = min(chunk_tokens(V, itemsize(x.dtype)), max_tokens)
    logits = part(c.scratch("logits", (tokens, V), x.dtype)), x.dtype
    if loss is SCORES:
        totals, row_values = {}, {"losses": op.losses, "margins": op.margins}
    else:
        totals = {"losses": op.loss} | ({"nexts": op.next_loss} if loss is SOFTCAPPED else {})
        row_values = {name: c.scratch(name, (max_tokens,)) for name in totals}
    weight = append_dequantize(c, op, rows) if matrix is None else weight_operand(matrix)
    to_logits, to_dx = ("nn", "nt") if transposed else ("nt", "nn")  # GEMM kinds (matmul.py)
    for first in range(0, max_tokens, tokens):
        chunk, first_call = Chunk(rows, first, tokens), len(c.launches)
        sizes = {"rows": chunk, "most": min(tokens, max_tokens - first), "N": N, "K": K}
        x_rows = rows_of(x, first, tokens, C)
        append_gemm(c, to_logits, out=logits, a=x_rows, b=weight, **sizes)
        operands = {name: rows_of(t, first, tokens, 1) for name, t in row_values.items()}
        operands |= {"logits": logits, "targets": rows_of(op.targets, first, max_tokens, 1)}
        if loss is not SCORES:
            operands |= {"lse": None, "dlogits": logits if gradients else None}
            operands |= {"loss_scale": op.loss_scale if gradients else None}
        more, constants = loss.more(op, first)
        launch_rows(c, loss.rows, operands | more, chunk, V, " ".join([*row_values, "dlogits"]), **constants)
        if gradients:
            dx_rows = rows_of(op.dx, first, tokens, C)
            append_gemm(c, to_dx, out=dx_rows, a=logits, b=weight, mode=mode(op, "dx"), **sizes)
            dweight_mode = mode(op, "dweight") if first == 0 else MODES["add"]
            left, right = (x_rows, logits) if transposed else (logits, x_rows)
            append_gemm(c, "tn", out=op.dweight, a=left, b=right, mode=dweight_mode, **sizes)
        for launch in c.launches[first_call:]:
            if isinstance(launch, Launch):  # a library's GEMM of no tokens is none
                launch.grid = GridIf(chunk, launch.grid)
    for name, total in totals.items():
        launch_total(c, total, row_values[name], rows)


OPERANDS, CODES = {"weight": PLANES, "targets": "i32"}, {"codes": "u4 i8", "targets": "i32"}


@lowering("classifier_scores", also=OPERANDS)
@lowering("quantized_classifier_scores", also=CODES)
def lower_scores(op: Any, c: Lowering) -> None:
    lower_head(c, SCORES, gradients=False)


LOSSES = {"classifier": PLAIN, "softcapped_classifier": SOFTCAPPED}


@lowering(*LOSSES, starts="dx dweight", also=OPERANDS | {"loss_scale": "i32"})
def lower_classifier(op: Any, c: Lowering) -> None:
    lower_head(c, LOSSES[op.kernel], gradients=True)


@lowering(*(f"{name}_loss" for name in LOSSES), also=OPERANDS)
@lowering("quantized_classifier_loss", also=CODES)
def lower_classifier_loss(op: Any, c: Lowering) -> None:
    lower_head(c, LOSSES.get(op.kernel.removesuffix("_loss"), PLAIN), gradients=False)
