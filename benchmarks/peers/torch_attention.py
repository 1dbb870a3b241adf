"""PyTorch's scaled_dot_product_attention, causal, as a process that waits for its turns. Arguments: a JSON list of cases
{"batch", "seq", "heads", "D", "dtype"}. Prints a JSON line when ready; then answers each line {"case", "what", "calls"} of standard
input with the seconds of that many calls of "forward" or of "both" (forward and backward).

q, k and v are views (B, T, H, D) -> (B, H, T, D) as in nanoGPT; joining their gradients into one tensor is not charged.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F


def calls(batch: int, seq: int, heads: int, D: int, dtype: str) -> dict[str, Callable[[], object]]:
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    q, k, v = (torch.randn(batch, seq, heads, D, dtype=kind).transpose(1, 2).requires_grad_() for _ in range(3))
    dout = torch.randn(batch, seq, heads, D, dtype=kind).transpose(1, 2)

    def forward() -> object:
        with torch.no_grad():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both() -> object:
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), dout)

    return {"forward": forward, "both": both}


def main() -> None:
    torch.manual_seed(0)
    cases = json.loads(sys.argv[1])
    print(json.dumps({"version": torch.__version__, "threads": torch.get_num_threads()}), flush=True)
    at, made = -1, {}
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["case"] != at:
            at, made = asked["case"], {}  # one case's tensors at a time
            made = calls(**cases[at])
        call, seconds = made[asked["what"]], []
        for _ in range(asked["calls"]):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        print(json.dumps({"s": seconds}), flush=True)


if __name__ == "__main__":
    main()
