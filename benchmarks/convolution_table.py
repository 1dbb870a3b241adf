"""The tables of docs/convolution.md, from what benchmarks/convolution.py wrote:

    python -m benchmarks.convolution_table algorithms benchmarks/results/xeon-amx/convolution-fp32.json
    python -m benchmarks.convolution_table passes benchmarks/results/xeon-amx/convolution-bf16.json

Numbers are shares of the bound: the operations of the direct sum at the measured peak, or the fewest bytes at the speed of a
copying loop, whichever takes longer, over the median time. PyTorch's are those of the better of its two memory formats."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from barellm.cpu.isa import host
from barellm.cpu.kernels.conv.conv_algorithm import BF16_COSTS, FP32_COSTS, select_winograd_tile
from barellm.cpu.kernels.conv.conv_tiled import gemm_tile
from benchmarks.convolution import ALGORITHMS, LAYERS, PASSES

TITLES = {"forward": "forward", "dx": "input's gradient", "dw": "filters' gradient"}


def shares(row: dict[str, Any]) -> dict[str, float]:
    """Of each variant; "peer": PyTorch's better format."""
    found = {name: row["bound_s"] / median(samples) for name, samples in row["samples_s"].items()}
    return found | {"peer": max(found["torch"], found["torch channels last"])}


def taken(row: dict[str, Any], dtype: str) -> str:
    """What "auto" takes for images of `dtype`, which without AMX may be multiplied as pairs of bf16."""
    if "auto" in row["samples_s"] or "winograd4" not in row["samples_s"]:
        return "auto" if "auto" in row["samples_s"] else "direct"
    layer, which = LAYERS[row["layer"]], row["pass"]
    if layer.groups == layer.C:
        return "direct"
    C, K = (layer.K, layer.C) if which == "dx" else (layer.C, layer.K)
    tile_n = gemm_tile(host()).nr(host())
    costs = BF16_COSTS if dtype == "bf16" and host().dot else FP32_COSTS
    m = select_winograd_tile(
        costs[which], C // layer.groups, K // layer.groups, row["batch"], (layer.outputs, layer.outputs), tile_n
    )
    return f"winograd{m}" if m else "direct"


def algorithms(rows: list[dict[str, Any]]) -> None:
    """Forward, of each algorithm."""
    for batch in sorted({row["batch"] for row in rows}):
        titles = ["", f"fp32, forward, {images(batch)}", *ALGORITHMS, "auto takes", "PyTorch", "ratio", ""]
        print("\n" + " | ".join(titles).strip() + f"\n|---{'|---' * 6}|")
        for row in rows:
            if (row["batch"], row["pass"]) == (batch, "forward"):
                of, auto = shares(row), taken(row, "fp32")
                each = (f"{of[a]:.2f}" if a in of else "" for a in ALGORITHMS)
                print(f"| {row['layer']} | {' | '.join(each)} | {auto} | {of['peer']:.2f} | {of[auto] / of['peer']:.2f} |")


def passes(rows: list[dict[str, Any]], dtype: str) -> None:
    """What "auto" takes beside PyTorch, of each pass."""
    for batch in sorted({row["batch"] for row in rows}):
        titles = ["", f"{dtype}, {images(batch)}", *(f"{TITLES[p]} | PyTorch | ratio" for p in PASSES), ""]
        print("\n" + " | ".join(titles).strip() + f"\n|---{'|---' * 9}|")
        ratios: dict[str, list[float]] = {which: [] for which in PASSES}
        for name in dict.fromkeys(row["layer"] for row in rows):
            cells = []
            for which in PASSES:
                (row,) = (r for r in rows if (r["layer"], r["batch"], r["pass"]) == (name, batch, which))
                of, auto = shares(row), taken(row, dtype)
                ratios[which].append(of[auto] / of["peer"])
                cells.append(f"{of[auto]:.2f} | {of['peer']:.2f} | {ratios[which][-1]:.2f}")
            print(f"| {name} | {' | '.join(cells)} |")
        print(f"| mean | {' | '.join(f' | | {geometric_mean(ratios[which]):.2f}' for which in PASSES)} |")


def images(batch: int) -> str:
    return "1 image" if batch == 1 else f"{batch} images"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("algorithms", "passes"))
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    result = json.loads(args.file.read_text())
    if args.table == "algorithms":
        algorithms(result["rows"])
    else:
        passes(result["rows"], result["dtype"])


if __name__ == "__main__":
    main()
