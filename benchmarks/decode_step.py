"""Where the time of one token goes: every kernel of a preset's "decode", the waits at barriers, and what is outside of the step.

    python -m benchmarks.decode_step gpt2-124m --dtype bf16 --out benchmarks/results/decode-step-gpt2-124m-bf16.json

Weights are random. The threads write time stamps before and behind each call and its barrier; a kernel's time is the mean over
threads.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from barellm import models
from barellm.assembly.build import open_model
from barellm.cpu.backend import Bench, describe
from barellm.cpu.processor import name as processor
from barellm.tools.bench.decoding import weight_bytes

FIRST = 32  # position of the first token that is timed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("preset")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), required=True)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = models.preset(args.preset)
    config = replace(config, train=replace(config.train, dtype=args.dtype, micro_batch_size=1))
    bench = Bench()
    with open_model(config, device="cpu", training=False, positions=256, only=("init", "decode")) as compiled:
        session = compiled.session
        compiled.initialize(1)
        kinds = [call.spec.name for call in session.calls["decode"]]
        stamps = session.new_stamps()
        rounds, whole, readings = [], [], []
        begun, counted = time.perf_counter(), session.pool.now()
        for turn in range(args.tokens):
            if turn % 20 == 0:
                readings.append(bench.bandwidth((8, 0, 0)))
            session.trace(stamps)
            start = time.perf_counter()
            session.write("tokens", np.array([[7 + turn]], np.int32))
            session.run("decode", batch=1, seq=1, pos=FIRST + turn)
            session.read("logits")
            whole.append(time.perf_counter() - start)
            rounds.append(stamps["decode"].copy())
        unit = (time.perf_counter() - begun) / (session.pool.now() - counted)  # seconds of a tick
        nbytes = weight_bytes(compiled.programs["decode"])
        threads = session.threads
    bench.close()
    ticks = [(s[:, -1, 2].max() - s[:, 0, 0].min()) for s in rounds]
    step = sorted(range(len(rounds)), key=lambda i: whole[i])[len(rounds) // 2]
    s = rounds[step]
    shares: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for i, kind in enumerate(kinds):
        row = shares[kind]
        row[0] += 1
        row[1] += float((s[:, i, 1] - s[:, i, 0]).mean()) * unit
        row[2] += float((s[:, i, 2] - s[:, i, 1]).mean()) * unit
    inside = float(ticks[step]) * unit
    result = {
        "preset": args.preset, "dtype": args.dtype, "processor": processor(), **describe(), "threads": threads, "bytes": nbytes,
        "reading": readings, "whole_s": whole, "median_s": whole[step], "step_s": inside,
        "kernels": {k: {"calls": c, "seconds": t, "barrier_s": b} for k, (c, t, b) in shares.items()},
    }  # fmt: skip
    print(
        f"{1e6 * whole[step]:.0f} us a token, best {1e6 * min(whole):.0f}; at the best reading {1e6 * nbytes / max(readings):.0f}"
    )
    for kind, (calls, seconds, wait) in sorted(shares.items(), key=lambda item: -item[1][1]):
        print(f"  {kind:<24}{calls:4} calls {1e6 * seconds:8.1f} us, barriers {1e6 * wait:7.1f} us")
    print(f"  outside of the threads' walk: {1e6 * (whole[step] - inside):.0f} us")
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
