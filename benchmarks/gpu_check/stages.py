"""The stages in their order: what each shows, and how long it may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

Keep = Callable[[dict[str, Any]], None]
MARGIN_S, MARGIN_PART = (12.0, 4)  # before the limit of a stage at which it ends what it has started; of a short one a quarter
START_S = 60.0  # that a rung of the ladder has before its first launch, which a cold machine needs: its limit counts from there
LAUNCHES = ("cuLaunchKernelEx", "cuGraphLaunch")


@dataclass(frozen=True)
class Stage:
    """`module.name` of this folder does it. The limits of a group add up to eight minutes, so that a call of ten minutes holds it
    with what a machine needs besides; those of "first" to four. `after`: stages that must have gone well, where they ran: the same
    kernel in an easier case."""

    group: str
    module: str
    name: str
    limit_s: int
    what: str
    after: tuple[str, ...] = ()

    @property
    def start_s(self) -> float:
        """How long its limit may wait for its first launch."""
        return START_S if self.module == "first" else 0.0


STAGES = (
    Stage("first", "correct", "versions", 20, "what is installed, the driver, the GPU"),
    Stage("first", "first", "plain", 15, "a product of Triton's"),
    Stage("first", "first", "tile", 15, "Hopper's product: one tile"),
    Stage("first", "first", "ring", 20, "its ring goes round; more tiles than blocks; one block, and seven", ("tile",)),
    Stage("first", "first", "epilogues", 20, "everything that its way out does", ("ring",)),
    Stage("first", "first", "parts", 10, "a sum over tokens in seven parts", ("ring",)),
    Stage("first", "first", "heads", 20, "attention forward and backward, T = 128, 1024, 1000"),
    Stage(
        "first",
        "first",
        "works",
        40,
        "each product and kernel of attention of a step of 64 x 1024",
        ("plain", "epilogues", "parts", "heads"),
    ),
    Stage("first", "first", "whole", 30, "that step launch by launch, beside cuBLASLt's products", ("works",)),
    Stage("first", "first", "same", 20, "the same as a graph: equal bits", ("works",)),
    Stage("first", "first", "pace", 30, "20 timed steps, and what the card can do", ("same",)),
    Stage("correct", "correct", "graph", 50, "a step captured and replayed: the bits of single launches"),
    Stage("correct", "correct", "kernels", 270, "every kernel test on the device"),
    Stage("correct", "correct", "equal", 130, "ten steps of gpt2-124m beside the CPU backend"),
    Stage("speed", "speed", "step", 200, "steps of gpt2-124m beside torch.compile, interleaved; memory"),
    Stage("speed", "speed", "gemm", 120, "each matmul beside cuBLAS"),
    Stage("speed", "speed", "sides", 30, "attention interleaved with Triton's"),
    Stage("speed", "speed", "start", 130, "from the command to the first step, cold and warm"),
    Stage("sound", "correct", "layout", 40, "parameters of every kernel have the bytes that the driver knows"),
    Stage("sound", "correct", "determinism", 40, "two processes, equal digests"),
    Stage("sound", "correct", "loop", 30, "NCCL: bytes of the GPU to itself, in a graph, beside other work"),
    Stage("sound", "speed", "attention", 100, "attention beside PyTorch's backends: flash, cuDNN, efficient"),
    Stage("sound", "speed", "streaming", 70, "AdamW, LayerNorm, classifier against copy bandwidth"),
    Stage("sound", "speed", "tune", 80, "tiles of products and attention of gpt2-124m; winners to tuned.json"),
    Stage("sound", "correct", "sanitizer", 80, "compute-sanitizer's four tools on a small step"),
    Stage("ops", "craft", "blocks", 50, "products with block-sparse weights beside dense ones of cuBLAS"),
    Stage("ops", "craft", "block_sparse_attention", 90, "block-sparse attention beside dense attention and flex_attention"),
    Stage("ops", "craft", "few", 50, "skinny GEMMs with weights of 16, 8 and 4 bits: bytes a second"),
    Stage("ops", "craft", "rows", 50, "LayerNorm, RMSNorm of rows of 32,768 numbers"),
    Stage("ops", "craft", "bits", 40, "random bits by Threefry, taus88, LFSR113: bytes a second"),
    Stage("ops", "counters", "counters", 80, "Nsight Compute's counters of each kernel of a step"),
)
PROBE = Stage("", "first", "probe", 15, "whether the GPU still answers")
COMPILE = Stage("", "fill", "compile", 120, "compiles what the stages launch, so that no stage's time has it")
EVERY = (*STAGES, PROBE, COMPILE)
GROUPS = tuple(dict.fromkeys(stage.group for stage in STAGES))


class Clock:
    """Of a stage: when its time began, when it was made or, for a rung of the ladder, at its first launch. `told`: a file that is
    then made, for the process that waits."""

    def __init__(self, told: Path | None = None) -> None:
        self.began, self._told = time.monotonic(), told

    def start(self) -> None:
        """From now on, if it was not told yet."""
        if self._told is not None and not self._told.exists():
            self.began = time.monotonic()
            self._told.touch()

    @contextmanager
    def at_first_launch(self) -> Iterator[None]:
        """Within the context it starts at the first launch."""
        from barellm.cuda import driver

        call = driver.call

        def watched(name: str, *args: Any) -> Any:
            if name in LAUNCHES:
                self.start()
            return call(name, *args)

        with patch.object(driver, "call", watched):
            yield


@dataclass(frozen=True)
class Scale:
    """How much is done. `small`: tiny models and few repeats, so that a rehearsal needs no GPU's speed. `mock`: the driver is the
    one in Python, whose timings mean nothing. `keep`: what a stage has found so far, for where it fails later. `stages`: the names
    of those that were asked for."""

    small: bool
    mock: bool
    keep: Keep = lambda found: None
    limit_s: float = 600.0
    stages: tuple[str, ...] = ()
    clock: Clock = field(default_factory=Clock)

    @property
    def left_s(self) -> float:
        """Until a stage should end what it has started."""
        margin = min(MARGIN_S, self.limit_s / MARGIN_PART)
        return max(1.0, self.limit_s - margin - (time.monotonic() - self.clock.began))


def run_stage(stage: Stage, scale: Scale) -> dict[str, Any]:
    """In this process."""
    if scale.mock:
        from pytest import MonkeyPatch

        from tests.simulators.mock import Gpu

        rehearsed_on(Gpu(), MonkeyPatch())
    function = getattr(import_module(f"benchmarks.gpu_check.{stage.module}"), stage.name)
    if not stage.start_s:
        return function(scale)
    with scale.clock.at_first_launch():
        return function(scale)


def rehearsed_on(gpu: Any, patch: Any) -> None:
    """From now on, or as long as the patch lasts, the tests' driver `gpu` in the place of a GPU's, and measurements of the machine
    that do next to nothing."""
    from barellm.cuda import bench
    from tests.simulators.mock_cublas import MockCublas
    from tests.simulators.mock_nccl import Nccl

    gpu.install(patch)
    MockCublas(gpu).install(patch)
    nccl = Nccl(lambda: gpu)
    patch.setattr("barellm.cuda.nccl.bindings", lambda: nccl)
    tiles = {"fp32": (16, 16, 16, 4), "bf16": (16, 16, 16, 4)}
    for name, value in {"BANDWIDTH_BYTES": 32 * bench.BLOCK, "ITERATIONS": 1, "TRIALS": 1, "REPEATS": 1, "TILES": tiles}.items():
        patch.setattr(bench, name, value)
