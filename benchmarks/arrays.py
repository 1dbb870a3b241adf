"""Functions on arrays beside PyTorch's eager ones: what a call costs, and how much of the machine it uses.

    python benchmarks/arrays.py --out benchmarks/results/arrays.json

All variants of a case take turns in one process, and every sample is kept. "ours" makes a fresh result as PyTorch does, and
"into" has one by `out=`. Bytes are the fewest that must move; the bound is a loop that moves bytes in the same mix, measured in
the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # else PyTorch's threads spin while ours work

import ml_dtypes
import numpy as np
import torch

from barellm import kernels
from barellm.cpu.backend import Bench
from barellm.cpu.isa import host
from barellm.cpu.threads import thread_count

TURNS, LEAST = 5, 0.01  # turns of each variant, seconds of a turn
Run = Callable[[], Any]


@dataclass
class Case:
    """`mix`: tensors read and written; `nbytes` and `flops` of one call, whose products are of `dtype`; `runs` by variant."""

    name: str
    shape: str
    nbytes: int
    runs: dict[str, Run]
    mix: tuple[int, int] = (1, 1)
    flops: int = 0
    dtype: str = "fp32"
    samples: dict[str, list[float]] = field(default_factory=dict)

    def measure(self) -> None:
        counts = {}
        for name, run in self.runs.items():
            run()
            begin = time.perf_counter()
            run()
            counts[name] = max(1, round(LEAST / (time.perf_counter() - begin)))
        for _ in range(TURNS):
            for name, run in self.runs.items():
                begin = time.perf_counter()
                for _ in range(counts[name]):
                    run()
                self.samples.setdefault(name, []).append((time.perf_counter() - begin) / counts[name])


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def rows(count: int, C: int) -> list[Case]:
    """Norms and softmax, forward and backward, of `count` rows."""
    x, w, dy = normal(count, C), normal(C), normal(count, C)
    tx, tw, tdy = (torch.from_numpy(a) for a in (x, w, dy))
    shape, nbytes = f"{count} x {C}", 4 * x.size
    forward: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...], Run]] = {
        "layernorm": (kernels.layernorm, (x, w, w), lambda: torch.nn.functional.layer_norm(tx, (C,), tw, tw)),
        "rmsnorm": (kernels.rmsnorm, (x, w), lambda: torch.nn.functional.rms_norm(tx, (C,), tw, 1e-5)),
        "softmax": (kernels.softmax, (x,), lambda: torch.softmax(tx, -1)),
    }
    cases = []
    for name, (function, given, peer) in forward.items():
        out = function(*given)
        runs: dict[str, Run] = {
            "ours": lambda f=function, g=given: f(*g),
            "into": lambda f=function, g=given, out=out: f(*g, out=out),
            "torch": peer,
        }
        cases.append(Case(name, shape, 2 * nbytes, runs))
        leaves = [torch.from_numpy(a).clone().requires_grad_() for a in given]
        y = {
            "layernorm": lambda t: torch.nn.functional.layer_norm(t[0], (C,), t[1], t[2]),
            "rmsnorm": lambda t: torch.nn.functional.rms_norm(t[0], (C,), t[1], 1e-5),
            "softmax": lambda t: torch.softmax(t[0], -1),
        }[name](leaves)
        vjp_fn = kernels.vjp(function, *given)[1]
        back: dict[str, Run] = {
            "ours": lambda vjp_fn=vjp_fn: vjp_fn(dy),
            "torch": lambda y=y, leaves=leaves: torch.autograd.grad(y, leaves, tdy, retain_graph=True),
        }
        cases.append(Case(f"{name} backward", shape, 3 * nbytes, back, mix=(2, 1)))
    return cases


def product(M: int, K: int, N: int, kind: Any = np.float32) -> Case:
    a, b = normal(M, K).astype(kind), normal(N, K).astype(kind).T
    size = a.dtype.itemsize
    ta, tb = (torch.from_numpy(np.ascontiguousarray(v, np.float32)).to(torch.bfloat16 if size == 2 else torch.float32)
              for v in (a, b.T))  # fmt: skip
    out = kernels.matmul(a, b)
    runs: dict[str, Run] = {
        "ours": lambda: kernels.matmul(a, b),
        "into": lambda: kernels.matmul(a, b, out=out),
        "torch": lambda: ta @ tb.T,
    }
    nbytes = size * (M * K + K * N + M * N)
    return Case("matmul" if size == 4 else "matmul bf16", f"{M} x {K} x {N}", nbytes, runs, (1, 0), 2 * M * K * N)


def attention(B: int, T: int, H: int, D: int, *, causal: bool = True, dtype: str = "fp32") -> list[Case]:
    """Attention, forward and backward. The backward pass has four products: the scores that are computed again are not counted."""
    kinds = {"fp32": (np.float32, torch.float32), "bf16": (ml_dtypes.bfloat16, torch.bfloat16)}
    kind, torch_kind = kinds[dtype]
    q, k, v = (normal(B, T, H, D).astype(kind) for _ in range(3))
    leaves = [torch.from_numpy(normal(B, T, H, D)).transpose(1, 2).to(torch_kind).requires_grad_() for _ in range(3)]
    tq, tk, tv = (a.detach() for a in leaves)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    out, vjp_fn = kernels.vjp(kernels.attention, q, k, v, causal=causal)
    y = sdpa(*leaves, is_causal=causal)
    runs: dict[str, Run] = {
        "ours": lambda: kernels.attention(q, k, v, causal=causal),
        "into": lambda: kernels.attention(q, k, v, causal=causal, out=out),
        "torch": lambda: sdpa(tq, tk, tv, is_causal=causal),
    }
    back: dict[str, Run] = {"ours": lambda: vjp_fn(q), "torch": lambda: torch.autograd.grad(y, leaves, tq, retain_graph=True)}
    name = "attention" + ("" if causal else " over all keys") + ("" if dtype == "fp32" else f" {dtype}")
    shape, pairs = f"{B} x {T} x {H} x {D}", B * H * (T * (T + 1) // 2 if causal else T * T)
    return [
        Case(name, shape, 4 * q.nbytes, runs, (1, 0), 4 * pairs * D, dtype),
        Case(f"{name} backward", shape, 8 * q.nbytes, back, (1, 0), 8 * pairs * D, dtype),
    ]


def largest(count: int, C: int, K: int) -> Case:
    x = normal(count, C)
    tx = torch.from_numpy(x)
    runs: dict[str, Run] = {"ours": lambda: kernels.top_k(x, K), "torch": lambda: torch.topk(tx, K)}
    runs["numpy argsort"] = lambda: np.argsort(-x, -1, kind="stable")[:, :K]
    return Case(f"top_k of {K}", f"{count} x {C}", 4 * x.size, runs, (1, 0))


def cases() -> list[Case]:
    found = [case for count, C in ((4, 64), (512, 768)) for case in rows(count, C)]
    for C in (768, 4096, 40_000, 100_001, 1_000_003):
        found += rows(1 << 23 >> (C - 1).bit_length() if C < 10_000 else 8_000_008 // C, C)
    found += [product(n, n, n) for n in (16, 64, 512, 2048)]
    found += [product(M, 4096, 4096) for M in (1, 4, 16, 64)]
    for causal in (True, False):
        found += attention(1, 1024, 12, 64, causal=causal) + attention(1, 1024, 12, 64, causal=causal, dtype="bf16")
    return [*found, largest(1, 50_257, 50), largest(64, 50_257, 50)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    torch.set_num_threads(thread_count())
    bench = Bench()
    bounds = {f"{r}:{w}": bench.bandwidth((r, w, 0)) for r, w in ((1, 0), (1, 1), (2, 1))}
    peaks = {dtype: bench.peak(dtype) for dtype in ("fp32", "bf16")}
    bench.close()
    results: list[dict[str, Any]] = []
    for case in cases():
        if args.only not in case.name:
            continue
        case.measure()
        best = {name: median(s) for name, s in case.samples.items()}
        ours = best.get("into", best["ours"])
        bound = max(case.nbytes / bounds[f"{case.mix[0]}:{case.mix[1]}"], case.flops / peaks[case.dtype])
        print(f"{case.name:20} {case.shape:22}", *(f"{n} {1e6 * t:.0f} us" for n, t in best.items()),
              f"{100 * bound / ours:.0f} % of the bound", sep="  ", flush=True)  # fmt: skip
        results.append({"name": case.name, "shape": case.shape, "nbytes": case.nbytes, "flops": case.flops,
                        "bound_s": bound, "samples_s": case.samples})  # fmt: skip
    facts = {"processor": host().cpu, "isa": host().name, "threads": thread_count(), "torch": torch.__version__}
    facts |= {"bytes_per_s": bounds, "flops_per_s": peaks["fp32"], "bf16_flops_per_s": peaks["bf16"]}
    args.out.write_text(json.dumps(facts | {"cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
