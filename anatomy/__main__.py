"""`python -m anatomy`: run the rungs of this machine in turns, print the table, draw the staircase."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from barellm.cuda import driver
from barellm.errors import UserError

CPU_SIZE, GPU_SIZE = 1000, 4096
GPU_HEAD = (
    "rung", "", "threads", "registers", "spills", "shared bytes", "blocks at a time", "instructions", "TFLOP/s", "what is new"
)  # fmt: skip
HEAD = ("rung", "", "threads", "GFLOP/s", "of peak", "FLOP/byte", "inner loop", "what is new")


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m anatomy", description=__doc__)
    parser.add_argument("--size", type=int, help=f"rows, columns and depth of the product ({CPU_SIZE}; GPU: {GPU_SIZE})")
    parser.add_argument("--rounds", type=int, default=5, help="how often everything is measured (%(default)s)")
    parser.add_argument("--rungs", default="", help="only these, as 1,4-6 (all)")
    parser.add_argument("--gpu", action="store_true", help="the GPU's rungs: run where there is one, compiled elsewhere")
    parser.add_argument("--out", type=Path, default=Path("runs/anatomy"), help="folder for JSON and pictures (%(default)s)")
    options = parser.parse_args(words)
    for name in ("size", "rounds"):
        if (given := getattr(options, name)) is not None and given < 1:
            raise UserError(f"--{name} is {given}, expected 1 or more")
    return options


def numbers(text: str, most: int) -> set[int]:
    """The numbers that "1,4-6" means; all up to `most` for none."""
    found: set[int] = set()
    for part in text.split(",") if text else [f"1-{most}"]:
        first, _, last = part.partition("-")
        if not (first.isdigit() and (last or first).isdigit() and 1 <= int(first) <= int(last or first) <= most):
            raise UserError(f"--rungs {text!r} has {part!r}, expected numbers from 1 to {most} such as 1,4-6")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def line(row: dict[str, Any]) -> list[str]:
    """The cells of a rung of the CPU."""
    code = row["code"]
    sums = " ".join(f"{n} {name}" for name, n in code["multiply_adds"].items())
    inner = f"{sums}, {code['loads']} loads, {code['stores']} stores"
    rate, share = f"compiled for {code['isa']} only", ""
    if "flops" in row:
        rate, share = f"{row['flops'] / 1e9:.1f}", f"{row['percent']:.0f} %"
    return [
        str(row["number"]),
        row["name"],
        str(row["threads"]),
        rate,
        share,
        f"{row['flops_per_byte']:.2f}",
        inner,
        row["changes"],
    ]


def table(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def cpu_rungs(options: argparse.Namespace) -> None:
    from anatomy import draw, measure
    from anatomy.rung import RUNGS

    wanted = numbers(options.rungs, len(RUNGS))
    found = measure.ladder([r for r in RUNGS if r.number in wanted], options.size or CPU_SIZE, options.rounds)
    print(table([list(HEAD), *map(line, found["rungs"])]))
    if any("flops" in row for row in found["rungs"]):  # else this machine can run none of them
        draw.staircase(found, options.out / "staircase.svg")
    draw.hierarchy(found, options.out / "memory.svg")
    written(found, options.out / "anatomy.json")


def gpu_rungs(options: argparse.Namespace) -> None:
    from anatomy import gpu_measure
    from anatomy.gpu_rung import GPU_RUNGS

    wanted = numbers(options.rungs, len(GPU_RUNGS))
    rungs, size = [r for r in GPU_RUNGS if r.number in wanted], options.size or GPU_SIZE
    rows = gpu_measure.facts(rungs, size)
    try:
        driver.device()
    except UserError as error:
        print(f"compiled for sm_90a and not run: {error}\n")
    else:
        rates = gpu_measure.measured(rungs, size, options.rounds)
        rows = [row | rates[row["number"]] for row in rows]
    print(table([list(GPU_HEAD), *map(gpu_line, rows)]))
    written({"kind": "anatomy of the GPU", "size": size, "rungs": rows}, options.out / "gpu.json")


def gpu_line(row: dict[str, Any]) -> list[str]:
    """The cells of a rung of the GPU."""
    rate = f"{row['flops'] / 1e12:.1f}, {row['percent']:.0f} %" if "flops" in row else "not run"
    numbers = (row[key] for key in ("number", "name", "threads", "registers", "spills", "shared", "resident"))
    return [*map(str, numbers), ", ".join(f"{n} {name}" for name, n in row["counts"].items()), rate, row["changes"]]


def written(found: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\nin {path.parent}: {', '.join(sorted(p.name for p in path.parent.iterdir()))}")


def main(words: list[str]) -> int:
    try:
        options = arguments(words)
        options.out.mkdir(parents=True, exist_ok=True)
        (gpu_rungs if options.gpu else cpu_rungs)(options)
    except UserError as error:
        print(f"anatomy: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
