"""Products of 1 to 64 rows with gpt2-124m's matrices, as a share of what memory and the multiplier allow: `python -m
benchmarks.few_rows --dtype bf16 --out FILE`. In turns with the kernel that packs, with `--torch` PyTorch's `F.linear` on the same
numbers, behind ours in each turn, and with `--tuned` what the tuner chose, which tunes first. `--write` makes the tables of
docs/skinny_gemm.md.

Each product goes through weights that no cache holds together, random normal numbers. Beside the products, plain reading of as much
memory and the peak of multiply-adds of the dtype are measured. The bound is the larger of the time of reading the weight and the
time of the operations at the median peak. Memory gives more to some ways of reading than to a plain loop, so its rate is the median
of plain reading or that of the product that reads fastest, whichever is higher.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import numpy as np

from barellm.cpu import jit
from barellm.cpu.backend import Bench, describe
from barellm.cpu.gemm_config import default
from barellm.cpu.kernel import Specialisation
from barellm.cpu.kernels.gemm import gemm
from barellm.cpu.kernels.gemm.skinny_gemm import FEW, ScratchLayout, skinny_configs, skinny_gemm
from barellm.cpu.lang.sync import RECORD_NBYTES
from barellm.cpu.step import Lowered
from barellm.cpu.tuner.problem import problems_of
from barellm.cpu.tuner.tuner import CpuTuner
from barellm.kernels.arrays import address
from barellm.program import scalars
from barellm.program.builder import Program, Store
from barellm.program.dtypes import encode, itemsize
from barellm.program.integers import round_up
from barellm.program.tensor import Dim
from barellm.runtime.arena import ScalarBlock

MATRICES = {"qkv": (2304, 768), "proj": (768, 768), "fc": (3072, 768), "fcproj": (768, 3072), "head": (50304, 768)}
ROWS = (1, 2, 4, 8, 16, 32, 64)
KINDS = {"few": "ours", "packed": "packing", "torch": "PyTorch"}  # and what the tables call them
COLD = 192 << 20  # bytes that a walk reads at least: several times the last cache
SPINNING = 0.3  # seconds after which PyTorch's threads, which wait for more work for a while, leave the cores to ours
PRIVATE = 1 << 22  # bytes of a thread's own scratch: what either kernel asks for is less
PAGE, RESULTS = Path(__file__).parents[1] / "docs" / "skinny_gemm.md", Path(__file__).parent / "results"
TABLES = {"zen4": RESULTS, "xeon": RESULTS / "xeon-amx"}  # by the marks of the page


class Walk:
    """A walk of one of our kernels over as many weights of a product as memory holds."""

    def __init__(self, bench: Bench, emit: Any, dtype: str, cols: int, depth: int, choice: Any, memory: dict) -> None:
        constants = {"cols": cols, "depth": depth, "dims": ("batch",), "inner": 1, "epilogues": (), "mode": "store"}
        operands: tuple[str | None, ...] = ("fp32", None, dtype, dtype, None, None)
        if emit is gemm.gemm:
            operands, constants = (*operands, "int", "int"), constants | {"transposed": True}
        spec = Specialisation(emit, operands, tuple(sorted((constants | {"config": choice}).items())))
        self.code = jit.Library([jit.cached_object(spec.key, bench.isa, lambda: spec.ir(bench.isa))], bench.isa)
        self.bench, nbytes = bench, cols * depth * itemsize(dtype)
        self.calls = memory["weights"].nbytes // nbytes
        first = [address(memory[name]) for name in ("out", "x", "weights")]
        self.args = np.array([[*first[:2], first[2] + i * nbytes, 0, 1 << 40] for i in range(self.calls)])
        words = RECORD_NBYTES // 8
        self.memory = np.zeros((self.calls + 1) * words, np.int64)
        skip = -address(self.memory) % RECORD_NBYTES // 8
        self.records = self.memory[skip : skip + self.calls * words].reshape(self.calls, words)
        for i in range(self.calls):
            self.records[i, :3] = self.code.address(spec.symbol()), address(self.args[i]), 1

    def __call__(self, rows: int) -> float:
        """Seconds of one product."""
        start = perf_counter()
        self.bench.pool.run(address(self.records), self.calls)
        return (perf_counter() - start) / self.calls


def torch_walk(threads: int, cols: int, depth: int, memory: dict[str, np.ndarray]) -> Callable[[int], float]:
    """The same walk of PyTorch's."""
    import torch

    torch.set_num_threads(threads)

    def shaped(name: str) -> Any:
        stored = memory[name]
        count = stored.size // (cols * depth) if name == "weights" else FEW
        shape = (count, cols, depth) if name == "weights" else (count, depth)
        found = torch.from_numpy(stored.view(np.int16) if stored.itemsize == 2 else stored)
        found = found.view(torch.bfloat16) if stored.itemsize == 2 else found
        return found[: count * depth * (cols if name == "weights" else 1)].view(shape)

    x, weights = shaped("x"), shaped("weights")

    def walk(rows: int) -> float:
        some, start = x[:rows], perf_counter()
        with torch.inference_mode():
            for weight in weights:
                torch.nn.functional.linear(some, weight)
        return (perf_counter() - start) / len(weights)

    return walk


def tuned_choices(bench: Bench, dtype: str, matrices: list[str]) -> dict[str, Any]:
    """What the tuner finds best for one row, by matrix, as `barellm tune` does it."""
    p = Program(Store(), compute=dtype)
    for matrix in matrices:
        cols, depth = MATRICES[matrix]
        x, weight = p.input(f"x {matrix}", (Dim("batch", FEW), depth), dtype), p.parameter(f"w {matrix}", (cols, depth))
        p.output(matrix, p.linear(x, weight))
    problems = problems_of(Lowered(p, bench.isa, bench.threads, skinny_gemm=True).calls)
    tuner = CpuTuner(bench.isa, bench.threads, COLD)
    skinny = [problem for problem in problems if problem.skinny]
    verdicts = tuner.tune(skinny, seconds=600, each=lambda v: print(v.problem, v.best))
    best = {(v.problem.cols, v.problem.depth): v.best for v in verdicts}
    return {matrix: best[MATRICES[matrix]] for matrix in matrices}


