"""Matrices turned over: a copy of one in another, or its sum with another. Shapes: x (R, C), y (C, R), in any format of storage."""

from barellm.program.dtypes import format_of
from barellm.program.graph import Graph
from barellm.program.ops.base import Op, Spec, Tensor, describe


class Transpose(Op):
    """y[j, i] = x[i, j]. A copy keeps every bit, those of codes and of a weight's planes too. Mode "add" is y += x^T, in fp32."""

    name = "transpose"

    def infer(self, x: Tensor) -> dict[str, Spec]:
        if len(x.shape) != 2 or x.dims:
            raise ValueError(f"transpose expects a matrix of fixed size: {describe(x=x)}")
        return {"y": (x.shape[::-1], x.dtype)}

    def reference(self, x):
        return {"y": x.T}

    def flops(self) -> int:
        return self.x.size if self.modes.get("y") == "add" else 0


class Calls(Graph):
    """Methods of Program for optimizers, which transpose tensors that a program keeps."""

    def transpose_copy(self, source: Tensor, target: Tensor) -> None:
        """Append target = source^T."""
        self._transpose("transpose_copy", source, target, "store")

    def transpose_add(self, source: Tensor, target: Tensor) -> None:
        """Append target += source^T."""
        self._transpose("transpose_add", source, target, "add")

    def _transpose(self, name: str, source: Tensor, target: Tensor, mode: str) -> None:
        both = describe(source=source, target=target)
        if source is target or source.shape != target.shape[::-1] or source.dtype != target.dtype:
            raise ValueError(f"{name} expects two matrices, (R, C) and (C, R), of one dtype: {both}")
        if mode == "add" and format_of(source.dtype).kind not in ("float", "planes"):
            raise ValueError(f"{name} expects numbers, not codes: {both}")
        self.apply(Transpose, into={"y": (target, mode)}, x=source)
