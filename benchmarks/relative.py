"""What relative terms add to block-sparse attention: `python -m benchmarks.relative --processor NAME --out FILE`.

Sides take turns in one thread, forward and forward with backward; each time is a median of processor time. `distances` is the
number of rows of the table of vectors, 0 for attention without. `share`: of the pairs that are seen, those that have a term.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from barellm import kernels
from barellm.cpu.isa import host
from barellm.program import layouts

T, HEADS, D, BLOCK = 4096, 2, 64, 64
LAYOUTS = ("local:256", "local:64+fixed:512:64")


def sides(text: str, distances: tuple[int, ...]) -> dict[tuple[int, str], Any]:
    layout = layouts.parse(text, length=T, block=BLOCK, heads=HEADS)
    rng = np.random.default_rng(0)
    given = [rng.normal(size=(1, T, HEADS, D)).astype(np.float32) for _ in range(3)]
    found: dict[tuple[int, str], Any] = {}
    for count in distances:
        all_of = [*given, *([rng.normal(size=(count, HEADS, D)).astype(np.float32)] if count else [])]

        def forward(all_of: list[np.ndarray] = all_of) -> None:
            kernels.attention(*all_of, layout=layout)

        def both(all_of: list[np.ndarray] = all_of) -> None:
            out, vjp_fn = kernels.vjp(kernels.attention, *all_of, layout=layout)
            vjp_fn(out)

        found |= {(count, "forward"): forward, (count, "both"): both}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--distances", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--processor", required=True)
    parser.add_argument("--out", type=Path, required=True)
    a = parser.parse_args()
    os.environ["BARELLM_THREADS"] = "1"
    rows = []
    for text in LAYOUTS:
        runs = sides(text, (0, *a.distances))
        times: dict[tuple[int, str], list[float]] = {key: [] for key in runs}
        for turn in range(a.rounds + 1):  # the first one compiles
            for key, run in runs.items():
                start = time.process_time()
                run()
                if turn:
                    times[key].append(1e3 * (time.process_time() - start))
        layout = layouts.parse(text, length=T, block=BLOCK, heads=HEADS)
        for count in (0, *a.distances):
            row: dict[str, Any] = {"layout": text, "distances": count}
            row["share"] = layout.pairs_within(0, count - 1) / layout.pairs
            for what in ("forward", "both"):
                row[f"{what}_ms"] = median(times[count, what])
                row[f"{what}_to_none"] = row[f"{what}_ms"] / median(times[0, what])
            rows.append(row)
            print(json.dumps(row), flush=True)
    shape = {"T": T, "heads": HEADS, "D": D, "block": BLOCK, "threads": 1, "dtype": "fp32", "rounds": a.rounds}
    about = {"processor": a.processor, "isa": host().name, **shape, "time": "processor time, median"}
    a.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
