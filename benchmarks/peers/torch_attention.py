"""PyTorch's scaled_dot_product_attention, causal, as a process that waits for its turns (serving.py). Arguments: a JSON list of
cases {"batch", "seq", "heads", "D", "dtype"}, with "kv_heads" where they are fewer, and the device. Calls: "forward", or "both"
(forward and backward); behind them the name of a backend ("forward cudnn"), which then must do it or fails.

q, k and v are views (B, T, H, D) -> (B, H, T, D) as in nanoGPT; joining their gradients into one tensor is not charged.
"""

from __future__ import annotations

import contextlib
import json
import sys
from functools import partial

import torch
import torch.nn.functional as F
from serving import Call, serve
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}


def calls(*, device: str, batch: int, seq: int, heads: int, D: int, dtype: str, kv_heads: int = 0) -> dict[str, Call]:
    kind = {"dtype": torch.bfloat16 if dtype == "bf16" else torch.float32, "device": device}
    counts = heads, kv_heads or heads, kv_heads or heads
    q, k, v = (torch.randn(batch, seq, n, D, **kind).transpose(1, 2).requires_grad_() for n in counts)
    dout = torch.randn(batch, seq, heads, D, **kind).transpose(1, 2)

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads > 0)

    def forward(backend: SDPBackend | None) -> object:
        with torch.no_grad(), only(backend):
            return attend()

    def both(backend: SDPBackend | None) -> object:
        with only(backend):
            return torch.autograd.grad(attend(), (q, k, v), dout)

    found: dict[str, Call] = {"forward": lambda: forward(None), "both": lambda: both(None)}
    for name, backend in BACKENDS.items():
        found |= {f"forward {name}": partial(forward, backend), f"both {name}": partial(both, backend)}
    return found


def only(backend: SDPBackend | None) -> contextlib.AbstractContextManager[None]:
    """Within the context no other backend is taken; None: whichever PyTorch takes."""
    return contextlib.nullcontext() if backend is None else sdpa_kernel(backend)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]), calls, sys.argv[2])
