"""PyTorch's matrix products (cuBLAS on a GPU, MKL or oneDNN on a CPU) without bias, GELU or residual, as a process that waits for
its turns (serving.py). Arguments: a JSON list of cases {"op", "N", "K", "tokens", "dtype", "copies"}, and the device. Calls:
"warm", the same operands again and again, or "cold", `copies` of them in turn. The result has the operands' dtype, for weight
gradients too.
"""

from __future__ import annotations

import json
import sys
from itertools import cycle

import torch
from serving import Call, serve


def calls(*, device: str, op: str, N: int, K: int, tokens: int, dtype: str, copies: int) -> dict[str, Call]:
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    kind = {"dtype": kinds[dtype], "device": device}
    left, right, result = {
        "fprop": ((tokens, K), (N, K), (tokens, N)),
        "dgrad": ((tokens, N), (N, K), (tokens, K)),
        "wgrad": ((tokens, N), (tokens, K), (N, K)),
    }[op]
    sets = [tuple(torch.randn(*shape, **kind) for shape in (left, right, result)) for _ in range(copies)]

    def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        if op == "fprop":
            torch.mm(a, b.t(), out=out)
        elif op == "dgrad":
            torch.mm(a, b, out=out)
        else:
            torch.mm(a.t(), b, out=out)

    turn = cycle(sets)
    return {"warm": lambda: product(*sets[0]), "cold": lambda: product(*next(turn))}


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]), calls, sys.argv[2])
