"""Products of 1 to 64 rows with gpt2-124m's matrices, as a share of what memory and the multiplier allow, in turns with the kernel
that packs.

    python -m benchmarks.few_rows --dtype bf16 --out benchmarks/results/few-rows-bf16.json

Each product goes through weights that no cache holds together, random normal numbers. In every round plain reading of as much
memory and the peak of multiply-adds of the dtype are measured too. The bound is the larger of the time of reading the weight at the
best rate seen and the time of the operations at the best peak seen.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from barellm.cpu import jit
from barellm.cpu.backend import Bench, describe
from barellm.cpu.choices import default
from barellm.cpu.kernel import Specialisation
from barellm.cpu.kernels import gemm
from barellm.cpu.kernels.few_rows import few_choices, few_private, few_rows
from barellm.cpu.lang.sync import RECORD_NBYTES
from barellm.cpu.processor import name as processor
from barellm.kernels.arrays import address
from barellm.program import scalars
from barellm.program.dtypes import encode, itemsize
from barellm.program.integers import round_up
from barellm.runtime.arena import ScalarBlock

ROLES = {"qkv": (2304, 768), "proj": (768, 768), "fc": (3072, 768), "fcproj": (768, 3072), "head": (50304, 768)}
ROWS = (1, 2, 4, 8, 16, 32, 64)
COLD = 96 << 20  # bytes that a walk reads at least: three times the last cache
PRIVATE = 1 << 22  # bytes of a thread's own scratch: what either kernel asks for is less


class Table:
    """A walk over as many weights of a product as memory holds."""

    def __init__(
        self, bench: Bench, kind: str, dtype: str, cols: int, depth: int, memory: dict[str, np.ndarray]
    ) -> None:
        constants: dict[str, Any] = {
            "cols": cols,
            "depth": depth,
            "dims": ("batch",),
            "inner": 1,
            "epilogues": (),
            "mode": "store",
        }
        operands: tuple[str | None, ...] = ("fp32", None, dtype, dtype, None, None)
        emit: Any = few_rows
        constants["choice"] = few_choices(bench.isa, dtype, cols, depth)[0]
        if kind == "packed":
            emit, operands = gemm.product, (*operands, "int", "int")
            constants |= {"transposed": True, "choice": default(bench.isa, "forward", dtype, cols, depth, 64)}
        spec = Specialisation(emit, operands, tuple(sorted(constants.items())))
        self.code = jit.Library([jit.cached_object(spec.key, bench.isa, lambda: spec.ir(bench.isa))], bench.isa)
        self.bench, nbytes = bench, cols * depth * itemsize(dtype)
        self.calls = memory["weights"].nbytes // nbytes
        self.args = np.array(
            [[address(memory["out"]), address(memory["x"]), address(memory["weights"]) + i * nbytes, 0, 1 << 40]
             for i in range(self.calls)]
        )  # fmt: skip
        words = RECORD_NBYTES // 8
        self.memory = np.zeros((self.calls + 1) * words, np.int64)
        skip = -address(self.memory) % RECORD_NBYTES // 8
        self.records = self.memory[skip : skip + self.calls * words].reshape(self.calls, words)
        for i in range(self.calls):
            self.records[i, :3] = self.code.address(spec.symbol()), address(self.args[i]), 1

    def seconds(self) -> float:
        """Of one product."""
        start = time.perf_counter()
        self.bench.pool.run(address(self.records), self.calls)
        return (time.perf_counter() - start) / self.calls


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", choices=("fp32", "bf16"), required=True)
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=list(ROLES))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--kinds", nargs="+", choices=("few", "packed"), default=["few", "packed"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    facts, block = describe(), ScalarBlock()
    with closing(Bench()) as bench:
        largest, most = max(cols * depth for cols, depth in ROLES.values()), max(args.rows)
        r = np.random.default_rng(1)

        def drawn(count: int) -> np.ndarray:
            return encode(r.standard_normal(count, np.float32), args.dtype)[0]

        memory = {
            "weights": drawn(max(COLD // itemsize(args.dtype), largest)),
            "x": drawn(most * max(depth for _, depth in ROLES.values())),
            "out": np.zeros(most * max(cols for cols, _ in ROLES.values()), np.float32),
            "private": np.zeros((bench.threads + 1) * PRIVATE, np.uint8),
        }
        assert max(few_private(bench.isa, depth) for _, depth in ROLES.values()) <= PRIVATE
        bench.pool.bind(block.address, round_up(address(memory["private"]), 64), PRIVATE, memory=memory)
        tables = {
            (role, kind): Table(bench, kind, args.dtype, *ROLES[role], memory)
            for role in args.roles
            for kind in args.kinds
        }
        seconds: dict[str, list[float]] = {}
        reading, peaks = [], []
        for turn in range(args.rounds + 1):
            reading.append(bench.bandwidth((8, 0, 0), 1 << 27))
            peaks.append(bench.peak(args.dtype))
            for rows in args.rows:
                block.ints[scalars.SCALARS["batch"].index] = rows
                for (role, kind), table in tables.items():
                    found = table.seconds()
                    if turn:  # the first round fills tables of addresses
                        seconds.setdefault(f"{role} {rows} {kind}", []).append(found)
    rate, peak = max(reading), max(peaks)
    rows_of_table = []
    for key, found in seconds.items():
        role, rows, kind = key.split()
        cols, depth = ROLES[role]
        bound = max(cols * depth * itemsize(args.dtype) / rate, 2 * int(rows) * cols * depth / peak)
        best, median = min(found), statistics.median(found)
        row = {"role": role, "rows": int(rows), "kernel": kind, "bound_s": bound, "of_bound": bound / median}
        rows_of_table.append(row | {"best_of_bound": bound / best, "seconds": found})
        print(
            f"{key:<18}{1e6 * median:9.0f} us {bound / median:6.0%} of the bound, best {bound / best:.0%}", flush=True
        )
    result = {
        "processor": processor(),
        **facts,
        "dtype": args.dtype,
        "reading": reading,
        "peak": peaks,
        "products": rows_of_table,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
