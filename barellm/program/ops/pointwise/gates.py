"""Sigmoid gates: a few columns of a tensor decide how much of another passes. Shapes: x, base, y (B, T, C); z (B, T, N) fp32, a
logit for each of N groups of C / N neighbouring columns (heads, or 1 for all columns)."""

from typing import Any

import numpy as np

from barellm.program.graph import Graph
from barellm.program.ops.base import Op, Spec, Tensor, View, describe
from barellm.program.ops.pointwise.elementwise import sigmoid


class GateLogits(Op):
    """z = weight[:, :k] x + weight[:, k:] extra, for x (B, T, k), extra (B, T, K - k) or none, weight (N, K)."""

    name = "gate_logits"
    optional = ("extra",)
    rounded = ("weight",)

    def infer(self, x: Tensor, weight: Tensor, extra: Tensor | None = None) -> dict[str, Spec]:
        rows = extra is None or tuple(extra.shape[:-1]) == tuple(x.shape[:-1])
        columns = int(x.shape[-1]) + (0 if extra is None else int(extra.shape[-1]))
        if len(weight.shape) != 2 or weight.shape[1] != columns or not rows:
            found = describe(x=x, extra=extra, weight=weight)
            raise ValueError(f"gate_logits expects x (..., k), extra (..., K - k) or none, weight (N, K): {found}")
        return {"z": ((*x.shape[:-1], weight.shape[0]), "fp32")}

    def reference(self, x, weight, extra=None):
        k = x.shape[-1]
        z = x @ weight[:, :k].T
        return {"z": z if extra is None else z + extra @ weight[:, k:].T}

    def gradient(self, g, z):
        targets = {"dx": self.x, "dweight": self.weight}
        more = {} if self.extra is None else {"dextra": self.extra}
        g.write(GateLogitsBackward, targets | more, dz=z, x=self.x, weight=self.weight, extra=self.extra)

    def flops(self) -> int:
        return 2 * self.z.size * int(self.weight.shape[1])


class GateLogitsBackward(Op):
    """dx = dz weight[:, :k], dextra = dz weight[:, k:], dweight = sum over tokens of dz^T [x extra]."""

    name = "gate_logits_backward"
    optional = ("extra", "dextra")
    rounded = ("weight",)

    def infer(self, dz: Tensor, x: Tensor, weight: Tensor, extra: Tensor | None = None) -> dict[str, Spec]:
        if tuple(dz.shape) != (*x.shape[:-1], weight.shape[0]):
            found = describe(dz=dz, x=x, weight=weight)
            raise ValueError(f"gate_logits_backward expects dz (..., N), x (..., k), weight (N, K): {found}")
        more = {} if extra is None else {"dextra": (extra.shape, extra.dtype)}
        return {"dx": (x.shape, x.dtype), "dweight": (weight.shape, "fp32"), **more}

    def reference(self, dz, x, weight, extra=None):
        k = x.shape[-1]
        read = x if extra is None else np.concatenate([x, extra], axis=-1)
        dweight = dz.reshape(-1, dz.shape[-1]).T @ read.reshape(-1, read.shape[-1])
        both = dz @ weight
        return {"dx": both[..., :k], "dweight": dweight} | ({} if extra is None else {"dextra": both[..., k:]})

    def flops(self) -> int:
        return 4 * self.dz.size * int(self.weight.shape[1])


def multiplier(factor: Any, *, scale: float, squash: bool) -> Any:
    """The number c that the sigmoid of a logit is multiplied with (see `Gated`); `factor`: (1,) or None."""
    if factor is None:
        return scale
    return scale * (sigmoid(factor) if squash else factor)


