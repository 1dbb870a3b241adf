"""The 3 x 3 layers of VGG-16 and ResNet-50, or layers of large filters, forward, beside PyTorch, and the errors of each algorithm.

    python -m benchmarks.convolution --batch 1 --batch 16 --out benchmarks/results/convolution.json
    python -m benchmarks.convolution --batch 16 --dtype bf16 --out benchmarks/results/xeon-amx/convolution-bf16.json
    python -m benchmarks.convolution --batch 1 --large --out benchmarks/results/xeon-amx/convolution-large.json

A file of the same processor keeps its rows of other layers and batches, so a run may be done in pieces.

Every layer is run by each algorithm in turns with PyTorch in both of its memory formats; all samples are kept. The peak is measured
beside each layer, and the bandwidth once.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from barellm.cpu.backend import Bench, describe
from barellm.cpu.step import CpuSession
from barellm.program.builder import Program, Store
from barellm.program.ops.convolution import Conv2d

# name -> channels in and out, pixels of a side, rows and columns of a filter
LAYERS = {
    "VGG 64, 224": (64, 224, 3),
    "VGG 128, 112": (128, 112, 3),
    "VGG 256, 56": (256, 56, 3),
    "VGG 512, 28": (512, 28, 3),
    "VGG 512, 14": (512, 14, 3),
    "ResNet 64, 56": (64, 56, 3),
    "ResNet 128, 28": (128, 28, 3),
    "ResNet 256, 14": (256, 14, 3),
    "ResNet 512, 7": (512, 7, 3),
}
LARGE = {
    f"{size} x {size}: {C}, {side}": (C, side, size)
    for size in (5, 7, 9, 11, 15, 21)
    for C, side in ((32, 112), (128, 56))
}
NUMPY = {"fp32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}
ALGORITHMS = ("direct", "winograd2", "winograd4")
LARGE_ALGORITHMS = ("direct", "fft")
TURN = 0.1  # seconds of a turn, or one run where that takes longer


def program(algorithm: str, x: tuple[int, ...], w: tuple[int, ...], dtype: str) -> Program:
    """A convolution of images and filters of these shapes, stored in `dtype`. Both lie in the arena: an input would be copied in
    every run."""
    p = Program(Store())
    images, filters = (p.parameter(name, shape, dtype=dtype) for name, shape in (("x", x), ("w", w)))
    p.output("y", p.conv2d(images, filters, padding=w[2] // 2, algorithm=algorithm))
    return p


def session_of(algorithm: str, x: np.ndarray, w: np.ndarray, dtype: str) -> CpuSession:
    session = CpuSession({"op": program(algorithm, x.shape, w.shape, dtype)})
    session.write("x", x)
    session.write("w", w)
    return session


def peers(x: np.ndarray, w: np.ndarray, threads: int) -> dict[str, Callable[[], Any]]:
    """PyTorch's convolution in both memory formats, of images and filters in the dtype of x."""
    import torch

    dtype = torch.float32 if x.dtype == np.float32 else torch.bfloat16
    torch.set_num_threads(threads)
    found = {}
    for name, form in (("torch", torch.contiguous_format), ("torch channels last", torch.channels_last)):
        tx, tw = (torch.from_numpy(a.astype(np.float32)).to(dtype).contiguous(memory_format=form) for a in (x, w))

        def run(tx=tx, tw=tw) -> None:
            with torch.inference_mode():
                torch.nn.functional.conv2d(tx, tw, padding=w.shape[2] // 2)

        found[name] = run
    return found


def turn(run: Callable[[], Any]) -> float:
    """Seconds of a run, the mean over a turn."""
    count, start = 0, time.perf_counter()
    while True:
        run()
        count += 1
        taken = time.perf_counter() - start
        if taken >= TURN:
            return taken / count


def measure(
    N: int, name: str, rounds: int, bench: Bench, bandwidth: float, algorithms: tuple[str, ...], dtype: str
) -> dict[str, Any]:
    """One layer: samples of each variant, and the bound of the direct algorithm."""
    C, side, size = (LAYERS | LARGE)[name]
    K = C
    r = np.random.default_rng(0)
    x = r.standard_normal((N, C, side, side), dtype=np.float32)
    w = r.standard_normal((K, C, size, size), dtype=np.float32) / np.float32(size * np.sqrt(C))
    x, w = (a.astype(NUMPY[dtype]) for a in (x, w))
    sessions = {a: session_of(a, x, w, dtype) for a in algorithms}
    runs: dict[str, Callable[[], Any]] = {a: (lambda s=s: s.run("op")) for a, s in sessions.items()}
    runs |= peers(x, w, bench.threads)
    for run in runs.values():
        run()
    samples: dict[str, list[float]] = {variant: [] for variant in runs}
    peaks = []
    for _ in range(rounds):
        peaks.append(bench.peak(dtype))
        for variant, run in runs.items():
            samples[variant].append(turn(run))
    for session in sessions.values():
        session.close()
    flops = 2 * size * size * N * C * K * side * side
    nbytes = x.nbytes + w.nbytes + x.itemsize * N * K * side * side
    peak = max(peaks)
    bound = max(flops / peak, nbytes / bandwidth)
    row = {"layer": name, "batch": N, "flops": flops, "peak_flops": peak, "bound_s": bound, "samples_s": samples}
    print(f"{name:>15} x{N:<3}", *(f"{v} {flops / np.median(s) / peak:.2f}" for v, s in samples.items()), flush=True)
    return row


def errors(C: int, size: int = 3, algorithms: tuple[str, ...] = ALGORITHMS) -> dict[str, float]:
    """The largest error of each algorithm relative to the RMS of the result: 60 tiles of 4 x 4, unit-normal pixels."""
    r = np.random.default_rng(C)
    x = r.standard_normal((60, C, size + 3, size + 3), dtype=np.float32)
    w = r.standard_normal((1, C, size, size), dtype=np.float32) / np.float32(size * np.sqrt(C))
    attrs = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1, "reflect": False, "mirrored": False}
    exact = Conv2d({}, attrs).reference(x.astype(np.float64), w.astype(np.float64))["y"]
    found = {}
    from barellm import kernels

    for algorithm in algorithms:
        y = kernels.conv2d(x, w, algorithm=algorithm)
        found[algorithm] = float(np.abs(y - exact).max() / np.sqrt((exact**2).mean()))
    return found


