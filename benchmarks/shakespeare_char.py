"""nanoGPT's character example, ours against PyTorch: same initial weights, same batches, same recipe, 2000 iterations.

    python benchmarks/shakespeare_char.py --data tinyshakespeare.txt --out benchmarks/results/shakespeare-char-loss.json

For each seed: our bf16 (or --dtype fp32) run, then PyTorch's fp32 run (as nanoGPT on a CPU), then the loss over the whole
validation part with each side's own weights. Times are of the training steps alone.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean

import numpy as np

from barellm.assembly.programs import build
from barellm.cpu.backend import describe, open_session
from barellm.data.loader import Batches, Validation
from barellm.data.sources import prepare
from barellm.models import preset
from barellm.optim.adamw import adamw
from barellm.training.schedule import learning_rate


def ours(config, batches, validation, seed: int, dtype: str) -> dict:
    t = config.train
    optimizer = partial(adamw, config=config.optim)
    _, programs = build(config.model, batch=t.micro_batch_size, seq=t.seq, compute=dtype, optimizer=optimizer)
    session = open_session(programs)
    session.run("init", seed=seed)
    weights = {n: session.read(n) for n, x in session.tensors.items() if x.role == "parameter"}
    seconds = 0.0
    for step in range(t.steps):
        inputs, targets = batches.batch(step * t.micro_batch_size, t.micro_batch_size)
        session.write("tokens", inputs)
        session.write("targets", targets)
        start = time.perf_counter()
        session.run(
            "micro",
            batch=t.micro_batch_size,
            seq=t.seq,
            accumulate=0,
            inv_targets=1 / targets.size,
            step=step + 1,
            pos=0,
        )
        session.run("update", step=step + 1, lr=learning_rate(step, optim=config.optim, total=t.steps))
        seconds += time.perf_counter() - start
    total, count = 0.0, 0
    for inputs, targets in validation.batches(t.micro_batch_size):
        session.write("tokens", inputs)
        session.write("targets", targets)
        session.run("eval", batch=len(inputs), seq=t.seq, inv_targets=1.0)
        total += float(session.read("loss")[0])
        count += int((targets >= 0).sum())
    session.close()
    return {"weights": weights, "loss": total / count, "step_ms": 1e3 * seconds / t.steps}


def pytorch(config, weights, batches, validation) -> dict:
    import torch

    from tests.oracle.torch_gpt2 import TorchGPT2

    t = config.train
    model = TorchGPT2(config.model, weights)
    optimizer = model.adamw(config.optim)
    seconds = 0.0
    for step in range(t.steps):
        inputs, targets = batches.batch(step * t.micro_batch_size, t.micro_batch_size)
        start = time.perf_counter()
        lr = learning_rate(step, optim=config.optim, total=t.steps)
        model.step(optimizer, inputs, targets, 1 / targets.size, lr=lr, clip=config.optim.clip)
        seconds += time.perf_counter() - start
    with torch.no_grad():
        parts = [(model.loss(x, y, 1.0).item(), int((y >= 0).sum())) for x, y in validation.batches(t.micro_batch_size)]
    return {"loss": sum(p[0] for p in parts) / sum(p[1] for p in parts), "step_ms": 1e3 * seconds / t.steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--dtype", default="bf16")
    args = parser.parse_args()
    config = preset("shakespeare-char")
    config = replace(config, data=replace(config.data, source=args.data), train=replace(config.train, steps=args.steps))
    data = prepare(config.data)
    validation = Validation(data.val, seq=config.train.seq)
    rows = []
    for seed in range(1, args.seeds + 1):
        batches = Batches(data.train, seq=config.train.seq, seed=seed, order=config.data.order)
        mine = ours(config, batches, validation, seed, args.dtype)
        theirs = pytorch(config, mine.pop("weights"), batches, validation)
        rows.append({"seed": seed, "barellm": mine, "pytorch_fp32": theirs})
        print(json.dumps(rows[-1]), flush=True)
    gap = mean(r["barellm"]["loss"] for r in rows) - mean(r["pytorch_fp32"]["loss"] for r in rows)
    ratio = float(np.median([r["pytorch_fp32"]["step_ms"] / r["barellm"]["step_ms"] for r in rows]))
    result = {
        "kind": "loss",
        "preset": config.preset,
        "machine": describe(),
        "dtype": args.dtype,
        "steps": args.steps,
        "runs": rows,
        "gap_nats": gap,
        "speedup": ratio,
    }
    print(json.dumps({k: v for k, v in result.items() if k != "runs"}))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