class Gated(Op):
    """y[t] = base[t] + c sigmoid(z[t])_group x[t - shift], where c = `scale` factor, or `scale` sigmoid(factor) where `squash` is
    set. Without base it is 0, without factor c = `scale`. The first `shift` rows are base's alone."""

    name = "gated"
    optional = ("base", "factor")

    def infer(self, x: Tensor, z: Tensor, base: Tensor | None = None, factor: Tensor | None = None) -> dict[str, Spec]:
        """Check the shapes; y has x's shape, and base's dtype if there is one."""
        same_shape = base is None or tuple(base.shape) == tuple(x.shape)
        if len(x.shape) != 3 or tuple(z.shape[:2]) != tuple(x.shape[:2]) or x.shape[2] % z.shape[2] or not same_shape:
            found = describe(x=x, z=z, base=base)
            raise ValueError(f"gated expects x and base (B, T, C) and z (B, T, N) where N divides C: {found}")
        if factor is not None and tuple(factor.shape) != (1,):
            raise ValueError(f"gated expects a factor (1,): {describe(factor=factor)}")
        if self.attrs["shift"] < 0:
            raise ValueError(f"gated expects a shift of 0 or more, found {self.attrs['shift']}")
        return {"y": (x.shape, x.dtype if base is None else base.dtype)}

    def reference(self, x, z, base=None, factor=None):
        T, C = x.shape[1:]
        gate = np.repeat(sigmoid(z), C // z.shape[2], axis=2) * multiplier(factor, scale=self.scale, squash=self.squash)
        y = np.zeros(x.shape) if base is None else base.astype(np.float64)
        y[:, self.shift :] += gate[:, self.shift :] * x[:, : max(T - self.shift, 0)]
        return {"y": y}

    def gradient(self, g, y):
        targets = {"dx": self.x, "dz": self.z} | ({} if self.factor is None else {"dfactor": self.factor})
        g.write(GatedBackward, targets, dy=y, x=self.x, z=self.z, factor=self.factor, **self.attrs)
        if self.base is not None:
            g.alias(self.base, y)

    def flops(self) -> int:
        return 2 * self.y.size + 12 * self.z.size


class GatedBackward(Op):
    """dx[t - shift] = c sigmoid(z[t])_group dy[t], and the last `shift` rows are 0;
    dz[t] = c s (1 - s) sum over the group's columns of dy[t] x[t - shift], s = sigmoid(z[t]);
    dfactor = c' sum over all of s dy[t] x[t - shift], c' the derivative of c."""

    name = "gated_backward"
    optional = ("factor", "dfactor")

    def infer(self, dy: Tensor, x: Tensor, z: Tensor, factor: Tensor | None = None) -> dict[str, Spec]:
        if tuple(dy.shape) != tuple(x.shape) or tuple(z.shape[:2]) != tuple(x.shape[:2]):
            raise ValueError(f"gated_backward expects dy and x (B, T, C), z (B, T, N): {describe(dy=dy, x=x, z=z)}")
        more = {} if factor is None else {"dfactor": ((1,), "fp32")}
        return {"dx": (x.shape, x.dtype), "dz": (z.shape, z.dtype), **more}

    def reference(self, dy, x, z, factor=None):
        """The class's formulas, summed over each group's C / N columns; `dots` is sum of dy[t] x[t - shift] per group."""
        B, T, C = x.shape
        N, shift = z.shape[2], self.shift
        s, c = sigmoid(z), multiplier(factor, scale=self.scale, squash=self.squash)
        dx, dots = np.zeros((B, T, C)), np.zeros((B, T, N))
        count = max(T - shift, 0)  # positions of x that are read
        dx[:, :count] = (c * np.repeat(s, C // N, axis=2) * dy)[:, shift:]
        dots[:, shift:] = (dy[:, shift:] * x[:, :count]).reshape(B, count, N, C // N).sum(3)
        results = {"dx": dx, "dz": c * s * (1 - s) * dots}
        if factor is not None:
            f = sigmoid(factor)
            results["dfactor"] = (s * dots).sum().reshape(1) * self.scale * (f * (1 - f) if self.squash else 1.0)
        return results

    def flops(self) -> int:
        return 3 * self.x.size + 16 * self.z.size


class Calls(Graph):
    def gate_logits(self, x: Tensor, weight: Tensor, extra: Tensor | None = None) -> Tensor:
        """Gate logits z (B, T, N) fp32 from the first K columns of x (B, T, C), weight (N, K); with `extra`, from the first K/2
        columns of both. Call it before the other ops that read x: the backward pass then adds these few columns to an existing
        gradient of x, and need not start one from zeros."""
        K = int(weight.shape[-1])
        if extra is not None and K % 2:
            raise ValueError(f"gate_logits with extra expects an even number of weights a gate: {describe(weight=weight)}")
        k = K if extra is None else K // 2
        extra_columns = None if extra is None else _first(extra, k)
        return self.apply(GateLogits, x=_first(x, k), weight=weight, extra=extra_columns).z

    def gated(
        self, x: Tensor, z: Tensor, *, base: Tensor | None = None, scale: float = 1.0, factor: Tensor | None = None,
        squash: bool = False, shift: int = 0,
    ) -> Tensor:  # fmt: skip
        """base + c sigmoid(z) x, (B, T, C): z (B, T, N) has a logit for each of N groups of neighbouring columns. c is `scale`,
        times the (1,) tensor `factor` or, with `squash`, its sigmoid. With `shift`, x is read that many positions earlier, and
        the first rows of the result are base's. The result has base's dtype, or x's where there is no base."""
        attrs = {"scale": float(scale), "squash": squash, "shift": shift}
        return self.apply(Gated, x=x, z=z, base=base, factor=factor, **attrs).y


def _first(x: Tensor, k: int) -> Tensor:
    """The first k columns of a tensor or of a view."""
    if x.shape[-1] < k:
        raise ValueError(f"gate_logits reads {k} columns: {describe(x=x)}")
    return x if x.shape[-1] == k else View(x.base, x.first_column, k)
