"""A network whose hidden layers multiply signs by signs learns scikit-learn's handwritten digits, beside its twin in fp32.

    pip install -e '.[examples]'
    python examples/binary_digits.py                  # three seeds, both networks; about a minute
    python examples/binary_digits.py --out FILE       # and every result as JSON

Both networks have the same parameters, initial weights and batches. In the binary one, the two hidden products read nothing but
the signs of their inputs and of their weights (Courbariaux and Hubara et al. 2016). The weights themselves stay fp32: they collect
small changes until a sign turns over. The first and the last product are in fp32 in both, as is usual. The twin has GELU where the
binary network takes signs.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from barellm.assembly.programs import initialise
from barellm.config import OptimConfig
from barellm.cpu.backend import describe
from barellm.optim.adamw import adamw
from barellm.program.builder import Program, Store
from barellm.program.tensor import Dim, Tensor
from barellm.runtime.backend import backend
from barellm.training.schedule import learning_rate

CLASSES, PIXELS, TEST = 10, 64, 360
HIDDEN, LAYERS = 512, 2
BATCH, STEPS = 64, 600
OPTIM = OptimConfig(lr=3e-3, min_lr=3e-5, warmup=20, weight_decay=0.01, clip=1.0)
SEEDS = (1, 2, 3)


def digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Pixels (N, 64) of mean 0 and deviation 1 and labels (N), for training and for testing, cut by a fixed permutation."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit("the digits come with scikit-learn, which is missing: pip install scikit-learn") from None
    found = load_digits()
    pixels = ((found.data - found.data.mean()) / found.data.std()).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(pixels))
    parts = [(pixels[part], found.target[part].astype(np.int32)) for part in (order[TEST:], order[:TEST])]
    return parts[0], parts[1]


def network(p: Program, x: Tensor, *, binary: bool) -> Tensor:
    """Pixels (N, 1, 64) -> features (N, 1, HIDDEN)."""

    def norm(x: Tensor, name: str) -> Tensor:
        return p.layernorm(x, p.parameter(f"{name}.weight", (HIDDEN,), value=1.0), p.parameter(f"{name}.bias", (HIDDEN,)))

    h = norm(p.linear(x, p.parameter("first", (HIDDEN, PIXELS), std=PIXELS**-0.5)), "norm")
    for i in range(LAYERS):
        weight = p.parameter(f"hidden.{i}", (HIDDEN, HIDDEN), std=HIDDEN**-0.5)
        h = norm(p.binary_linear(h, weight) if binary else p.linear(p.gelu(h), weight), f"hidden.{i}.norm")
    return h


def programs(most: int, *, binary: bool) -> dict[str, Program]:
    """init, micro, update, and eval, which gives the logits of up to `most` images."""
    store = Store()
    made = {name: Program(store) for name in ("init", "forward_backward", "optimizer_step", "eval")}
    for name, batch in (("forward_backward", BATCH), ("eval", most)):
        p, rows = made[name], (Dim("batch", batch), Dim("seq", 1))
        h = network(p, p.input("pixels", (*rows, PIXELS), "fp32"), binary=binary)
        head = p.parameter("head", (CLASSES, HIDDEN), std=HIDDEN**-0.5)
        if name == "eval":
            p.output("logits", p.linear(h, head))
        else:
            p.output("loss", p.classifier(h, head, p.input("labels", rows), valid_vocab=CLASSES))
            p.backward(p.named["loss"])
    adamw(made["optimizer_step"], OPTIM)
    initialise(made["init"])
    return made


def train(seed: int, steps: int, *, binary: bool) -> dict[str, Any]:
    """One run: its losses, and the share of the test images that it recognises at the end."""
    (pixels, labels), (test, answers) = digits()
    session = backend("cpu").open_session(programs(len(test), binary=binary))
    session.run("init", seed=seed)
    order, losses = np.random.default_rng(seed), []
    begin = time.perf_counter()
    for step in range(steps):
        chosen = order.integers(0, len(labels), BATCH)
        session.write("pixels", pixels[chosen, None])
        session.write("labels", labels[chosen, None])
        session.run("forward_backward", batch=BATCH, seq=1, inv_targets=1 / BATCH)
        session.run("optimizer_step", step=step + 1, lr=learning_rate(step, total=steps, optim=OPTIM))
        losses.append(float(session.read("loss")[0]))
    seconds = time.perf_counter() - begin
    session.write("pixels", test[:, None])
    session.run("eval", batch=len(test), seq=1)
    found = session.read("logits").reshape(-1, CLASSES)[: len(test)].argmax(-1)
    session.close()
    return {"seed": seed, "binary": binary, "accuracy": float((found == answers).mean()), "s": seconds, "loss": losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    runs = []
    for seed in SEEDS:
        for binary in (True, False):
            run = train(seed, args.steps, binary=binary)
            runs.append(run)
            kind, last = "signs" if binary else "fp32", mean(run["loss"][-50:])
            print(f"seed {seed}, {kind}: {100 * run['accuracy']:.1f} % of the test images, loss {last:.4f}, {run['s']:.1f} s")
    for binary in (True, False):
        shares = [100 * run["accuracy"] for run in runs if run["binary"] == binary]
        print(f"{'signs' if binary else 'fp32'}: {mean(shares):.1f} % on average")
    if args.out:
        result = {"kind": "binary-digits", "machine": describe(), "steps": args.steps, "runs": runs}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
