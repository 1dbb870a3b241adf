"""The loss of softcapped logits, over several next tokens at once. Shapes: logits (B, T, Vp), targets, lse (B, T), losses (1,).

A logit x counts as z = scale * sigmoid((x + shift) / width), which lies between 0 and `scale`; `cap` is (scale, shift, width), or
None for z = x. Position t answers for targets t, t + 1 and so on, `predict` of them, as far as its row has them: target t + k has
the run-time weight `mtp_k`. Target -1 is ignored, and columns from `valid_vocab` on are padding, as in `cross_entropy`."""

import numpy as np

from barellm.program.graph import Graph
from barellm.program.loss_scale import scale_of
from barellm.program.ops.attention.attention import log_sum_exp
from barellm.program.ops.base import OfLogits, Op, Spec, Tensor, describe
from barellm.program.ops.embedding import LastRow
from barellm.program.ops.gemm import fp8, matmul
from barellm.program.ops.pointwise.elementwise import Cast, operand

Cap = tuple[float, float, float]  # scale, shift, width

MTP = ("mtp_0", "mtp_1", "mtp_2")  # weights of the losses, by how far ahead a target is
GREATEST = 70.0  # scale: exp(-GREATEST) over any vocabulary is still a normal fp32 number


def sigmoid(x: np.ndarray, cap: Cap) -> np.ndarray:
    """sigmoid((x + shift) / width), by tanh, which does not overflow."""
    _, shift, width = cap
    return (1 + np.tanh((x + shift) / (2 * width))) / 2


def capped(x: np.ndarray, cap: Cap | None) -> np.ndarray:
    """The capped logits z of x."""
    return x if cap is None else cap[0] * sigmoid(x, cap)


def centre(cap: Cap) -> float:
    """What is taken from capped logits that somebody sees: half of the scale where they are symmetric."""
    return 0.0 if cap[1] else cap[0] / 2


def slope(x: np.ndarray, cap: Cap | None) -> np.ndarray | float:
    """dz/dx of the capped logit z of x."""
    if cap is None:
        return 1.0
    s = sigmoid(x, cap)
    return cap[0] / cap[2] * s * (1 - s)


def cap_of(op: Op) -> Cap | None:
    """The op's, or its sequence's: an attribute that is None is absent."""
    return op.attrs.get("cap")


def ahead(targets: np.ndarray, k: int) -> np.ndarray:
    """(B, T) whose element t is target t + k of the row, -1 where the row ends before."""
    return np.concatenate([targets[..., k:], np.full_like(targets[..., :k], -1)], -1)


def _check(op: OfLogits, logits: Tensor, targets: Tensor) -> None:
    """ValueError for wrong shapes, and for a vocabulary, `predict` or `cap` out of range."""
    op.check(name := "softcap_cross_entropy", logits, targets)
    if not 1 <= op.predict <= len(MTP):
        raise ValueError(f"{name} expects predict from 1 to {len(MTP)}, found {op.predict}")
    cap = cap_of(op)
    if cap is not None and not (len(cap) == 3 and 0 < cap[0] <= GREATEST and cap[2] > 0):
        expected = f"(scale, shift, width) with a scale up to {GREATEST:g} and a width above 0"
        raise ValueError(f"{name} expects cap None or {expected}, found {cap}")


class SoftcapCrossEntropy(OfLogits):
    """loss = inv_targets * sum over t and k < predict of mtp_k * (lse[t] - z[t, targets[t + k]]), in nats; lse of z over the
    vocabulary. next_loss is the same of the next target alone, k = 0, with the weight 1: what other models' losses are."""

    name = "softcap_cross_entropy"
    scalars = ("inv_targets", *MTP)
    flops_per_element = (10, "logits")

    def infer(self, logits: Tensor, targets: Tensor) -> dict[str, Spec]:
        _check(self, logits, targets)
        return {"loss": ((1,), "fp32"), "next_loss": ((1,), "fp32"), "lse": (targets.shape, "fp32")}

    def reference(self, logits, targets, inv_targets, **mtp):
        """lse once, then the k-th loss from the targets shifted by k (-1 behind the row's end); see the class's docstring."""
        z = capped(logits[..., : self.valid_vocab], cap_of(self))
        lse = log_sum_exp(z)
        sums = []
        for k in range(self.predict):
            target = ahead(targets, k)
            at_target = np.take_along_axis(z, np.maximum(target, 0)[..., None], -1)[..., 0]
            sums.append(inv_targets * np.where(target >= 0, lse - at_target, 0).sum())
        total = sum(mtp[MTP[k]] * loss for k, loss in enumerate(sums))
        return {"loss": np.reshape(total, 1), "next_loss": np.reshape(sums[0], 1), "lse": lse}

    def gradient(self, g, loss, next_loss, lse):
        assert next_loss is lse is None, "lse and next_loss are no differentiable outputs"
        if loss is not None:
            raise ValueError("softcap_cross_entropy must be the loss itself: its gradient rule is the seed of the walk")
        operands = {"logits": self.logits, "targets": self.targets, "lse": self.lse, "loss_scale": g.loss_scale}
        g.write(SoftcapCrossEntropyBackward, {"dlogits": self.logits}, **operands, **self.attrs)


