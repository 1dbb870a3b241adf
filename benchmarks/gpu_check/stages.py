"""The stages in their order: what each shows, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Stage:
    """`module.name` of this folder does it. The limits of a group add up to less than ten minutes."""

    group: str
    module: str
    name: str
    limit_s: int
    what: str


STAGES = (
    Stage("correct", "correct", "versions", 60, "what is installed, the driver, the GPU"),
    Stage("correct", "correct", "kernels", 360, "every kernel test on the device"),
    Stage("correct", "correct", "layout", 90, "parameters of every kernel have the bytes that the driver knows"),
    Stage("correct", "correct", "graph", 60, "a step captured and replayed: the bits of single launches"),
    Stage("sound", "correct", "equal", 150, "ten steps of gpt2-124m beside the CPU backend"),
    Stage("sound", "correct", "determinism", 90, "two processes, equal digests"),
    Stage("sound", "correct", "sanitizer", 180, "compute-sanitizer's four tools on a small step"),
    Stage("sound", "speed", "attention", 90, "attention beside PyTorch's flash backend"),
    Stage("sound", "speed", "streaming", 80, "AdamW, LayerNorm, classifier against copy bandwidth"),
    Stage("speed", "speed", "step", 270, "steps of gpt2-124m beside torch.compile, in turns; memory"),
    Stage("speed", "speed", "gemm", 150, "each matrix product beside cuBLAS"),
    Stage("speed", "speed", "start", 170, "from the command to the first step, cold and warm"),
)
GROUPS = tuple(dict.fromkeys(stage.group for stage in STAGES))


@dataclass(frozen=True)
class Scale:
    """How much is done. `small`: tiny models and few repeats, so that a rehearsal needs no GPU's speed. `mock`: the driver is the
    one in Python, whose timings mean nothing."""

    small: bool
    mock: bool


def run_stage(name: str, *, small: bool, mock: bool) -> dict[str, Any]:
    """In this process."""
    (stage,) = (s for s in STAGES if s.name == name)
    if mock:
        _mock()
    return getattr(import_module(f"benchmarks.gpu_check.{stage.module}"), name)(Scale(small, mock))


def _mock() -> None:
    """The tests' driver for the rest of this process, and measurements of the machine that do next to nothing."""
    from pytest import MonkeyPatch

    from barellm.cuda import bench
    from tests.cuda.mock import Gpu
    from tests.cuda.mock_cublas import MockCublas

    patch = MonkeyPatch()
    gpu = Gpu()
    gpu.install(patch)
    MockCublas(gpu).install(patch)
    tiles = {"fp32": (16, 16, 16, 4), "bf16": (16, 16, 16, 4)}
    for name, value in {"NBYTES": 32 * bench.BLOCK, "TURNS": 1, "TRIALS": 1, "REPEATS": 1, "TILES": tiles}.items():
        patch.setattr(bench, name, value)