def others(out: Path | None, processor: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a file of this processor that were not measured now."""
    known = json.loads(out.read_text()) if out and out.exists() else {}
    if known.get("processor") != processor:
        return []
    now = {(row["layer"], row["batch"]) for row in rows}
    return [row for row in known["rows"] if (row["layer"], row["batch"]) not in now]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, action="append", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layer", action="append", choices=LAYERS | LARGE, help="these only")
    parser.add_argument(
        "--large", action="store_true", help="layers of large filters, directly and by Fourier transforms"
    )
    parser.add_argument("--algorithm", action="append", choices=(*ALGORITHMS, "fft"), help="these only")
    parser.add_argument("--dtype", choices=NUMPY, default="fp32", help="of the images")
    parser.add_argument("--processor", default="", help="what to call the machine in the file")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    bench = Bench()
    bandwidth = bench.bandwidth((1, 1, 0))
    layers, all_of_them = (LARGE, LARGE_ALGORITHMS) if args.large else (LAYERS, ALGORITHMS)
    algorithms = tuple(args.algorithm or all_of_them)
    rows = [
        measure(N, name, args.rounds, bench, bandwidth, algorithms, args.dtype)
        for N in args.batch
        for name in args.layer or layers
    ]
    facts = {"processor": args.processor or describe()["processor"], "isa": bench.isa.name, "threads": bench.threads}
    result = {
        "kind": "convolution",
        **facts,
        "dtype": args.dtype,
        "bandwidth": bandwidth,
        "rows": [*others(args.out, facts["processor"], rows), *rows],
        "errors": {C: errors(C, *((11, algorithms) if args.large else ())) for C in (64, 512)},
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