class SoftcapCrossEntropyBackward(OfLogits):
    """dlogits = inv_targets * (sum of mtp_k over the targets * softmax(z) - mtp_k at each of them) * dz/dlogits, zero in padded
    columns; times the number that `loss_scale` stands for, where it is given (`program.loss_scale`)."""

    name = "softcap_cross_entropy_backward"
    optional = ("loss_scale",)
    scalars = SoftcapCrossEntropy.scalars
    flops_per_element = (12, "logits")

    def infer(self, logits: Tensor, targets: Tensor, lse: Tensor, loss_scale: Tensor | None = None) -> dict[str, Spec]:
        _check(self, logits, targets)
        return {"dlogits": (logits.shape, logits.dtype)}

    def reference(self, logits, targets, lse, inv_targets, loss_scale=None, **mtp):
        """dloss/dz summed over the shifted targets, times dz/dlogits; see the class's docstring."""
        x = logits[..., : self.valid_vocab]
        p = np.exp(capped(x, cap_of(self)) - lse[..., None])
        dz = np.zeros_like(x)
        for k in range(self.predict):
            target = ahead(targets, k)[..., None]
            onehot = np.arange(self.valid_vocab) == target
            dz += mtp[MTP[k]] * np.where(target >= 0, p - onehot, 0)
        if loss_scale is not None:
            inv_targets = inv_targets * scale_of(loss_scale)
        dlogits = np.zeros_like(logits)
        dlogits[..., : self.valid_vocab] = dz * slope(x, cap_of(self)) * inv_targets
        return {"dlogits": dlogits}


class Softcap(Op):
    """y = scale * sigmoid((x + shift) / width), fp32: what a sampler draws from. With a shift of 0 less scale / 2: c tanh(x / c) of
    c = scale / 2 = 2 width, as a softmax does not see."""

    name = "softcap"
    flops_per_element = (5, "x")

    def infer(self, x: Tensor) -> dict[str, Spec]:
        return {"y": (x.shape, "fp32")}

    def reference(self, x):
        return {"y": capped(x, self.cap) - centre(self.cap)}


class Calls(Graph):
    def softcapped_classifier(
        self, x: Tensor, head: Tensor, targets: Tensor, *, valid_vocab: int, cap: Cap | None = (23.0, 5.0, 7.5),
        predict: int = 3, scaling: fp8.Scaling | None = None, transposed: bool = True,
    ) -> Tensor:  # fmt: skip
        """x (B, T, C), head (C, Vp), or (Vp, C) if not `transposed`, targets (B, T) i32, -1 ignored -> loss (1,), times the scalar
        inv_targets: the sum of the losses of the next `predict` targets, each times its scalar mtp_0, mtp_1 or mtp_2, of logits
        capped by `cap` (scale, shift, width), or not capped where it is None. With a `scaling` the matmuls are done in 8 bits.
        Where there are several, the output "next_loss" has the loss of the next target alone, whose weight is 1."""
        if len(head.shape) != 2 or x.shape[-1] != head.shape[0 if transposed else 1]:
            raise ValueError(f"softcapped_classifier expects x (B, T, C), head (C, V): {describe(x=x, head=head)}")
        if scaling is not None:
            logits = fp8.scaled_matmul(self, x, head, scaling)
        elif transposed:
            logits = self.apply(matmul.MatmulDx, dy=operand(self, x), weight=head).dx
        else:
            logits = self.apply(matmul.Matmul, x=operand(self, x), weight=head).y
        given = {"logits": logits, "targets": targets, "valid_vocab": valid_vocab, "cap": cap, "predict": predict}
        op = self.apply(SoftcapCrossEntropy, **given)
        if predict > 1:
            self.output("next_loss", op.next_loss)
        return op.loss

    def softcap(self, logits: Tensor, cap: Cap) -> Tensor:
        """fp32 logits capped by `cap` (scale, shift, width). Any shape."""
        return self.apply(Softcap, x=logits, cap=cap).y

    def softcapped_logits(self, x: Tensor, head: Tensor, *, cap: Cap | None = (23.0, 5.0, 7.5)) -> Tensor:
        """fp32 logits (B, 1, Vp) of the last position of x (B, T, C), head (C, Vp), capped by `cap`."""
        logits = self.apply(matmul.MatmulDx, dy=operand(self, self.apply(LastRow, x=x).y), weight=head).dx
        return self.apply(Cast, x=logits, dtype="fp32").y if cap is None else self.apply(Softcap, x=logits, cap=cap).y
