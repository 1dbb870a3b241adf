"""The 3 x 3 layers of VGG-16 and ResNet-50 with one depthwise and one dilated, or layers of large filters, beside PyTorch: forward,
and the gradients of the input and of the filters; and the errors of each algorithm.

    python -m benchmarks.convolution --batch 1 --batch 16 --out benchmarks/results/xeon-amx/convolution-fp32.json
    python -m benchmarks.convolution --batch 16 --dtype bf16 --pass dw --out benchmarks/results/xeon-amx/convolution-bf16.json
    python -m benchmarks.convolution --batch 1 --large --out benchmarks/results/xeon-amx/convolution-large.json

A file of the same processor and dtype keeps its rows of other layers, batches and passes, so a run may be done in pieces.
`benchmarks/convolution_table.py` makes the tables of docs/convolution.md of it.

Every layer is run by each algorithm in turns with PyTorch in both of its memory formats; all samples are kept. The peak is measured
beside each layer, and the bandwidth once. What the environment says to malloc is kept too: results of PyTorch are new memory
each time (benchmarks/peers/environments.json has what to set). bf16 images are run by "auto" alone where the
processor has AMX, since that is what it takes for them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np

from barellm.cpu.backend import Bench, describe
from barellm.cpu.step import CpuSession
from barellm.program.builder import Program, Store
from barellm.program.ops.convolution import Conv2d, Conv2dDw, Conv2dDx


@dataclass(frozen=True)
class Layer:
    """A layer with `C` channels in and `K` out, images of `side` x `side` pixels, filters of `size` x `size`, padded so that with a
    stride of 1 the image keeps its size."""

    C: int
    K: int
    side: int
    size: int = 3
    stride: int = 1
    groups: int = 1
    dilation: int = 1

    @property
    def padding(self) -> int:
        return self.size // 2 * self.dilation

    @property
    def outputs(self) -> int:
        """Pixels of a side of the result."""
        return (self.side - 1) // self.stride + 1

    @property
    def filters(self) -> tuple[int, int, int, int]:
        return self.K, self.C // self.groups, self.size, self.size

    @property
    def attrs(self) -> dict[str, Any]:
        pairs = {name: (getattr(self, name),) * 2 for name in ("stride", "padding", "dilation")}
        return pairs | {"groups": self.groups, "reflect": False, "flip_kernel": False}


LAYERS = {
    "VGG 3 -> 64, 224": Layer(3, 64, 224),
    "VGG 64, 224": Layer(64, 64, 224),
    "VGG 64 -> 128, 112": Layer(64, 128, 112),
    "VGG 128, 112": Layer(128, 128, 112),
    "VGG 128 -> 256, 56": Layer(128, 256, 56),
    "VGG 256, 56": Layer(256, 256, 56),
    "VGG 256 -> 512, 28": Layer(256, 512, 28),
    "VGG 512, 28": Layer(512, 512, 28),
    "VGG 512, 14": Layer(512, 512, 14),
    "ResNet 64, 56": Layer(64, 64, 56),
    "ResNet 128, 56, stride 2": Layer(128, 128, 56, stride=2),
    "ResNet 128, 28": Layer(128, 128, 28),
    "ResNet 256, 28, stride 2": Layer(256, 256, 28, stride=2),
    "ResNet 256, 14": Layer(256, 256, 14),
    "ResNet 512, 14, stride 2": Layer(512, 512, 14, stride=2),
    "ResNet 512, 7": Layer(512, 512, 7),
    "depthwise 256, 28": Layer(256, 256, 28, groups=256),
    "dilated by 2, 256, 28": Layer(256, 256, 28, dilation=2),
}
LARGE = {
    f"{size} x {size}: {C}, {side}": Layer(C, C, side, size) for size in (5, 7, 9, 11, 15, 21) for C, side in ((32, 112), (128, 56))
}
# Layers that the choice among algorithms was not fitted to: channels in and out, pixels of a side
UNSEEN = {f"{C} -> {K}, {side}": Layer(C, K, side) for C, K, side in (
    (32, 32, 56), (48, 96, 40), (96, 96, 28), (96, 192, 14), (160, 160, 20), (192, 384, 10), (320, 320, 16), (384, 384, 12),
    (768, 768, 7), (1024, 512, 8),
)}  # fmt: skip
PASSES = ("forward", "dx", "dw")
NUMPY = {"fp32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}
ALGORITHMS = ("direct", "winograd2", "winograd4")
LARGE_ALGORITHMS = ("direct", "fft")
EVERY = LAYERS | LARGE | UNSEEN
TURN = 0.05  # seconds of a turn, or one run where that takes longer


def shapes_of(layer: Layer, N: int) -> dict[str, tuple[int, ...]]:
    """Those of N images x, of the filters w and of the result's gradient dy."""
    images, results = (N, layer.C, layer.side, layer.side), (N, layer.K, layer.outputs, layer.outputs)
    return {"x": images, "w": layer.filters, "dy": results}


