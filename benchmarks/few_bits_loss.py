"""What weights of few bits cost a trained model on text that it has not seen, by format, and how much error compensation gives
back.

    python -m benchmarks.few_bits_loss runs/default --tokens 65536 --out benchmarks/results/few-bits-loss-default.json

Each variant's matrices are quantised and written back as fp32 numbers, so that formats that barellm does not have can be tried too:
groups with a minimum beside their scale, and codes chosen one column after the other so that later columns make up for the
errors of earlier ones (GPTQ, Frantar et al. 2022), by the second moments of activations on text from the training part.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from barellm.assembly.build import build_programs
from barellm.assembly.quantized import HEAD, products_of
from barellm.checkpoint import weights as weight_files
from barellm.checkpoint.checkpoint import read_meta
from barellm.cli.checkpoints import found
from barellm.cpu.step import CpuSession
from barellm.data.loader import Validation
from barellm.data.sources import prepare
from barellm.evaluation.calibration import Calibration
from barellm.evaluation.validation import Evaluator
from barellm.program.compensation import compensated_codes
from barellm.program.quantization import Scheme, dequantize, quantize, scheme

Quantiser = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (matrix (N, K), moments (K, K)) -> what its codes stand for


def rounded(how: Scheme) -> Quantiser:
    return lambda w, _: dequantize(*quantize(w, how), how)


def with_minimum(group: int) -> Quantiser:
    """Codes 0 to 15 times a scale plus a minimum, both fp16."""

    def values(w: np.ndarray, _: np.ndarray) -> np.ndarray:
        N, K = w.shape
        g = np.pad(w, ((0, 0), (0, -K % group)), mode="edge").reshape(N, -1, group)
        low = g.min(-1, keepdims=True).astype(np.float16).astype(np.float32)
        step = ((g.max(-1, keepdims=True) - low) / 15).astype(np.float16).astype(np.float32)
        codes = np.clip(np.rint((g - low) / np.maximum(step, 1e-12)), 0, 15)
        return (low + step * codes).reshape(N, -1)[:, :K]

    return values


def compensated(how: Scheme) -> Quantiser:
    return lambda w, moments: dequantize(*compensated_codes(w, moments, how), how)


def variants() -> dict[str, tuple[Quantiser | None, Quantiser | None]]:
    """Name -> (that of the blocks' matrices, that of the classifier)."""
    head = rounded(scheme(HEAD))
    four = {f"{kind}/{g}": scheme(f"{kind}/{g}") for kind in ("int4", "nf4") for g in (32, 64, 128)}
    return {
        "numbers": (None, None),
        "int8": (rounded(scheme("int8")), head),
        **{name: (rounded(how), head) for name, how in four.items()},
        **{f"int4/{g} with a minimum": (with_minimum(g), head) for g in (32, 64, 128)},
        **{f"{name}, classifier too": (rounded(four[name]), rounded(four[name])) for name in ("int4/32", "nf4/64")},
        **{f"{name}, compensated": (compensated(how), head) for name, how in four.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--data")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--calibration", type=int, default=32768, help="tokens of the training part")
    parser.add_argument("--variants", nargs="+", choices=list(variants()), default=list(variants()))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    checkpoint = found(args.run, device="cpu", dtype="fp32", batch=8)
    assert checkpoint.path is not None
    config = checkpoint.config
    source = config.data if args.data is None else replace(config.data, source=args.data)
    data = prepare(source, tokenizer=checkpoint.tokenizer)
    programs = {"eval": build_programs(config, training=False, positions=0)["eval"]}
    p = programs["eval"]
    products = products_of(p)
    last = products[-1]
    table = last.weight  # a tied embedding keeps its numbers: the classifier gets a matrix of its own
    last.inputs["weight"] = p.parameter("classifier", tuple(int(n) for n in table.shape))
    calibration = Calibration(p, products)
    session = CpuSession(programs)
    weights = weight_files.of_checkpoint(checkpoint.path)
    weights.load(session)
    session.write("classifier", weights.read_rows(table.name, 0, int(table.shape[0])))
    seq = config.train.seq
    calibration.measure(session, Validation(data.train, seq=seq, max_tokens=args.calibration), batch=8)
    moments = {name: calibration.read(session, name) for name in calibration.moments}
    windows = Validation(data.val, seq=seq, max_tokens=args.tokens)
    losses: dict[str, float] = {}
    for name in dict.fromkeys(["numbers", *args.variants]):
        how = variants()[name]
        for op in products:
            t, quantiser = op.weight, how[op is last]
            w = weights.read_rows(table.name if op is last else t.name, 0, int(t.shape[0]))
            session.write(t.name, w if quantiser is None else quantiser(w, moments[t.name]))
        result: Any = Evaluator(windows, batch=8, byte_lengths=None).run(session)
        losses[name] = result.nats
        more = losses[name] - losses["numbers"]
        print(f"{name:<34}{losses[name]:.5f} nats, {more:+.5f}, perplexity x {np.exp(more):.5f}", file=sys.stderr)
    row = {"run": config.preset, "steps": read_meta(checkpoint.path)["step"], "tokens": int(windows.targets), "nats": losses}
    if args.out:
        args.out.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
