"""The peer's own ops. Reads a JSON list of {"op", "shape", "rows", "batch", "seq", "heads", "d_model", "vocab", "dtype"} from
standard input and prints the seconds of one call of PyTorch's equivalent of each (median of 5 calls or 0.1 s); null for none.

Products get operands that are bf16 already: PyTorch's autocast, which casts weights in every step, is not charged here.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F

Call = Callable[[], object]


def case(r: dict) -> Call | None:
    """A call of what PyTorch has for our op; forward alone or backward alone."""
    dtype = torch.bfloat16 if r["dtype"] == "bf16" else torch.float32
    M, name, shape = r["rows"], r["op"], r["shape"]
    B, T, C, H = r["batch"], r["seq"], r["d_model"], r["heads"]
    if name in ("linear", "linear_gelu", "linear_residual", "matmul"):
        N, K = shape
        x, w, b = torch.randn(M, K, dtype=dtype), torch.randn(N, K, dtype=dtype), torch.randn(N, dtype=dtype)
        residual = torch.randn(M, N)
        return {
            "linear": lambda: F.linear(x, w, b),
            "matmul": lambda: F.linear(x, w),
            "linear_gelu": lambda: F.gelu(F.linear(x, w, b), approximate="tanh"),
            "linear_residual": lambda: residual + F.linear(x, w, b),
        }[name]
    if name in ("matmul_dx", "matmul_dx_gelu", "matmul_dw"):
        N, K = shape
        dy, w, x = torch.randn(M, N, dtype=dtype), torch.randn(N, K, dtype=dtype), torch.randn(M, K, dtype=dtype)
        return {
            "matmul_dx": lambda: dy @ w,
            "matmul_dx_gelu": lambda: torch.ops.aten.gelu_backward(dy @ w, x, approximate="tanh"),
            "matmul_dw": lambda: dy.t() @ x,
        }[name]
    if name in ("attention", "attention_backward"):
        q, k, v = (torch.randn(B, T, H, C // H, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3))
        if name == "attention":
            with torch.no_grad():
                return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        dout = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    if name in ("layernorm", "layernorm_backward"):
        x, w, b = torch.randn(M, C), torch.randn(C), torch.randn(C)
        y, mean, rstd = torch.native_layer_norm(x, (C,), w, b, 1e-5)
        if name == "layernorm":
            return lambda: F.layer_norm(x, (C,), w, b).to(dtype)
        dy, stream = torch.randn_like(y), torch.randn_like(y)

        def backward() -> object:  # and what our one kernel does with the residual stream's gradient
            dx, *_ = torch.ops.aten.native_layer_norm_backward(dy, x, (C,), mean, rstd, w, b, [True] * 3)
            stream.add_(dx)
            return stream.sum(0) if r["bias"] else None, stream.to(dtype)

        return backward
    if name == "bias_grad":
        dy = torch.randn(M, shape[-1], dtype=dtype)
        return lambda: dy.sum(0, dtype=torch.float32)
    if name == "cast":
        x = torch.randn(M, shape[-1])
        return lambda: x.to(dtype)
    if name == "classifier":
        V, C = shape
        x, w = torch.randn(M, C, dtype=dtype, requires_grad=True), torch.randn(V, C, dtype=dtype, requires_grad=True)
        targets = torch.randint(0, V, (M,))
        return lambda: torch.autograd.grad(F.cross_entropy(F.linear(x, w).float(), targets), (x, w))
    if name == "embedding":
        wte, wpe, tokens = torch.randn(r["vocab"], C), torch.randn(T, C), torch.randint(0, r["vocab"], (B, T))
        return lambda: F.embedding(tokens, wte) + wpe
    if name == "embedding_dwte":
        dy, tokens, dw = torch.randn(M, C), torch.randint(0, r["vocab"], (M,)), torch.zeros(r["vocab"], C)
        return lambda: dw.index_add_(0, tokens, dy)
    if name == "embedding_dwpe":
        dy, positions = torch.randn(B, T, C), torch.arange(T)
        return lambda: torch.ops.aten.embedding_dense_backward(dy.sum(0), positions, shape[0], -1, False)
    if name == "sum_squares":
        g = torch.randn(*shape)
        return lambda: torch.linalg.vector_norm(g)
    if name == "adamw":
        p = torch.randn(*shape, requires_grad=True)
        p.grad = torch.randn(*shape)
        return torch.optim.AdamW([p], lr=1e-4, fused=True).step
    return None


def seconds(call: Call) -> float:
    for _ in range(2):
        call()
    samples: list[float] = []
    while len(samples) < 5 or sum(samples) < 0.1:
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return median(samples)


def main() -> None:
    torch.manual_seed(0)
    cases = [case(row) for row in json.load(sys.stdin)]
    print(json.dumps({"version": torch.__version__, "s": [seconds(c) if c else None for c in cases]}))


if __name__ == "__main__":
    main()
