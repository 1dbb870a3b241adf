"""PyTorch's scaled_dot_product_attention, causal, as a process that waits for its turns (serving.py). Arguments: a JSON list of
cases {"batch", "seq", "heads", "D", "dtype"}, with "kv_heads" where they are fewer, and the device. Calls: "forward", or "both"
(forward and backward).

q, k and v are views (B, T, H, D) -> (B, H, T, D) as in nanoGPT; joining their gradients into one tensor is not charged. On a GPU
bf16 must take the flash backend, or it fails.
"""

from __future__ import annotations

import contextlib
import json
import sys

import torch
import torch.nn.functional as F
from serving import Call, serve
from torch.nn.attention import SDPBackend, sdpa_kernel


def calls(*, device: str, batch: int, seq: int, heads: int, D: int, dtype: str, kv_heads: int = 0) -> dict[str, Call]:
    kind = {"dtype": torch.bfloat16 if dtype == "bf16" else torch.float32, "device": device}
    counts = heads, kv_heads or heads, kv_heads or heads
    q, k, v = (torch.randn(batch, seq, n, D, **kind).transpose(1, 2).requires_grad_() for n in counts)
    dout = torch.randn(batch, seq, heads, D, **kind).transpose(1, 2)
    flash = device == "cuda" and dtype == "bf16"

    def backend():
        return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if flash else contextlib.nullcontext()

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads > 0)

    def forward() -> object:
        with torch.no_grad(), backend():
            return attend()

    def both() -> object:
        with backend():
            return torch.autograd.grad(attend(), (q, k, v), dout)

    return {"forward": forward, "both": both}


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]), calls, sys.argv[2])
