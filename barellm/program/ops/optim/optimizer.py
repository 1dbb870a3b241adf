"""Global gradient norm, clipping and AdamW. Tensors of any shape; all statistics fp32."""

from typing import ClassVar

import numpy as np

from barellm.program import dtypes, moments
from barellm.program.loss_scale import FIRST_SCALE, GROWTH_STEPS, LEAST_SCALE, MOST_SCALE, scale_of
from barellm.program.ops.base import Op, Spec, Tensor, describe
from barellm.program.ops.pointwise.random import shared_words

STATE_DTYPES = (("fp32", "fp32"), ("e6m9", "ue6m10"))  # of m and v
CHUNK = 65536  # elements per partial sum of squares: fixed, so that the sum's bits depend on the shape only


class SumSquares(Op):
    """partials[i] = sum of squares of elements i * 65536 .. (i + 1) * 65536 of x."""

    name = "sum_squares"
    flops_per_element = (2, "x")

    def infer(self, x: Tensor) -> dict[str, Spec]:
        return {"partials": ((-(-x.size // CHUNK),), "fp32")}

    def reference(self, x):
        return {"partials": np.add.reduceat(x.reshape(-1) ** 2, np.arange(0, x.size, CHUNK))}


class ClipScale(Op):
    """clip = [norm, scale], from the partial sums p0, p1, ... in this order; scale = min(1, clip / norm).

    `clip` 0 means no clipping. A norm that is not finite gives scale NaN, which AdamW obeys by changing nothing, and
    counts one more in `skipped` (1,) i32.

    With a `loss_scale` (`program.loss_scale`) the gradients are too large by it: the norm is divided by it, and so is
    the clipping scale."""

    name = "clip_scale"
    optional = ("loss_scale",)
    inplace: ClassVar[dict[str, str]] = {"skipped": "skipped"}

    def infer(self, skipped: Tensor, loss_scale: Tensor | None = None, **partials: Tensor) -> dict[str, Spec]:
        return {"clip": ((2,), "fp32"), "skipped": (skipped.shape, skipped.dtype)}

    def reference(self, skipped, loss_scale=None, **partials):
        """clip = [norm, scale] from the partial sums; NaN as scale tells the optimizers to skip the step."""
        loss_factor = 1.0 if loss_scale is None else scale_of(loss_scale)
        norm = np.sqrt(sum(p.sum() for p in partials.values())) / loss_factor
        if not np.isfinite(norm):
            return {"clip": np.array([norm, np.nan]), "skipped": skipped + 1}
        limit = self.attrs["clip"]
        scale = min(1.0, limit / norm) if limit > 0 and norm > 0 else 1.0
        return {"clip": np.array([norm, scale / loss_factor]), "skipped": skipped}


class UpdateScale(Op):
    """The next state of a loss scale, or of a residual branch's gradient scale (`program.loss_scale`), from the partial sums of
    squares p0, p1, ... of the gradients that carry it. It doubles after GROWTH_STEPS finite updates, halves after any other."""

    name = "update_scale"
    inplace: ClassVar[dict[str, str]] = {"scale": "scale"}

    def infer(self, scale: Tensor, **partials: Tensor) -> dict[str, Spec]:
        return {"scale": (scale.shape, scale.dtype)}

    def reference(self, scale, **partials):
        """[power of two less FIRST_SCALE, good updates since it changed]."""
        power, good = (int(n) for n in scale)
        if not np.isfinite(sum(p.sum() for p in partials.values())):
            state = [max(power - 1, LEAST_SCALE - FIRST_SCALE), 0]
        elif good + 1 < GROWTH_STEPS:
            state = [power, good + 1]
        else:
            state = [min(power + 1, MOST_SCALE - FIRST_SCALE), 0]
        return {"scale": np.array(state, np.int32)}


class AdamW(Op):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019) as in torch.optim.AdamW; g = grad * clip[1]:

    m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;
    p = p (1 - lr wd) - lr (m / (1 - beta1^step)) / (sqrt(v / (1 - beta2^step)) + eps).

    lr is the scalar of the run times the constant `lr_scale`. `step` counts from 1. Nothing changes if clip[1] is NaN.

    Moments are fp32, or 16 bits each: m "e6m9" and v "ue6m10" (`program.moments`). The weight is updated from the new
    moments before they are rounded. They are rounded to nearest; or, with a `stream`, stochastically: by the shared word of
    `program.ops.random` for this seed, step, stream, sample 0, row 0 and the element as the column. Of its bits m takes the
    lowest 14 and v the highest 13. A span of a parameter has the columns of its elements.

    With `bf16` the new weight is rounded to the nearest bf16, ties to even, whatever its dtype has room for."""

    name = "adamw"
    optional = ("stream", "bf16")
    scalars = ("lr", "step", "seed")
    flops_per_element = (14, "param")
    inplace: ClassVar[dict[str, str]] = {"param": "param", "m": "m", "v": "v"}

    @property
    def lr_scale(self) -> float:
        return self.attrs.get("lr_scale", 1.0)

    def infer(self, param: Tensor, grad: Tensor, m: Tensor, v: Tensor, clip: Tensor) -> dict[str, Spec]:
        if not param.shape == grad.shape == m.shape == v.shape or clip.shape != (2,):
            raise ValueError(f"{self.name} expects equal shapes and clip (2): {describe(param=param, grad=grad, m=m, v=v)}")
        if (m.dtype, v.dtype) not in STATE_DTYPES:
            raise ValueError(f"{self.name} expects fp32 moments, or e6m9 and ue6m10: {describe(m=m, v=v)}")
        return {"param": (param.shape, param.dtype), "m": (m.shape, m.dtype), "v": (v.shape, v.dtype)}

    def reference(self, param, grad, m, v, clip, lr, step, seed=0):
        if np.isnan(clip[1]):
            return {"param": param, "m": m, "v": v}
        g, lr = grad * clip[1], lr * self.lr_scale
        m = self.beta1 * m + (1 - self.beta1) * g
        v = self.beta2 * v + (1 - self.beta2) * g * g
        param = self._changed(param, m, v, lr, step)
        return {"param": dtypes.round_to_bf16(param) if self.bf16 else param, **self._stored(m, v, step, seed)}

    def _changed(self, param: np.ndarray, m: np.ndarray, v: np.ndarray, lr: float, step: int) -> np.ndarray:
        """The new weights by the new moments."""
        denominator = np.sqrt(v / (1 - self.beta2**step)) + self.eps
        return param * (1 - lr * self.weight_decay) - lr / (1 - self.beta1**step) * m / denominator

    def _stored(self, m: np.ndarray, v: np.ndarray, step: int, seed: int) -> dict[str, np.ndarray]:
        """The new moments as their dtypes hold them. `stream` not None: rounded stochastically, by the bits of (seed, step)."""
        if self.m.dtype == "fp32":
            return {"m": m, "v": v}
        dither_m = dither_v = None
        if self.stream is not None:
            first = self.param.first_element
            bits = shared_words(seed, step, 0, self.stream, first + m.size)[first:].reshape(m.shape)
            dither_m, dither_v = bits & np.uint32(0x3FFF), bits >> np.uint32(19)
        return {
            "m": moments.decode(moments.encode(m, "e6m9", dither_m), "e6m9").astype(m.dtype),
            "v": moments.decode(moments.encode(v, "ue6m10", dither_v), "ue6m10").astype(v.dtype),
        }


class CautiousAdam(AdamW):
    """Adam as modded-nanogpt has it, with decay only where the step makes a weight smaller too; g = grad * clip[1]:

    m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;
    u = lr sqrt(1 - beta2^step) / (1 - beta1^step) * m / (sqrt(v) + eps);  p = p - u - (lr^2 wd p where u p > 0).

    Two things differ from AdamW besides that: eps is added to the root of v before the bias is corrected, and the decay falls with
    the square of the rate. lr, `step`, the moments and a clip[1] of NaN are as there."""

    name = "cautious_adam"
    flops_per_element = (16, "param")

    def _changed(self, param: np.ndarray, m: np.ndarray, v: np.ndarray, lr: float, step: int) -> np.ndarray:
        rate = lr * np.sqrt(1 - self.beta2**step) / (1 - self.beta1**step)
        update = rate * m / (np.sqrt(v) + self.eps)
        return param - update - np.where(update * param > 0, lr * lr * self.weight_decay * param, 0.0)
