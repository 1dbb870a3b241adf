"""The program "logits": what a model says of every position, made of the program that computes its loss."""

from barellm import models
from barellm.config import ModelConfig
from barellm.errors import UserError
from barellm.program import dtypes, ops
from barellm.program.builder import Program, Store
from barellm.program.ops.softcap import cap_of
from barellm.program.tensor import Dim, Tensor


def logits_program(store: Store, model: ModelConfig, *, batch: int, seq: int, compute: str | dtypes.Precision) -> Program:
    """Up to `batch` sequences of up to `seq` tokens, without dropout; output "logits" (B, T, Vp), fp32."""
    p = Program(store, compute=compute)
    p.output("logits", logits_of(p, model, p.input("tokens", (Dim("batch", batch), Dim("seq", seq)))))
    return p


def logits_of(p: Program, model: ModelConfig, tokens_BT: Tensor) -> Tensor:
    """Append the model's fp32 logits (B, T, Vp): its own `forward`, with the loss removed. UserError if its loss has no logits."""
    targets_BT = Tensor("targets", tokens_BT.shape, "i32", "input")  # which only the loss reads
    models.of(model).forward(p, model, tokens_BT, targets_BT, training=False)
    loss = p.ops.pop()
    logits = loss.inputs.get("logits")
    if logits is None:
        raise UserError(f"the loss of {models.name_of(model)} is {loss.name}, expected an op that has logits")
    classifier = p.ops[-1]
    if isinstance(classifier, ops.Matmul) and classifier.y is logits:
        p.ops.pop()  # done again without the rounding of its result, as decoding does it
        logits = p.apply(ops.Matmul, x=classifier.x, weight=classifier.weight, dtype="fp32").y
    if (cap := cap_of(loss)) is not None:
        return p.apply(ops.Softcap, x=logits, cap=cap).y
    return logits if logits.dtype == "fp32" else p.apply(ops.Cast, x=logits, dtype="fp32").y