def rate_of(result: dict[str, Any]) -> float:
    """Bytes/s of memory in the run of a file."""
    nbytes = itemsize(result["dtype"])
    fastest = [
        MATRICES[row["matrix"]][0] * MATRICES[row["matrix"]][1] * nbytes / median(row["seconds"]) for row in result["products"]
    ]
    return max(median(result["reading"]), *fastest)


def shares(result: dict[str, Any]) -> dict[tuple[str, int, str], float]:
    """The share of the bound of each (matrix, rows, kernel) of a file: medians."""
    rate, peak, found = rate_of(result), median(result["peak"]), {}
    for row in result["products"]:
        cols, depth = MATRICES[row["matrix"]]
        bound = max(cols * depth * itemsize(result["dtype"]) / rate, 2 * row["rows"] * cols * depth / peak)
        found[row["matrix"], row["rows"], row["kernel"]] = bound / median(row["seconds"])
    return found


def table(folder: Path) -> str:
    """The shares in the files of a processor, in percent, with the kernels of a cell in the order of KINDS."""
    lines = ["| | rows | " + " | ".join(MATRICES) + " |", "|---" * (2 + len(MATRICES)) + "|"]
    for dtype in ("bf16", "fp32"):
        found = shares(json.loads((folder / f"few-rows-{dtype}.json").read_text()))
        kinds = [kind for kind in KINDS if any(key[2] == kind for key in found)]
        for rows in ROWS:
            cells = [" / ".join(f"{100 * found[matrix, rows, kind]:.0f}" for kind in kinds) for matrix in MATRICES]
            lines.append(f"| {dtype} | {rows} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page() -> str:
    """docs/skinny_gemm.md with the tables between its marks as the files have them."""
    text = PAGE.read_text()
    for name, folder in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}{table(folder)}\n{end}{rest.split(end)[1]}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--matrices", nargs="+", choices=MATRICES, default=list(MATRICES))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--kinds", nargs="+", choices=("few", "packed"), default=["few", "packed"])
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processor", default="", help="its name, if not the one that the system tells")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    if a.write:
        PAGE.write_text(page())
        return
    block = ScalarBlock()
    with closing(Bench()) as bench:
        largest, most = max(cols * depth for cols, depth in MATRICES.values()), max(a.rows)
        r = np.random.default_rng(1)

        def drawn(count: int) -> np.ndarray:
            return encode(r.standard_normal(count, np.float32), a.dtype)[0]

        memory = {
            "weights": drawn(max(COLD // itemsize(a.dtype), largest)),
            "x": drawn(FEW * max(depth for _, depth in MATRICES.values())),
            "out": np.zeros(most * max(cols for cols, _ in MATRICES.values()), np.float32),
            "private": np.zeros((bench.threads + 1) * PRIVATE, np.uint8),
        }
        assert max(ScratchLayout(bench.isa, depth).nbytes for _, depth in MATRICES.values()) <= PRIVATE
        bench.pool.bind(block.address, round_up(address(memory["private"]), 64), PRIVATE, memory=memory)
        chosen = tuned_choices(bench, a.dtype, a.matrices) if a.tuned else {}
        walks: dict[tuple[str, str], Callable[[int], float]] = {}
        for matrix in a.matrices:
            cols, depth = MATRICES[matrix]
            untuned = skinny_configs(bench.isa, a.dtype, cols, depth)[0]
            ways = {"few": untuned, "packed": default(bench.isa, "forward", a.dtype, cols, depth, FEW)}
            ways = {kind: way for kind, way in ways.items() if kind in a.kinds} | ({"tuned": chosen[matrix]} if chosen else {})
            for kind, way in ways.items():
                emit = gemm.gemm if kind == "packed" else skinny_gemm
                walks[matrix, kind] = Walk(bench, emit, a.dtype, cols, depth, way, memory)
            if a.torch:
                walks[matrix, "torch"] = torch_walk(bench.threads, cols, depth, memory)
        seconds: dict[tuple[str, int, str], list[float]] = {}
        reading, peaks = [], []
        for turn in range(a.rounds + 1):
            reading.append(bench.bandwidth((8, 0, 0), COLD))
            peaks.append(bench.peak(a.dtype))
            for rows in a.rows:
                block.ints[scalars.SCALARS["batch"].index] = rows
                if a.torch:
                    sleep(SPINNING)
                for (matrix, kind), walk in sorted(walks.items(), key=lambda item: item[0][1] == "torch"):
                    found = walk(rows)
                    if turn:  # the first round fills tables of addresses
                        seconds.setdefault((matrix, rows, kind), []).append(found)
    products = [{"matrix": r, "rows": n, "kernel": kind, "seconds": found} for (r, n, kind), found in seconds.items()]
    result = describe() | ({"processor": a.processor} if a.processor else {})
    result |= {"dtype": a.dtype, "reading": reading, "peak": peaks, "products": products}
    result |= {"choices": {matrix: str(choice) for matrix, choice in chosen.items()}} if chosen else {}
    for (matrix, rows, kind), share in shares(result).items():
        print(f"{matrix:<7}{rows:>3} {kind:<7}{1e6 * median(seconds[matrix, rows, kind]):9.0f} us {share:5.0%} of the bound")
    if a.out:
        a.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
