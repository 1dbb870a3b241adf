"""Matmuls with a quantized weight. Shapes: x (..., K), y (..., N), codes and scales as `program.quantization` packs (N, K)."""

from barellm.program.ops.base import Op, Spec, Tensor, describe
from barellm.program.ops.gemm.matmul import tokens
from barellm.program.quantization import packed_matrix, scheme


class QuantizedMatmul(Op):
    """y = x @ weight.T, accumulated in fp32, where weight (`columns`, K) is what the codes and scales of `weights` stand for. It
    has no gradient rule: matmuls become codes behind the reverse walk, those with frozen weights alone."""

    name = "quantized_matmul"
    product = True

    def infer(self, x: Tensor, codes: Tensor, scales: Tensor) -> dict[str, Spec]:
        how, N = scheme(self.attrs["weights"]), self.attrs["columns"]
        shapes = how.shapes(N, int(x.shape[-1]))
        if (codes.shape, scales.shape) != shapes or codes.dtype != how.codes:
            found = describe(x=x, codes=codes, scales=scales)
            expected = f"codes {shapes[0]} {how.codes} and scales {shapes[1]} for {N} columns"
            raise ValueError(f"quantized_matmul expects {expected}: {found}")
        return {"y": ((*x.shape[:-1], N), self.attrs.get("dtype", x.dtype))}

    def reference(self, x, codes, scales):
        return {"y": x @ packed_matrix(codes, scales, scheme(self.weights), self.columns, x.shape[-1]).T}

    def flops(self) -> int:
        return 2 * tokens(self.x) * self.columns * int(self.x.shape[-1])


class QuantizedMatmulDx(Op):
    """dx = dy @ weight with the same weight (`columns`, `depth`): the gradient of a matmul's input."""

    name = "quantized_matmul_dx"
    product = True

    def infer(self, dy: Tensor, codes: Tensor, scales: Tensor) -> dict[str, Spec]:
        shapes = scheme(self.attrs["weights"]).shapes(N := self.attrs["columns"], K := self.attrs["depth"])
        if (codes.shape, scales.shape) != shapes or dy.shape[-1] != N:
            expected = f"dy (..., {N}), codes {shapes[0]} and scales {shapes[1]}"
            raise ValueError(f"quantized_matmul_dx expects {expected}: {describe(dy=dy)}")
        return {"dx": ((*dy.shape[:-1], K), dy.dtype)}

    def reference(self, dy, codes, scales):
        return {"dx": dy @ packed_matrix(codes, scales, scheme(self.weights), self.columns, self.depth)}

    def flops(self) -> int:
        return 2 * tokens(self.dy) * self.columns * self.depth
