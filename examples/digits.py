"""A small residual network learns scikit-learn's handwritten digits (1,797 images of 8 x 8 pixels) in less than a minute.

    pip install -e '.[examples]'
    python examples/digits.py              # trains, and prints the loss and the share of test images that are recognised
    python examples/digits.py --torch      # the same training by PyTorch beside it, from the same weights on the same images

The network is that of He et al. 2016 in small, with group norms (Wu and He 2018) in the place of batch norms.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import cos, pi, sqrt
from pathlib import Path

import numpy as np

from barellm.assembly.programs import initialise
from barellm.config import OptimConfig
from barellm.optim.adamw import adamw
from barellm.program.builder import Program, Store
from barellm.program.tensor import Dim, Tensor
from barellm.runtime.session import Session

CLASSES, SIDE, TEST = 10, 8, 360
WIDTHS = (32, 64)  # channels of the two stages; the second has 4 x 4 pixels
GROUPS = 8  # of a norm
BATCH, LR, CLIP = 64, 3e-3, 1.0
OPTIM = OptimConfig(weight_decay=0.05, beta2=0.99, clip=CLIP)


@dataclass(frozen=True)
class Images:
    """Pixels (N, 1, 8, 8) of mean 0 and deviation 1, and labels (N)."""

    pixels: np.ndarray
    labels: np.ndarray


def digits() -> tuple[Images, Images]:
    """(for training, for testing), cut by a fixed permutation."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit("the digits come with scikit-learn, which is missing: pip install scikit-learn") from None
    found = load_digits()
    pixels = ((found.images - found.images.mean()) / found.images.std()).astype(np.float32)[:, None]
    order = np.random.default_rng(0).permutation(len(pixels))
    train, test = order[TEST:], order[:TEST]
    labels = found.target.astype(np.int32)
    return Images(pixels[train], labels[train]), Images(pixels[test], labels[test])


def network(p: Program, x: Tensor) -> Tensor:
    """Pixels (N, 1, 8, 8) -> features (N, 64)."""

    def convolve(x: Tensor, name: str, K: int, *, size: int = 3, stride: int = 1) -> Tensor:
        C = int(x.shape[1])
        w = p.parameter(f"{name}.w", (K, C, size, size), std=sqrt(2 / (C * size * size)))
        y = p.conv2d(x, w, stride=stride, padding=size // 2)
        return p.group_norm(y, p.parameter(f"{name}.g", (K,), value=1.0), p.parameter(f"{name}.b", (K,)), groups=GROUPS)

    h = p.activate(convolve(x, "stem", WIDTHS[0]), "relu")
    for stage, K in enumerate(WIDTHS):
        for block in range(2):
            name, stride = f"{stage}.{block}", 2 if stage and not block else 1
            inner = p.activate(convolve(h, f"{name}.first", K, stride=stride), "relu")
            short = h if stride == 1 else convolve(h, f"{name}.short", K, size=1, stride=stride)
            h = p.activate(p.add(short, convolve(inner, f"{name}.second", K)), "relu")
    return p.mean_pixels(h)


def programs(most: int) -> tuple[Store, dict[str, Program]]:
    """init, micro, update, and eval, which gives the logits of up to `most` images."""
    store = Store()
    micro, evaluate, update, init = (Program(store) for _ in range(4))
    for p, batch in ((micro, BATCH), (evaluate, most)):
        N = Dim("batch", batch)
        x = network(p, p.input("pixels", (N, 1, SIDE, SIDE), "fp32"))
        head = p.parameter("head", (CLASSES, WIDTHS[-1]), std=1 / sqrt(WIDTHS[-1]))
        if p is micro:
            loss = p.output("loss", p.classifier(x, head, p.input("labels", (N,)), valid_vocab=CLASSES))
            p.backward(loss)
        else:
            p.output("logits", p.linear(x, head))
    adamw(update, OPTIM)
    initialise(init)
    return store, {"init": init, "forward_backward": micro, "optimizer_step": update, "eval": evaluate}


def batches(images: Images, steps: int, seed: int) -> Iterator[tuple[float, Images]]:
    """(learning rate, images) of each step: a random order, each image moved by a pixel at most in both directions."""
    r, order = np.random.default_rng(seed), np.zeros(0, np.int64)
    for step in range(steps):
        if len(order) < BATCH:
            order = r.permutation(len(images.labels))
        chosen, order = order[:BATCH], order[BATCH:]
        padded = np.pad(images.pixels[chosen], ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=images.pixels.min())
        moved = [padded[i, :, y : y + SIDE, x : x + SIDE] for i, (y, x) in enumerate(r.integers(0, 3, (BATCH, 2)))]
        warm = min(1.0, 10 * (step + 1) / steps)
        yield LR * warm * (0.5 + 0.5 * cos(pi * step / steps)), Images(np.stack(moved), images.labels[chosen])


def step(session: Session, number: int, lr: float, batch: Images) -> float:
    """One step of training; gives the loss before it."""
    session.write("pixels", batch.pixels)
    session.write("labels", batch.labels)
    session.run("forward_backward", batch=BATCH, inv_targets=1 / BATCH)
    session.run("optimizer_step", lr=lr, step=number + 1)
    return float(session.read("loss")[0])


def accuracy(session: Session, images: Images) -> float:
    """The share of images that are recognised."""
    session.write("pixels", images.pixels)
    session.run("eval", batch=len(images.labels))
    return float((session.read("logits").argmax(-1) == images.labels).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--torch", action="store_true", help="train PyTorch's twin beside it")
    parser.add_argument("--out", type=Path, help="write the curve and the seconds to this file, as JSON")
    args = parser.parse_args()
    from barellm.cpu.backend import describe, open_session

    train, test = digits()
    store, built = programs(len(test.labels))
    session = open_session(built)
    session.run("init", seed=args.seed)
    twin = None
    if args.torch:
        from digits_torch import Twin

        twin = Twin({t.name: session.read(t.name) for t in store.of_role("parameter")})
    began, ours, theirs = time.perf_counter(), 0.0, 0.0
    curve: list[dict[str, float]] = []
    for number, (lr, batch) in enumerate(batches(train, args.steps, args.seed)):
        start = time.perf_counter()
        loss = step(session, number, lr, batch)
        middle = time.perf_counter()
        line = f"step {number + 1:4d}  loss {loss:.4f}"
        curve.append({"loss": loss})
        ours += middle - start
        if twin is not None:
            curve[-1]["torch_loss"] = twin.step(lr, batch.pixels, batch.labels)
            line += f"  PyTorch {curve[-1]['torch_loss']:.4f}"
            theirs += time.perf_counter() - middle
        if (number + 1) % 100 == 0 or number + 1 == args.steps:
            curve[-1]["recognised"] = accuracy(session, test)
            line += f"  recognised {curve[-1]['recognised']:.2%}"
            if twin is not None:
                curve[-1]["torch_recognised"] = twin.accuracy(test.pixels, test.labels)
                line += f"  PyTorch {curve[-1]['torch_recognised']:.2%}"
            print(line, flush=True)
    print(f"{args.steps} steps took {ours:.1f} s" + (f", PyTorch's {theirs:.1f} s" if twin is not None else ""))
    total = time.perf_counter() - began
    print(f"{total:.1f} s in all, {accuracy(session, test):.2%} of {len(test.labels)} test images recognised")
    if args.out:
        seconds = {"steps_s": ours, "torch_steps_s": theirs, "total_s": total}
        args.out.write_text(json.dumps({"kind": "digits", **describe(), **seconds, "curve": curve}, indent=1) + "\n")


if __name__ == "__main__":
    main()