def arrays_of(layer: Layer, N: int, dtype: str) -> dict[str, np.ndarray]:
    """Random images, filters and gradient of the result in `dtype`."""
    r = np.random.default_rng(0)
    made = {name: r.standard_normal(shape, dtype=np.float32) for name, shape in shapes_of(layer, N).items()}
    made["w"] /= np.float32(layer.size * np.sqrt(layer.C // layer.groups))
    return {name: a.astype(NUMPY[dtype]) for name, a in made.items()}


def program(which: str, algorithm: str, layer: Layer, N: int, dtype: str) -> Program:
    """One of PASSES. Its operands lie in the arena: inputs would be copied in every run."""
    op, needed, size = {
        "forward": (Conv2d, ("x", "w"), {}),
        "dx": (Conv2dDx, ("dy", "w"), {"size": (layer.side, layer.side)}),
        "dw": (Conv2dDw, ("dy", "x"), {"size": (layer.size, layer.size)}),
    }[which]
    p, shapes = Program(Store()), shapes_of(layer, N)
    operands = {name: p.parameter(name, shapes[name], dtype=dtype) for name in needed}
    (result,) = p.apply(op, **operands, **size, **layer.attrs, algorithm=algorithm).outputs.values()
    p.output("result", result)
    return p


def session_of(which: str, algorithm: str, layer: Layer, given: dict[str, np.ndarray], dtype: str) -> CpuSession:
    """One of PASSES over arrays in `dtype`."""
    p = program(which, algorithm, layer, len(given["x"]), dtype)
    session = CpuSession({"op": p})
    for name in {t.name for op in p.ops for t in op.inputs.values()} & given.keys():
        session.write(name, given[name])
    return session


def peers(which: str, layer: Layer, given: dict[str, np.ndarray], threads: int) -> dict[str, Callable[[], Any]]:
    """The same by PyTorch in both memory formats."""
    import torch

    dtype = torch.float32 if given["x"].dtype == np.float32 else torch.bfloat16
    torch.set_num_threads(threads)
    window = [layer.stride] * 2, [layer.padding] * 2, [layer.dilation] * 2
    found = {}
    for name, form in (("torch", torch.contiguous_format), ("torch channels last", torch.channels_last)):
        x, w, dy = (
            torch.from_numpy(given[n].astype(np.float32)).to(dtype).contiguous(memory_format=form) for n in ("x", "w", "dy")
        )

        def run(x: Any = x, w: Any = w, dy: Any = dy) -> None:
            with torch.inference_mode():
                if which == "forward":
                    torch.nn.functional.conv2d(x, w, None, *window, layer.groups)
                    return
                wanted = [which == "dx", which == "dw", False]
                torch.ops.aten.convolution_backward(dy, x, w, None, *window, False, [0, 0], layer.groups, wanted)

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
    N: int, name: str, which: str, rounds: int, bench: Bench, bandwidth: float, algorithms: tuple[str, ...], dtype: str
) -> dict[str, Any]:
    """One pass of a layer: samples of each variant, and the bound of the direct algorithm."""
    layer, plain = EVERY[name], EVERY[name].stride == EVERY[name].dilation == 1
    algorithms = tuple(a for a in algorithms if plain or not a.startswith("winograd"))
    given = arrays_of(layer, N, dtype)
    sessions = {a: session_of(which, a, layer, given, dtype) for a in algorithms}
    runs: dict[str, Callable[[], Any]] = {a: (lambda s=s: s.run("op")) for a, s in sessions.items()}
    runs |= peers(which, layer, given, bench.threads)
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
    K, C, R, S = layer.filters
    flops = 2 * N * K * layer.outputs**2 * C * R * S
    nbytes = sum(a.nbytes for a in given.values())
    peak = max(peaks)
    bound = max(flops / peak, nbytes / bandwidth)
    shares = {v: bound / median(s) for v, s in samples.items()}
    print(f"{name:>24} x{N:<3}{which:8}", *(f"{v} {share:.2f}" for v, share in shares.items()), flush=True)
    known = {"layer": name, "batch": N, "pass": which, "flops": flops, "peak_flops": peak, "bound_s": bound}
    return known | {"samples_s": samples}


def errors(C: int, size: int = 3, algorithms: tuple[str, ...] = ALGORITHMS) -> dict[str, float]:
    """The largest error of each algorithm relative to the RMS of the result: 60 tiles of 4 x 4, unit-normal pixels."""
    r = np.random.default_rng(C)
    x = r.standard_normal((60, C, size + 3, size + 3), dtype=np.float32)
    w = r.standard_normal((1, C, size, size), dtype=np.float32) / np.float32(size * np.sqrt(C))
    attrs = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1, "reflect": False, "flip_kernel": False}
    exact = Conv2d({}, attrs).reference(x.astype(np.float64), w.astype(np.float64))["y"]
    found = {}
    from barellm import kernels

    for algorithm in algorithms:
        y = kernels.conv2d(x, w, algorithm=algorithm)
        found[algorithm] = float(np.abs(y - exact).max() / np.sqrt((exact**2).mean()))
    return found


