"""The cost of `--train.exponent_stats`: micro-batches with exponent histograms and without, and unit scaling against the plain
model, in interleaved rounds.

    python benchmarks/ranges.py --out benchmarks/results/ranges-cost.json shakespeare-char:12x64 gpt2-124m:4x64
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from barellm.assembly.build import CompiledModel, open_model
from barellm.config import overrides
from barellm.models import preset

UNIT = {"model.unit_scaling": True, "model.bias": False}


def micro(compiled: CompiledModel, program: str) -> float:
    """Seconds of one run of a program on random tokens."""
    train, session = compiled.config.train, compiled.session
    vocab = compiled.config.model.vocab_size
    for number, name in enumerate(("tokens", "targets")):
        session.write(name, np.random.default_rng(number).integers(0, vocab, (train.micro_batch_size, train.seq)))
    before = time.perf_counter()
    session.run(program, batch=train.micro_batch_size, seq=train.seq, accumulate=0, inv_targets=1.0, seed=1, step=1, sample=0)
    return time.perf_counter() - before


def measured(name: str, batch: int, seq: int, dtype: str, turns: int) -> dict[str, Any]:
    """Samples of each variant, in milliseconds."""
    changes = {
        "train.micro_batch_size": batch,
        "train.seq": seq,
        "train.exponent_stats": 1,
        "train.dtype": dtype,
        "optim.name": "adamw",
    }
    config = overrides.changed(preset(name), changes)
    samples: dict[str, list[float]] = {
        "forward_backward": [],
        "forward_backward_stats": [],
        "forward_backward, no biases": [],
        "forward_backward, unit scaling": [],
    }
    with ExitStack() as stack:
        compiled_models = {
            "": stack.enter_context(open_model(config, device="cpu")),
            ", no biases": stack.enter_context(open_model(overrides.changed(config, {"model.bias": False}), device="cpu")),
            ", unit scaling": stack.enter_context(open_model(overrides.changed(config, UNIT), device="cpu")),
        }
        for compiled in compiled_models.values():
            compiled.initialize(1)
        for turn in range(turns + 1):
            for what, taken in samples.items():
                program, comma, variant = what.partition(",")
                seconds = micro(compiled_models[comma + variant], program)
                if turn:
                    taken.append(round(1e3 * seconds, 3))
        tensors = sum(op.observer for op in compiled_models[""].programs["forward_backward_stats"].ops)
        about = compiled_models[""].meta()
    return {
        "preset": name, "batch": batch, "seq": seq, **about, "tensors": tensors,
        "ms": samples, "median_ms": {what: median(taken) for what, taken in samples.items()},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", metavar="PRESET:BATCHxSEQ")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    made = []
    for shape in args.shapes:
        name, _, sizes = shape.partition(":")
        batch, seq = (int(n) for n in sizes.split("x"))
        made.append(measured(name, batch, seq, args.dtype, args.turns))
        print(name, made[-1]["median_ms"], flush=True)
        args.out.write_text(json.dumps({"kind": "ranges-cost", "runs": made}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
