"""Matmuls with a quantized weight. Shapes: x (..., K), codes and scales as `program.quantization` packs a matrix (N, K), y
(..., N)."""

from __future__ import annotations

from barellm.program.ops.base import Op, Spec, Tensor, describe
from barellm.program.ops.gemm.matmul import tokens
from barellm.program.quantization import packed_matrix, scheme


class QuantizedMatmul(Op):
    """y = x @ weight.T, accumulated in fp32, where weight (`columns`, K) is what the codes and scales of `weights` stand for. It
    has no gradient: weights that are trained are numbers."""

    name = "quantized_matmul"
    product = True

    def infer(self, x: Tensor, codes: Tensor, scales: Tensor) -> dict[str, Spec]:
        how, N = scheme(self.attrs["weights"]), self.attrs["columns"]
        shapes = how.shapes(N, int(x.shape[-1]))
        if (codes.shape, scales.shape) != shapes or codes.dtype != how.codes:
            found = describe(x=x, codes=codes, scales=scales)
            raise ValueError(
                f"quantized_matmul expects codes {shapes[0]} {how.codes} and scales {shapes[1]} for {N} columns: {found}"
            )
        return {"y": ((*x.shape[:-1], N), self.attrs.get("dtype", x.dtype))}

    def reference(self, x, codes, scales):
        w_NK = packed_matrix(codes, scales, scheme(self.weights), self.columns, x.shape[-1])
        return {"y": x @ w_NK.T}

    def flops(self) -> int:
        return 2 * tokens(self.x) * self.columns * int(self.x.shape[-1])
