"""Products with a weight matrix, their two gradients, and the bias.

Shapes: x (..., K), weight (N, K), y (..., N); leading axes are tokens."""

from barellm.program.graph import Graph
from barellm.program.ops.base import Op, Spec, Tensor, describe
from barellm.program.ops.pointwise.elementwise import Rescale, operand


def tokens(t: Tensor) -> int:
    return t.size // int(t.shape[-1])


class Matmul(Op):
    """y = x @ weight.T, accumulated in fp32. With the attribute `back` the gradient of x, and only that, is multiplied by it."""

    name = "matmul"
    rounded = ("weight",)
    product = True

    def infer(self, x: Tensor, weight: Tensor) -> dict[str, Spec]:
        if len(weight.shape) != 2 or x.shape[-1] != weight.shape[1]:
            raise ValueError(f"matmul expects x (..., K) and weight (N, K): {describe(x=x, weight=weight)}")
        return {"y": ((*x.shape[:-1], weight.shape[0]), self.attrs.get("dtype", x.dtype))}

    def reference(self, x, weight):
        return {"y": x @ weight.T}

    def gradient(self, g, y):
        dy = g.cast(y, self.x.dtype)
        if "back" in self.attrs:
            g.write(Rescale, {"y": self.x}, x=g.apply(MatmulDx, dy=dy, weight=self.weight).dx, forward=self.back, backward=1.0)
        else:
            g.write(MatmulDx, {"dx": self.x}, dy=dy, weight=self.weight)
        g.write(MatmulDw, {"dweight": self.weight}, dy=dy, x=self.x)

    def flops(self) -> int:
        return 2 * tokens(self.x) * self.weight.size


class MatmulDx(Op):
    """dx = dy @ weight: the gradient of a matmul's input, or the matmul with a weight that is stored the other way round."""

    name = "matmul_dx"
    rounded = ("weight",)
    product = True

    def infer(self, dy: Tensor, weight: Tensor) -> dict[str, Spec]:
        if dy.shape[-1] != weight.shape[0]:
            raise ValueError(f"matmul_dx expects dy (..., N) and weight (N, K): {describe(dy=dy, weight=weight)}")
        return {"dx": ((*dy.shape[:-1], weight.shape[1]), dy.dtype)}

    def reference(self, dy, weight):
        return {"dx": dy @ weight}

    def gradient(self, g, dx):
        d = g.cast(dx, self.dy.dtype)
        g.write(Matmul, {"y": self.dy}, x=d, weight=self.weight)
        g.write(MatmulDw, {"dweight": self.weight}, dy=self.dy, x=d)

    def flops(self) -> int:
        return 2 * tokens(self.dy) * self.weight.size


class MatmulDw(Op):
    """dweight = dy.T @ x, summed over tokens in order: one accumulation chain per element."""

    name = "matmul_dw"
    product = True

    def infer(self, dy: Tensor, x: Tensor) -> dict[str, Spec]:
        if dy.shape[:-1] != x.shape[:-1]:
            raise ValueError(f"matmul_dw expects dy (tokens, N) and x (tokens, K): {describe(dy=dy, x=x)}")
        return {"dweight": ((dy.shape[-1], x.shape[-1]), "fp32")}

    def reference(self, dy, x):
        return {"dweight": dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])}

    def flops(self) -> int:
        return 2 * self.dy.size * int(self.x.shape[-1])


class Bias(Op):
    """y = x + bias, bias (N) over the last axis."""

    name = "bias"
    flops_per_element = (1, "x")

    def infer(self, x: Tensor, bias: Tensor) -> dict[str, Spec]:
        if bias.shape != x.shape[-1:]:
            raise ValueError(f"bias expects x (..., N) and bias (N): {describe(x=x, bias=bias)}")
        return {"y": (x.shape, x.dtype)}

    def reference(self, x, bias):
        return {"y": x + bias}

    def gradient(self, g, y):
        g.alias(self.x, y)
        g.write(BiasGrad, {"dbias": self.bias}, dy=y)


class BiasGrad(Op):
    """dbias = sum of dy over tokens, in a tree fixed by the token count."""

    name = "bias_grad"
    flops_per_element = (1, "dy")

    def infer(self, dy: Tensor) -> dict[str, Spec]:
        return {"dbias": (dy.shape[-1:], "fp32")}

    def reference(self, dy):
        return {"dbias": dy.reshape(-1, dy.shape[-1]).sum(0)}


class Calls(Graph):
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed_weight: bool = False) -> Tensor:
        """x (..., K), weight (N, K), bias (N) -> x @ weight.T + bias (..., N). `transposed_weight`: weight is stored as (K, N)."""
        x = operand(self, x)
        if not transposed_weight:
            self.store.linears[weight.name] = weight
            y = self.apply(Matmul, x=x, weight=weight).y
        elif len(weight.shape) != 2 or x.shape[-1] != weight.shape[0]:
            raise ValueError(f"linear expects x (..., K) and a transposed weight (K, N): {describe(x=x, weight=weight)}")
        else:
            y = self.apply(MatmulDx, dy=x, weight=weight).dx
        y = y if bias is None else self.apply(Bias, x=y, bias=bias).y
        adapter = self.store.adapters.get(weight.name)
        return y if adapter is None else adapter.append(self, x, y)

    def scaled_linear(self, x: Tensor, weight: Tensor, *, forward: float, backward: float) -> Tensor:
        """x (..., K), weight (N, K) -> (..., N): the matmul times `forward`. The gradient of x is the gradient that arrives times
        the weight, times `backward`; that of the weight is not scaled."""
        y = self.apply(Matmul, x=operand(self, x), weight=weight, back=float(backward)).y
        return self.apply(Rescale, x=y, forward=float(forward), backward=1.0).y
