"""Sums of tensors, each times a number that may be learned. Shapes: terms and y (..., C), all equal; a coefficient that is a tensor
is (1,): a parameter, or one element of a parameter vector (`Calls.element`)."""

from typing import Any

from barellm.program.graph import Graph
from barellm.program.ops.base import Op, Spec, Tensor, View, describe

MOST = 4
TERMS = tuple(f"x{i}" for i in range(MOST))
COEFFICIENTS = tuple(f"k{i}" for i in range(MOST))


class Mix(Op):
    """y = sum of k_i x_i. numbers[i] is k_i where that is a number, and None where it is the tensor input "k_i"."""

    name = "mix"
    optional = (*TERMS[1:], *COEFFICIENTS)

    def infer(self, x0: Tensor, **others: Tensor) -> dict[str, Spec]:
        for name, t in others.items():
            expected = x0.shape if name in TERMS else (1,)
            if tuple(t.shape) != tuple(expected):
                raise ValueError(f"mix expects terms of one shape and coefficients (1,): {describe(x0=x0, **{name: t})}")
        return {"y": (x0.shape, self.attrs["dtype"])}

    def reference(self, x0, **others):
        terms = {"x0": x0, **others}
        return {"y": sum(self.coefficient(i, others) * terms[TERMS[i]] for i in range(len(self.numbers)))}

    def coefficient(self, i: int, arrays: dict[str, Any]) -> Any:
        return arrays[COEFFICIENTS[i]] if self.numbers[i] is None else self.numbers[i]

    def gradient(self, g, y):
        """One `MixBackward` for all terms and tensor coefficients. The gradient of a term times 1.0 in y's dtype is aliased."""
        targets: dict[str, Tensor] = {}
        operands: dict[str, Tensor] = {}
        dtypes = [self.inputs[x].dtype for x, _ in zip(TERMS, self.numbers, strict=False)]
        for i, number in enumerate(self.numbers):
            x, k = TERMS[i], COEFFICIENTS[i]
            if number == 1.0 and dtypes[i] == y.dtype:
                dtypes[i] = ""  # nothing to compute: an alias
                continue
            targets[f"d{x}"] = self.inputs[x]
            if number is None:
                targets[f"d{k}"] = self.inputs[k]
                operands |= {x: self.inputs[x], k: self.inputs[k]}
        if targets:
            g.write(MixBackward, targets, dy=y, **operands, numbers=self.numbers, dtypes=tuple(dtypes))
        for x, dtype in zip(TERMS, dtypes, strict=False):
            if not dtype:
                g.alias(self.inputs[x], y)

    def flops(self) -> int:
        return (2 * len(self.numbers) - 1) * self.y.size


class MixBackward(Op):
    """dx_i = k_i dy in dtypes[i], the dtype of x_i, or no such output where that is "": the gradient is dy itself, of a term times
    1 in dy's dtype. dk_i = sum of dy x_i over all elements, for each coefficient that is a tensor. `numbers` as in `Mix`."""

    name = "mix_backward"
    optional = (*TERMS, *COEFFICIENTS, *(f"d{x}" for x in TERMS), *(f"d{k}" for k in COEFFICIENTS))

    def infer(self, dy: Tensor, **others: Tensor) -> dict[str, Spec]:
        """Check the shapes; outputs are dx_i with a dtype in `dtypes`, and dk_i (1,) for tensor coefficients."""
        for name, t in others.items():
            if tuple(t.shape) != tuple(dy.shape if name in TERMS else (1,)):
                raise ValueError(f"mix_backward expects terms of dy's shape: {describe(dy=dy, **{name: t})}")
        outputs: dict[str, Spec] = {}
        for i, number in enumerate(self.numbers):
            if self.dtypes[i]:
                outputs[f"dx{i}"] = (dy.shape, self.dtypes[i])
            if number is None:
                outputs[f"dk{i}"] = ((1,), "fp32")
        return outputs

    def reference(self, dy, **others):
        results = {}
        for i, number in enumerate(self.numbers):
            if number is None:
                results[f"dx{i}"] = others[COEFFICIENTS[i]] * dy
                results[f"dk{i}"] = (dy * others[TERMS[i]]).sum().reshape(1)
            elif self.dtypes[i]:
                results[f"dx{i}"] = number * dy
        return results

    def flops(self) -> int:
        terms = zip(self.numbers, self.dtypes, strict=True)
        return sum((3 if number is None else int(number != 1.0)) * self.dy.size for number, dtype in terms if dtype)


class Calls(Graph):
    def mix(self, *terms: tuple[Tensor, float | Tensor], dtype: str = "") -> Tensor:
        """The sum of up to four tensors (..., C), each times its coefficient, in the dtype of the residual stream or in `dtype`. A
        coefficient is a number or a (1,) tensor; the gradient of a term times 1.0 is the one that arrives, so it costs nothing."""
        if not 1 <= len(terms) <= MOST:
            raise ValueError(f"mix expects 1 to {MOST} terms, found {len(terms)}")
        operands: dict[str, Any] = {}
        numbers: list[float | None] = []
        for i, (x, k) in enumerate(terms):
            operands[TERMS[i]] = x
            if isinstance(k, Tensor):
                operands[COEFFICIENTS[i]] = k
            numbers.append(None if isinstance(k, Tensor) else float(k))
        return self.apply(Mix, **operands, numbers=tuple(numbers), dtype=dtype or self.precision.stream).y

    def element(self, vector: Tensor, i: int) -> View:
        """Element i of a parameter vector (L,), as a (1,) tensor. Its gradient is that element of the vector's gradient; elements
        that no op uses have the gradient 0."""
        if len(vector.shape) != 1 or not 0 <= i < vector.shape[0]:
            raise ValueError(f"element expects a vector (L,) and 0 <= i < L: i {i}, {describe(vector=vector)}")
        return View(vector, i, 1)
