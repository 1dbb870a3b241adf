"""How much of a step the loader takes, in every order.

    python -m benchmarks.loader --out benchmarks/results/loader.json

For each shape: milliseconds of one `batch()` from shards of random tokens in files, the median of 2000 after the first, beside the
median step of `barellm bench step` in the same minute. The first batch of "documents" and of "llmc", which look through the shard,
stands by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from barellm.cli.main import main as barellm
from barellm.cpu.isa import host
from barellm.cpu.threads import thread_count
from barellm.data.llmc import LlmcOrder
from barellm.data.loader import Batches, Documents, Rows
from barellm.data.shards import TokenStream, open_shard, write_shard

SHAPES = {"gpt2-124m": (4, 64), "shakespeare-char": (12, 64)}
TOKENS, SHARDS, DOCUMENT, TURNS = 10_000_000, 3, 690, 2000


def rows(tokens: TokenStream, order: str, batch: int, seq: int) -> Rows:
    if order == "llmc":
        return LlmcOrder(tokens, batch=batch, seq=seq)
    if order == "documents":
        return Documents(tokens, separator=0, shape=lambda sample: (seq, 0))
    return Batches(tokens, seq=seq, seed=1337, order=order)


def measured(tokens: TokenStream, order: str, batch: int, seq: int) -> dict[str, float]:
    begin = time.perf_counter()
    source = rows(tokens, order, batch, seq)
    samples = []
    for turn in range(TURNS + 1):
        source.batch(turn * batch, batch, seq=seq, document=0)
        samples.append(time.perf_counter() - begin)
        begin = time.perf_counter()
    return {"first_ms": 1e3 * samples[0], "ms": 1e3 * median(samples[1:]), "slowest_ms": 1e3 * max(samples[1:])}


def step_ms(preset: str, batch: int, seq: int) -> float:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        words = ["bench", "step", preset, "--batch", str(batch), "--seq", str(seq), "--steps", "5", "--json"]
        assert barellm(words) == 0
    return 1e3 * json.loads(said.getvalue())["median_s"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    result = {"kind": "loader", "processor": host().cpu, "threads": thread_count(), "shapes": {}}
    with tempfile.TemporaryDirectory() as name:
        random = np.random.default_rng(0)
        for number in range(SHARDS):
            values = random.integers(1, 50257, TOKENS)
            values[random.integers(0, TOKENS, TOKENS // DOCUMENT)] = 0
            write_shard(Path(name, f"{number}.bin"), [values], magic=20240520)
        tokens = TokenStream([open_shard(path) for path in sorted(Path(name).iterdir())], name="random tokens")
        for preset, (batch, seq) in SHAPES.items():
            step = step_ms(preset, batch, seq)
            orders = ("epoch", "random", "sequential", "llmc", "documents")
            found = {order: measured(tokens, order, batch, seq) for order in orders}
            for one in found.values():
                one["share"] = one["ms"] / step
            result["shapes"][preset] = {"batch": batch, "seq": seq, "step_ms": step, "orders": found}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: {o: round(100 * v["share"], 3) for o, v in s["orders"].items()} for k, s in result["shapes"].items()}))


if __name__ == "__main__":
    main()
