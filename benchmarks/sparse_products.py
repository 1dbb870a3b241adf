"""Times of block-sparse products beside dense ones: `python -m benchmarks.sparse_products --processor NAME --out FILE`; with
`--write`, the table of docs/sparsity.md is made of that file.

y = x W, its input gradient and its weight gradient over 2048 tokens. Blocks are drawn evenly, as many in each column. All
sides take turns, with `--torch` PyTorch's dense product too; each time is a median.
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
from barellm.program import ops
from barellm.program.block_layouts import BlockLayout, block_layout, spread
from barellm.program.builder import Program, Store
from barellm.program.tensor import Dim
from benchmarks.sparsity import turns

TOKENS, WIDTH = 2048, 1024
TORCH = "PyTorch, dense"
REST = 0.01  # seconds between PyTorch and what follows: its threads spin for some milliseconds when they have nothing to do
MORE = 0.08  # the aim: a time of the density and so much of the dense one
DENSE = {"forward": ops.Matmul, "dx": ops.MatmulDx, "dw": ops.MatmulDw}
SPARSE = {"forward": ops.BlockMatmul, "dx": ops.BlockMatmulDx, "dw": ops.BlockMatmulDw}
NEEDS = {"forward": ("x", "weight"), "dx": ("dy", "weight"), "dw": ("x", "dy")}


def weight_shape(layout: BlockLayout | None, width: int) -> tuple[int, int]:
    return (width, width) if layout is None else (len(layout) * layout.block, layout.block)


def program(what: str, layout: BlockLayout | None, dtype: str, *, tokens: int, width: int) -> Program:
    """One product; without a layout a dense one."""
    p = Program(Store(), compute=dtype)
    shape, weight = (Dim("batch", 1), Dim("seq", tokens), width), weight_shape(layout, width)
    given: dict[str, Any] = {name: p.input(name, shape, dtype) for name in NEEDS[what] if name != "weight"}
    if "weight" in NEEDS[what]:
        given["weight"] = p.parameter("weight", weight)
    if layout is not None:
        read = {"forward": layout.tables, "dx": ("rows",), "dw": ("places",)}[what]
        given |= {name: p.constant(name, layout.tables[name], "i32") for name in read} | {"layout": layout}
    op = p.apply((DENSE if layout is None else SPARSE)[what], **given)
    p.output("result", next(iter(op.outputs.values())))
    return p


def session(what: str, layout: BlockLayout | None, dtype: str) -> CpuSession:
    made, weight = (CpuSession({"op": program(what, layout, dtype, tokens=TOKENS, width=WIDTH)}), weight_shape(layout, WIDTH))
    r = np.random.default_rng(0)
    for name in NEEDS[what]:
        made.write(name, r.standard_normal(weight if name == "weight" else (1, TOKENS, WIDTH)))
    return made


def torch_product(what: str, dtype: str) -> Callable[[], Any]:
    """PyTorch's dense product of the same sizes."""
    import torch

    torch.set_num_threads(thread_count())
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    x, dy, weight = (torch.randn(rows, WIDTH).to(kind) for rows in (TOKENS, TOKENS, WIDTH))
    return {"forward": lambda: x @ weight, "dx": lambda: dy @ weight.T, "dw": lambda: x.T @ dy}[what]


def write(path: Path) -> None:
    """Replace the table between the page's marks."""
    page, mark = Path(__file__).parents[1] / "docs" / "sparsity.md", ("<!-- products -->\n", "<!-- /products -->")
    lines = ["| blocks of | density | aim | forward | input gradient | weight gradient |", "|---|---|---|---|---|---|"]
    for row in json.loads(path.read_text())["rows"]:
        times, density = " | ".join(f"{row['to_dense'][what]:.2f}" for what in DENSE), row["density"]
        if row["block"]:
            lines.append(f"| {row['block']} | {density:.4f} | {density + MORE:.2f} | {times} |")
        elif row["side"] == TORCH:
            lines.append(f"| {TORCH} | | | {times} |")
    before, rest = page.read_text().split(mark[0])
    table = "\n".join(lines)
    page.write_text(f"{before}{mark[0]}{table}\n{mark[1]}{rest.split(mark[1])[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--densities", type=float, nargs="+", default=[0.0625, 0.25, 0.5])
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--processor", default="")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    a = parser.parse_args()
    if a.write:
        return write(a.out)
    layouts: dict[str, BlockLayout | None] = {"dense": None}
    for block in a.blocks:
        side = WIDTH // block
        for density in a.densities:
            found = block_layout(spread(side, side, round(density * side), 1), block)
            layouts[f"blocks of {block}, density {found.density:.3f}"] = found
    sides = {}
    for name, layout in layouts.items():
        for what in DENSE:
            made = session(what, layout, a.dtype)
            sides[name, what] = lambda made=made: made.run("op", batch=1, seq=TOKENS)
    if a.torch:
        layouts[TORCH] = None
        sides |= {(TORCH, what): torch_product(what, a.dtype) for what in DENSE}
        sides["rest", ""] = lambda: time.sleep(REST)
    times, rows = turns(sides, a.rounds), []
    for name, layout in layouts.items():
        ms = {what: 1e3 * median(times[name, what]) for what in DENSE}
        row: dict[str, Any] = {"side": name, "block": layout.block if layout else None}
        row |= {"density": layout.density if layout else 1.0, "ms": ms}
        row["to_dense"] = {what: ms[what] / (1e3 * median(times["dense", what])) for what in DENSE}
        print(json.dumps(row), flush=True)
        rows.append(row)
    about = {"processor": a.processor, "isa": host().name, "threads": thread_count(), "dtype": a.dtype, "rounds": a.rounds}
    a.out.write_text(json.dumps(about | {"tokens": TOKENS, "width": WIDTH, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
