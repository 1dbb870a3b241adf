"""16-bit moments against fp32 ones: what they cost in loss, and what they save in time.

    python benchmarks/moments.py loss --data tinyshakespeare.txt --out benchmarks/results/moments-loss.json
    python benchmarks/moments.py update --out benchmarks/results/moments-update.json

loss: the character model of nanoGPT's example, trained for each seed with moments in fp32, 16bit and 16bit-stochastic from the
same weights on the same batches; then the loss over the whole validation part.
update: AdamW over the parameters of gpt2-124m, the three variants in turns, beside the time in which this machine updates as
many bytes in place.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np

from barellm.assembly.programs import build
from barellm.config import MOMENTS
from barellm.cpu.backend import Bench, describe, open_session
from barellm.data.loader import Batches, Validation
from barellm.data.sources import prepare
from barellm.evaluation.validation import Evaluator
from barellm.models import preset
from barellm.models.gpt2 import declare
from barellm.optim.adamw import adamw
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.tools.plan.roofline import NAMED
from barellm.training.schedule import learning_rate


def final_loss(config, data, seed: int) -> float:
    t = config.train
    optimizer = partial(adamw, config=config.optim)
    _, programs = build(config.model, batch=t.micro_batch_size, seq=t.seq, compute=t.dtype, optimizer=optimizer)
    session = open_session(programs)
    session.run("init", seed=seed)
    batches = Batches(data.train, seq=t.seq, seed=seed, order=config.data.order)
    shape = {"batch": t.micro_batch_size, "seq": t.seq, "inv_targets": 1 / (t.micro_batch_size * t.seq)}
    for step in range(t.steps):
        inputs, targets = batches.batch(step * t.micro_batch_size, t.micro_batch_size)
        session.write("tokens", inputs)
        session.write("targets", targets)
        session.run("forward_backward", **shape, step=step + 1, seed=seed, sample=step * t.micro_batch_size)
        lr = learning_rate(step, optim=config.optim, total=t.steps)
        session.run("optimizer_step", step=step + 1, lr=lr, seed=seed)
    result = Evaluator(Validation(data.val, seq=t.seq), batch=t.micro_batch_size, byte_lengths=None).run(session)
    session.close()
    assert result is not None
    return result.nats


def loss(args: argparse.Namespace) -> dict[str, Any]:
    base = preset("shakespeare-char")
    train = replace(base.train, steps=args.steps, dtype=args.dtype)
    base = replace(base, data=replace(base.data, source=args.data), train=train)
    data = prepare(base.data)
    rows = []
    for seed in range(1, args.seeds + 1):
        row: dict[str, Any] = {"seed": seed}
        for moments in MOMENTS:
            config = replace(base, optim=replace(base.optim, moments=moments))
            row[moments] = final_loss(config, data, seed)
        rows.append(row)
        print(json.dumps(row), flush=True)
    gaps = {m: [row[m] - row["fp32"] for row in rows] for m in MOMENTS[1:]}
    return {
        "kind": "moments-loss",
        "preset": base.preset,
        "machine": describe(),
        "dtype": args.dtype,
        "steps": args.steps,
        "runs": rows,
        "gap_nats": {m: mean(g) for m, g in gaps.items()},
        "gap_deviation": {m: stdev(g) for m, g in gaps.items()} if args.seeds > 1 else None,
        "deviation_between_seeds": stdev(row["fp32"] for row in rows) if args.seeds > 1 else None,
    }


def updates(config) -> dict[str, Program]:
    """A program a variant, of the updates alone, over one set of parameters and gradients."""
    store = Store()
    declare(Program(store, compute="bf16"), config.model)
    clip = store.get("clip", (2,), "fp32", "state")
    programs = {}
    for moments in MOMENTS:
        p = programs[moments] = Program(store, compute="bf16")
        for i, param in enumerate(store.of_role("parameter")):
            packed = len(param.shape) == 2 and moments != "fp32"
            dtypes = ("e6m9", "ue6m10") if packed else ("fp32", "fp32")
            state = {k: p.state(f"{param.name}.{k}.{dtype}", param.shape, dtype) for k, dtype in zip("mv", dtypes, strict=True)}
            stream = i if packed and moments == "16bit-stochastic" else None
            attrs = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "stream": stream}
            p.apply(ops.AdamW, param=param, grad=p.gradient_of(param), clip=clip, **state, **attrs)
    return programs


def update(args: argparse.Namespace) -> dict[str, Any]:
    programs = updates(preset("gpt2-124m"))
    session, bench = open_session(programs), Bench()
    rng = np.random.default_rng(0)
    for name, t in session.tensors.items():
        if t.role in ("parameter", "gradient"):
            rows = max(1, (1 << 20) // (t.size // int(t.shape[0])))
            for lo in range(0, int(t.shape[0]), rows):
                shape = (min(rows, int(t.shape[0]) - lo), *t.shape[1:])
                session.write_rows(name, lo, 0.01 * rng.standard_normal(shape, dtype=np.float32))
    session.write("clip", np.array([1.0, 0.5], np.float32))
    samples: dict[str, list[float]] = {name: [] for name in programs}
    rates = []
    for turn in range(args.rounds + 1):
        rate = bench.bandwidth(NAMED["update"])
        times = {}
        for name in programs:
            start = time.perf_counter()
            session.run(name, step=turn + 1, lr=1e-4, seed=1)
            times[name] = time.perf_counter() - start
        if turn:  # the first touches new memory
            rates.append(rate)
            for name, seconds in times.items():
                samples[name].append(seconds)
    nbytes = {name: sum(op.bytes() for op in p.ops) for name, p in programs.items()}
    bench.close()
    session.close()
    return {
        "kind": "moments-update",
        "preset": "gpt2-124m",
        "machine": describe(),
        "bytes": nbytes,
        "s": samples,
        "update_bytes_per_s": rates,
        "median_s": {name: median(s) for name, s in samples.items()},
        "percent_of_bound": {
            name: median(100 * nbytes[name] / rate / seconds for rate, seconds in zip(rates, s, strict=True))
            for name, s in samples.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("loss", "update"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--data", help="loss: the text")
    parser.add_argument("--seeds", type=int, default=3, help="loss")
    parser.add_argument("--steps", type=int, default=1500, help="loss")
    parser.add_argument("--dtype", default="bf16", help="loss")
    parser.add_argument("--rounds", type=int, default=9, help="update")
    args = parser.parse_args()
    if args.what == "loss" and not args.data:
        parser.error("loss takes --data")
    result = loss(args) if args.what == "loss" else update(args)
    print(json.dumps({k: v for k, v in result.items() if k not in ("runs", "s", "update_bytes_per_s")}))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
