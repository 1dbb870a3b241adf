"""Generators of random bits: what their linear structure is, and how long dropout by each of them takes.

    python benchmarks/generators.py --out benchmarks/results/generators.json

structure: the rank over GF(2) of each component's step, the linear complexity of its upper bit, and the cycle that it ends in;
beside taus88 the variant whose third component has c = 11, which published kernels use.
speed: dropout of (8, 64, 768) fp32 by each generator, in turns, and an op that reads and writes as much (y = a + b with equal
operands), on one thread, in processor seconds. The fastest turn of each counts: so other work on the machine disturbs least.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from barellm.config import DROPOUT_BITS
from barellm.cpu.backend import describe
from barellm.cpu.step import CpuSession
from barellm.program.builder import Program, Store
from barellm.program.ops.pointwise.tausworthe import GENERATORS, Component, Generator, draws
from barellm.program.tensor import Dim

PUBLISHED = (*GENERATORS["taus88"][:2], Component(3, 11, 11, 0xFFFFFFF0))  # c = 11 where L'Ecuyer has 17
SEEDS = (0x9E3779B9, 0x7F4A7C15, 0xF39CC060, 0x5CEDC834)
SHAPE = (8, 64, 768)


def rank(component: Component) -> int:
    """The rank over GF(2) of the matrix of one step, 32 x 32: each column is what the step makes of one bit."""
    basis: list[int] = []
    for column in component.advance(np.uint32(1) << np.arange(32, dtype=np.uint32)).tolist():
        for b in basis:
            column = min(column, column ^ b)
        if column:
            basis.append(column)
    return len(basis)


def linear_complexity(bits: list[int]) -> int:
    """The length of the shortest linear feedback shift register that gives these bits (Berlekamp and Massey). Connection
    polynomials are integers, and so are the last bits, the newest lowest."""
    here, before, length, since, seen = 1, 1, 0, 1, 0
    for n, bit in enumerate(bits):
        seen = (seen << 1 | bit) & (1 << 512) - 1
        if (here & seen).bit_count() % 2 == 0:
            since += 1
            continue
        last = here
        here ^= before << since
        if 2 * length <= n:
            length, before, since = n + 1 - length, last, 1
        else:
            since += 1
    return length


def cycle(component: Component, seed: int, most: int = 1 << 12) -> tuple[int, int] | None:
    """(steps until the state repeats for the first time, length of the cycle that it is in then); None beyond `most` steps."""
    seen: dict[int, int] = {}
    s = np.uint32(seed)
    for n in range(most):
        if int(s) in seen:
            return seen[int(s)], n - seen[int(s)]
        seen[int(s)] = n
        s = component.advance(s)
    return None


def top_bits(generator: Generator, count: int) -> list[int]:
    """The upper bit of draws after the first."""
    seeds = [c.begin(np.uint32(seed)) for c, seed in zip(generator, SEEDS, strict=False)]
    return (draws(generator, seeds, 1 + count)[1:] >> np.uint32(31)).tolist()


def structure(generator: Generator) -> dict[str, Any]:
    return {
        "rank": [rank(c) for c in generator],
        "complexity": [linear_complexity(top_bits((c,), 256)) for c in generator],
        "cycle": [cycle(c, seed) for c, seed in zip(generator, SEEDS, strict=False)],
        "whole complexity": linear_complexity(top_bits(generator, 512)),
    }


def dropout(bits: str) -> Program:
    """y = dropout(x) by a generator; by "none" an addition, which moves the same bytes when both operands are one."""
    p = Program(Store(), compute="fp32")
    x = p.input("x", (Dim("batch", SHAPE[0]), Dim("seq", SHAPE[1]), SHAPE[2]), "fp32")
    p.output("y", p.add(x, x) if bits == "none" else p.dropout(x, 0.1, bits))
    return p


def speed(turns: int) -> dict[str, list[float]]:
    """Seconds of each turn."""
    kinds = (*DROPOUT_BITS, "none")
    session = CpuSession({bits: dropout(bits) for bits in kinds}, threads=1)
    session.write("x", np.random.default_rng(0).standard_normal(SHAPE))
    times: dict[str, list[float]] = {bits: [] for bits in kinds}
    scalars = {"batch": SHAPE[0], "seq": SHAPE[1]}
    for turn in range(turns + 1):
        for bits in kinds:
            more = {} if bits == "none" else {"seed": 1, "step": turn, "sample": 0}
            begin = time.process_time()
            session.run(bits, **scalars, **more)
            if turn:  # the first touches the memory
                times[bits].append(time.process_time() - begin)
    session.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=400)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    times = speed(args.turns)
    count = int(np.prod(SHAPE))
    result = {
        "kind": "generators",
        "clock": "processor seconds of one thread",
        "machine": describe() | {"threads": 1},
        "shape": SHAPE,
        "structure": {name: structure(g) for name, g in {**GENERATORS, "taus88 with c = 11": PUBLISHED}.items()},
        "s": times,
        "ns_per_element": {bits: 1e9 * min(found) / count for bits, found in times.items()},
        "gb_per_s_of_words": {bits: 4e-9 * count / min(found) for bits, found in times.items() if bits != "none"},
    }
    print(json.dumps({k: v for k, v in result.items() if k != "s"}, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
