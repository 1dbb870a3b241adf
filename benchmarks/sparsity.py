"""Times of block-sparse attention beside dense attention and PyTorch's: `python -m benchmarks.sparsity --out FILE`.

Our sides of one length take turns in this process, forward and forward with backward; each time is a median. After them come
PyTorch's, whose threads spin when they have nothing to do: scaled_dot_product_attention, causal and with a mask of T x T, and
flex_attention, compiled, which has a forward pass only on a CPU. `density`: pairs in listed blocks for each pair of dense causal
attention.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from barellm.cpu.isa import host
from barellm.cpu.step import CpuSession
from barellm.cpu.threads import thread_count
from barellm.program import layouts, ops
from barellm.program.builder import Program, Store
from barellm.program.layouts import Layout
from barellm.program.tensor import Dim

LAYOUTS = (
    "banded:2",
    "local:256",
    "local:64+fixed:512:64",
    "watts-strogatz:8:0.2:1",
    "barabasi-albert:8:1",
    "local:128+strided:256",
    "spread:40:1",
    "all",
)
Sides = dict[tuple[str, str], Callable[[], Any]]  # (name, "forward" or "both")


def program(T: int, heads: int, D: int, layout: Layout | None, dtype: str, *, backward: bool) -> Program:
    """One attention, q, k and v being columns of one tensor."""
    p = Program(Store())
    dims, C = (Dim("batch", 1), Dim("seq", T)), heads * D
    qkv = p.input("qkv", (*dims, 3 * C), dtype)
    operands: dict[str, Any] = dict(zip("qkv", p.split(qkv, 3), strict=True)) | {"heads": heads, "kv_heads": heads}
    kinds = (ops.Attention, ops.AttentionBackward)
    if layout is None:
        operands |= {"rate": 0.0, "stream": 0}
    else:
        kinds = (ops.BlockSparseAttention, ops.BlockSparseAttentionBackward)
        operands |= {name: p.constant(name, values, "i32") for name, values in layout.tables.items()}
        operands["layout"] = layout
    saved = p.apply(kinds[0], **operands)
    if backward:
        dout = p.input("dout", (*dims, C), dtype)
        views = p.split(p.activation("dqkv", qkv.shape, dtype), 3)
        into = {name: (view, "store") for name, view in zip(("dq", "dk", "dv"), views, strict=True)}
        p.apply(kinds[1], into=into, **operands, out=saved.out, dout=dout, lse=saved.lse)
    return p


def ours(T: int, heads: int, D: int, found: dict[str, Layout | None], dtype: str) -> Sides:
    sides: Sides = {}
    r = np.random.default_rng(0)
    qkv, dout = r.standard_normal((1, T, 3 * heads * D)), r.standard_normal((1, T, heads * D))
    for name, layout in found.items():
        for what in ("forward", "both"):
            session = CpuSession({"op": program(T, heads, D, layout, dtype, backward=what == "both")})
            session.write("qkv", qkv)
            if what == "both":
                session.write("dout", dout)
            sides[name, what] = lambda session=session: session.run("op", batch=1, seq=T)
    return sides


def theirs(T: int, heads: int, D: int, found: dict[str, Layout | None], flexed: str, dtype: str) -> Sides:
    """PyTorch: dense with a flag and with a mask, and flex_attention of one layout."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from torch.nn.functional import scaled_dot_product_attention as dense

    torch.set_num_threads(thread_count())
    of = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    q, k, v = (torch.randn(1, heads, T, D, dtype=of, requires_grad=True) for _ in range(3))
    dout, layout = torch.randn(1, heads, T, D, dtype=of), found[flexed]
    assert layout is not None
    seen = torch.from_numpy(np.stack([layout.dense(h) for h in range(heads)]))[None]

    def both(run: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(run(), (q, k, v), dout)

    def forward(run: Callable[[], Any]) -> Callable[[], Any]:
        return torch.no_grad()(run)

    causal = lambda: dense(q, k, v, is_causal=True)  # noqa: E731
    masked = lambda: dense(q, k, v, attn_mask=seen)  # noqa: E731
    blocks = create_block_mask(lambda b, h, i, j: seen[0, h, i, j], 1, heads, T, T, device="cpu")
    compiled: Any = torch.compile(flex_attention)
    given = [x.detach() for x in (q, k, v)]
    return {
        ("PyTorch, causal", "forward"): forward(causal),
        ("PyTorch, causal", "both"): both(causal),
        (f"PyTorch, mask of {flexed}", "forward"): forward(masked),
        (f"PyTorch, mask of {flexed}", "both"): both(masked),
        (f"flex_attention of {flexed}", "forward"): forward(lambda: compiled(*given, block_mask=blocks)),
    }


def turns(sides: Sides, rounds: int) -> dict[tuple[str, str], list[float]]:
    """Seconds of each side, which take turns after one run that is not counted."""
    for run in sides.values():
        run()
    times: dict[tuple[str, str], list[float]] = {key: [] for key in sides}
    for _ in range(rounds):
        for key, run in sides.items():
            start = time.perf_counter()
            run()
            times[key].append(time.perf_counter() - start)
    return times


def measure(T: int, heads: int, D: int, block: int, rounds: int, flexed: str, dtype: str) -> list[dict[str, Any]]:
    found: dict[str, Layout | None] = {"dense": None}
    found |= {text: layouts.parse(text, length=T, block=block, heads=heads) for text in LAYOUTS}
    times = turns(ours(T, heads, D, found, dtype), rounds)
    if flexed:
        times |= turns(theirs(T, heads, D, found, flexed, dtype), rounds)
    rows = []
    for name in dict.fromkeys(name for name, _ in times):
        layout = found.get(name)
        row: dict[str, Any] = {"side": name, "T": T, "heads": heads, "D": D, "block": block}
        row["density"] = layout.density if layout else 1.0 if name == "dense" else None
        row |= {f"{what}_ms": 1e3 * median(of) for (who, what), of in times.items() if who == name}
        rows.append(row)
    whole = rows[0]
    for row in rows:
        row |= {f"{what}_to_dense": row[f"{what}_ms"] / whole[f"{what}_ms"] for what in ("forward", "both") if f"{what}_ms" in row}
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096])
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--D", type=int, default=64)
    parser.add_argument("--blocks", type=int, nargs="+", default=[64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--flex", default="", help="the layout that PyTorch does too")
    parser.add_argument("--processor", required=True)
    parser.add_argument("--out", type=Path, required=True)
    a = parser.parse_args()
    rows = [row for T in a.lengths for block in a.blocks for row in measure(T, a.heads, a.D, block, a.rounds, a.flex, a.dtype)]
    about = {"processor": a.processor, "isa": host().name, "threads": thread_count(), "dtype": a.dtype, "rounds": a.rounds}
    a.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
