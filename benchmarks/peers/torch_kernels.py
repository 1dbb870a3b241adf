"""What PyTorch has of the kernels that no step of GPT-2 has, as a process that waits for its turns (serving.py). Arguments: a JSON
list of cases {"op", its sizes, "dtype"}, and the device. The calls of a case are "run", and behind it the name of a way of several.

Products of fp32 are done in fp32.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from serving import Call, serve

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EPS = 1e-5
Kind = dict[str, Any]


def product(kind: Kind, *, rows: int, columns: int, depth: int) -> dict[str, Call]:
    """A product with the matrix as nn.Linear stores it."""
    x, w, out = (torch.randn(rows, depth, **kind), torch.randn(columns, depth, **kind), torch.empty(rows, columns, **kind))
    return {"run dense": lambda: torch.mm(x, w.t(), out=out)}


def attention(kind: Kind, *, batch: int, seq: int, heads: int, D: int, window: int, both: bool) -> dict[str, Call]:
    """Dense and causal, and by flex_attention the last `window` keys, where there is a window."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = (torch.randn(batch, heads, seq, D, **kind).requires_grad_(both) for _ in range(3))
    dout = torch.randn_like(q)

    def call(attend: Callable[[], torch.Tensor]) -> Call:
        if both:
            return lambda: torch.autograd.grad(attend(), (q, k, v), dout)
        return torch.no_grad()(attend)

    found = {"run dense": call(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))}
    if window:
        seen = lambda b, h, i, j: (i >= j) & (i - j < window)  # noqa: E731
        blocks = create_block_mask(seen, None, None, seq, seq, device=str(kind["device"]))
        compiled: Any = torch.compile(flex_attention)
        found["run flex"] = call(lambda: compiled(q, k, v, block_mask=blocks))
    return found


def rows(kind: Kind, *, name: str, count: int, columns: int, backward: bool) -> dict[str, Call]:
    """Softmax and norms of rows; backward alone, with respect to x."""
    x, weight = torch.randn(count, columns, **kind), torch.ones(columns, **kind)
    dy = torch.randn_like(x)
    if not backward:
        return {
            "run": {
                "softmax": lambda: F.softmax(x, -1),
                "layernorm": lambda: F.layer_norm(x, (columns,), weight, weight, EPS),
                "rmsnorm": lambda: F.rms_norm(x, (columns,), weight, EPS),
            }[name]
        }
    if name == "softmax":
        y = F.softmax(x, -1)
        return {"run": lambda: torch.ops.aten._softmax_backward_data(dy, y, -1, x.dtype)}
    if name == "layernorm":
        _, mean, rstd = torch.native_layer_norm(x, (columns,), weight, weight, EPS)
        requested = [True, False, False]
        given = (dy, x, (columns,), mean, rstd, weight, weight, requested)
        return {"run": lambda: torch.ops.aten.native_layer_norm_backward(*given)}
    x.requires_grad_()
    y = F.rms_norm(x, (columns,), weight, EPS)
    return {"run": lambda: torch.autograd.grad(y, x, dy, retain_graph=True)}


def dropout(kind: Kind, *, shape: list[int], rate: float) -> dict[str, Call]:
    x = torch.randn(*shape, **kind)
    return {"run": lambda: F.dropout(x, rate, training=True)}


OPS = {"product": product, "attention": attention, "rows": rows, "dropout": dropout}


def calls(*, device: str, op: str, dtype: str, **sizes: Any) -> dict[str, Call]:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    return OPS[op]({"dtype": DTYPES[dtype], "device": device}, **sizes)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]), calls, sys.argv[2])
