"""The classifier's loss. Shapes: logits (B, T, Vp), targets (B, T) i32, lse, losses and margins (B, T) fp32, loss (1,) fp32.

Columns from `valid_vocab` on are padding: no part of the softmax, gradient zero. Target -1 is ignored.
The scalar `inv_targets` is 1 / (valid targets of the whole batch, over all its micro-batches)."""

import numpy as np

from barellm.program.graph import Graph
from barellm.program.loss_scale import scale_of
from barellm.program.ops.attention.attention import log_sum_exp
from barellm.program.ops.base import OfLogits, Op, Spec, Tensor
from barellm.program.ops.gemm.matmul import Matmul
from barellm.program.ops.pointwise.elementwise import operand
from barellm.program.ops.softcap import Softcap


class CrossEntropy(OfLogits):
    """loss = inv_targets * sum of (lse - logits[target]) over the micro-batch's valid targets, in nats."""

    name = "cross_entropy"
    scalars = ("inv_targets",)
    flops_per_element = (4, "logits")

    def infer(self, logits: Tensor, targets: Tensor) -> dict[str, Spec]:
        self.check(self.name, logits, targets)
        return {"loss": ((1,), "fp32"), "lse": (targets.shape, "fp32")}

    def reference(self, logits, targets, inv_targets):
        logits = logits[..., : self.valid_vocab]
        lse = log_sum_exp(logits)
        at_target = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)[..., 0]
        total = np.where(targets >= 0, lse - at_target, 0).sum()
        return {"loss": np.reshape(total * inv_targets, 1), "lse": lse}

    def gradient(self, g, loss, lse):
        assert lse is None, "lse is a saved value, not a differentiable output"
        if loss is not None:
            raise ValueError("cross_entropy must be the loss itself: its gradient rule is the seed of the reverse walk")
        operands = {"logits": self.logits, "targets": self.targets, "lse": self.lse, "loss_scale": g.loss_scale}
        g.write(CrossEntropyBackward, {"dlogits": self.logits}, **operands, valid_vocab=self.valid_vocab)


class CrossEntropyBackward(Op):
    """dlogits = (softmax - onehot) * inv_targets; zero in rows with target -1 and in padded columns. With a `loss_scale`
    (`program.loss_scale`) they are multiplied by it, and so is every gradient that follows."""

    name = "cross_entropy_backward"
    optional = ("loss_scale",)
    scalars = ("inv_targets",)
    flops_per_element = (4, "logits")

    def infer(self, logits: Tensor, targets: Tensor, lse: Tensor, loss_scale: Tensor | None = None) -> dict[str, Spec]:
        return {"dlogits": (logits.shape, logits.dtype)}

    def reference(self, logits, targets, lse, inv_targets, loss_scale=None):
        V = self.valid_vocab
        if loss_scale is not None:
            inv_targets = inv_targets * scale_of(loss_scale)
        dlogits = np.zeros_like(logits)
        dlogits[..., :V] = np.exp(logits[..., :V] - lse[..., None])
        at_target = np.maximum(targets, 0)[..., None]
        np.put_along_axis(dlogits, at_target, np.take_along_axis(dlogits, at_target, -1) - 1, -1)
        return {"dlogits": np.where(targets[..., None] >= 0, dlogits * inv_targets, 0)}


class TokenLosses(OfLogits):
    """losses = lse - logits[target], in nats, and margins = max(logits) - logits[target]: 0 where no id is more likely than the
    target. Both are 0 where the target is -1. It has no gradient: it scores, and does not train."""

    name = "token_losses"
    flops_per_element = (4, "logits")

    def infer(self, logits: Tensor, targets: Tensor) -> dict[str, Spec]:
        self.check(self.name, logits, targets)
        return {"losses": (targets.shape, "fp32"), "margins": (targets.shape, "fp32")}

    def reference(self, logits, targets):
        logits = logits[..., : self.valid_vocab]
        at_target = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)[..., 0]
        found = {"losses": log_sum_exp(logits), "margins": logits.max(-1)}
        return {name: np.where(targets >= 0, top - at_target, 0) for name, top in found.items()}


class Calls(Graph):
    def classifier(self, x: Tensor, weight: Tensor, targets: Tensor, *, valid_vocab: int) -> Tensor:
        """x (B, T, C), weight (Vp, C), targets (B, T) i32, -1 ignored -> loss (1,), times the scalar inv_targets."""
        logits = self.apply(Matmul, x=operand(self, x), weight=weight).y
        return self.apply(CrossEntropy, logits=logits, targets=targets, valid_vocab=valid_vocab).loss

    def score_tokens(self) -> tuple[Tensor, Tensor]:
        """Put into the place of the loss, which is the program's last op, the loss of each target (B, T) and its margin (B, T)."""
        loss = self.ops.pop()
        if loss.name != CrossEntropy.name and loss.attrs.get("predict") != 1:
            raise ValueError(f"score_tokens expects a program that ends in {CrossEntropy.name}, found {loss.name}")
        cap = loss.attrs.get("cap")
        logits = self.apply(Softcap, x=loss.logits, cap=cap).y if cap else loss.logits
        op = self.apply(TokenLosses, logits=logits, targets=loss.targets, valid_vocab=loss.valid_vocab)
        return op.losses, op.margins
