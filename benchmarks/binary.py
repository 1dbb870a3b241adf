"""Products of signs beside the fp32 product of the same sizes.

    python -m benchmarks.binary --out benchmarks/results/binary.json

Each size is M x N x K: x (M, K) and weight (N, K), fp32. `product` is y = x weight^T in fp32, `signs` the product of words that are
packed already, `pack` the packing of x, and `both` what a layer does: it packs x and the weight and multiplies. Variants run in
turns on one thread, in processor seconds, and the fastest turn of each counts: so other work on the machine disturbs least.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from barellm.cpu.backend import describe
from barellm.cpu.isa import host
from barellm.cpu.step import CpuSession
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.ops.pointwise.binary import pack
from barellm.program.tensor import Dim

SIZES = ((2048, 2048, 2048), (1024, 1024, 1024), (512, 512, 512), (64, 4096, 4096), (1024, 1000, 777))


def programs(M: int, N: int, K: int) -> dict[str, Program]:
    """The variants, over one store."""
    store = Store()
    made = {name: Program(store, compute="fp32") for name in ("product", "signs", "pack", "both")}
    weight, W = store.get("weight", (N, K), "fp32", "state"), -(-K // 32)
    words = store.get("words", (N, W), "i32", "state")
    shape = (Dim("batch", 1), Dim("seq", M))
    for name, p in made.items():
        if name == "signs":
            a = p.input("a", (*shape, W), "i32")
            p.output("y", p.apply(ops.BinaryMatmul, a=a, b=words, columns=K, dtype="fp32").y)
            continue
        x = p.input("x", (*shape, K), "fp32")
        if name == "pack":
            p.output("packed", p.apply(ops.PackSigns, x=x).words)
        else:
            p.output("z", p.linear(x, weight) if name == "product" else p.binary_linear(x, weight))
    return made


def measure(M: int, N: int, K: int, turns: int) -> dict[str, Any]:
    session = CpuSession(programs(M, N, K), threads=1)
    r = np.random.default_rng(0)
    x, weight = (r.standard_normal(shape).astype(np.float32) for shape in ((M, K), (N, K)))
    for name, values in {"x": x[None], "weight": weight, "a": pack(x)[None], "words": pack(weight)}.items():
        session.write(name, values)
    times: dict[str, list[float]] = {"product": [], "signs": [], "pack": [], "both": []}
    for turn in range(turns + 1):
        for name, found in times.items():
            begin = time.process_time()
            session.run(name, batch=1, seq=M)
            if turn:  # the first touches the memory
                found.append(time.process_time() - begin)
    session.run("both", batch=1, seq=M)
    some = slice(None, 64)
    signs = [np.where(v >= 0, 1, -1).astype(np.int64) for v in (x[some], weight)]
    assert (session.stored(session.programs["both"].named["z"], (1, M, N))[0, some] == signs[0] @ signs[1].T).all()
    session.close()
    times_of = {name: min(found) for name, found in times.items()}
    return {
        "size": [M, N, K],
        "s": times,
        "best_s": times_of,
        "signs_times_faster": times_of["product"] / times_of["signs"],
        "both_times_faster": times_of["product"] / times_of["both"],
        "gigaops_per_s": {name: 2e-9 * M * N * K / times_of[name] for name in ("product", "signs", "both")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="how many of the sizes, the first first")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [measure(*size, args.turns) for size in SIZES[: args.sizes]]
    result = {
        "kind": "binary",
        "clock": "processor seconds of one thread",
        "machine": describe() | {"threads": 1},
        "popcount": host().popcount,
        "rows": rows,
    }
    for row in rows:
        print(json.dumps({k: v for k, v in row.items() if k != "s"}))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