def others(out: Path | None, facts: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a file of this processor and dtype that were not measured now."""
    known = json.loads(out.read_text()) if out and out.exists() else {}
    if any(known.get(name) != facts[name] for name in ("processor", "dtype")):
        return []

    now = {place(row) for row in rows}
    return [row for row in known["rows"] if place(row) not in now]


def place(row: dict[str, Any]) -> tuple[int, int, int]:
    """Where a row stands in the file: by layer, batch and pass."""
    return list(EVERY).index(row["layer"]), row["batch"], PASSES.index(row["pass"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, action="append", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layer", action="append", choices=EVERY, help="these only")
    parser.add_argument("--pass", dest="passes", action="append", choices=PASSES, help="these only; all by default")
    parser.add_argument("--large", action="store_true", help="layers of large filters, directly and by Fourier transforms")
    parser.add_argument("--algorithm", action="append", choices=(*ALGORITHMS, "fft", "auto"), help="these only")
    parser.add_argument("--dtype", choices=NUMPY, default="fp32", help="of the images")
    parser.add_argument("--processor", default="", help="what to call the machine in the file")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    bench = Bench()
    bandwidth = bench.bandwidth((1, 1, 0))
    layers, all_of_them = (LARGE, LARGE_ALGORITHMS) if args.large else (LAYERS, ALGORITHMS)
    if args.dtype == "bf16" and bench.isa.tiles:
        all_of_them = ("auto",)
    algorithms = tuple(args.algorithm or all_of_them)
    rows = [
        measure(N, name, which, args.rounds, bench, bandwidth, algorithms, args.dtype)
        for N in args.batch
        for name in args.layer or layers
        for which in args.passes or PASSES
    ]
    facts = {"processor": args.processor or describe()["processor"], "isa": bench.isa.name, "threads": bench.threads}
    facts |= {"dtype": args.dtype, "bandwidth": bandwidth}
    facts["malloc"] = {name: value for name, value in os.environ.items() if "MALLOC_" in name or "GLIBC_" in name}
    result = {
        "kind": "convolution",
        **facts,
        "rows": sorted([*others(args.out, facts, rows), *rows], key=place),
        "errors": {C: errors(C, *((11, LARGE_ALGORITHMS) if args.large else ())) for C in (64, 512)},
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
