"""Measures the GPU: FLOP/s of products that read no memory, bytes/s of each mix of reads and writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from barellm.cuda import driver
from barellm.cuda.compile import compiled
from barellm.cuda.kernel import Launch, Sizes, Spec
from barellm.cuda.kernels import machine
from barellm.cuda.lang import DeviceFunction
from barellm.cuda.launch import BoundLaunch, Kernel
from barellm.runtime.storage import dtype_of

NBYTES = 1 << 29  # that a measurement of bandwidth touches: ten times the second cache
BLOCK = 1024
TURNS = 4096
TILES = {"bf16": (128, 256, 64, 8), "fp32": (64, 64, 16, 4)}  # rows, columns, depth of a product, warps
REPEATS, TRIALS = 10, 5


def graph_seconds(context: driver.Context, enqueue: Callable[[], None], repeats: int) -> float:
    """Of one of `repeats` replays in a row of what `enqueue` puts on the stream, after one that does not count."""
    graph = driver.Graph(context.stream, enqueue)
    try:
        return replay_seconds(context, lambda: graph.launch(context.stream), repeats)
    finally:
        graph.free()


def replay_seconds(context: driver.Context, start: Callable[[], None], repeats: int) -> float:
    """As the GPU's own clock has it, from before the first to after the last."""
    begin, end = driver.Event(timed=True), driver.Event(timed=True)
    start()
    begin.record(context.stream)
    for _ in range(repeats):
        start()
    end.record(context.stream)
    end.wait()
    return end.since(begin) / 1e3 / repeats


class Bench:
    """Runs single kernels on this machine's GPU."""

    def __init__(self, device: driver.Device | None = None) -> None:
        self.device = device or driver.device()
        self.context = driver.Context(self.device)

    def peak(self, dtype: str) -> float:
        """FLOP/s of all multiprocessors on random numbers: the most that a product of `dtype` can reach at the clock that they
        leave. TF32 is not used."""
        rows, cols, depth, warps = TILES[dtype]
        blocks = 2 * self.device.sms
        noise = np.random.default_rng(0).standard_normal(depth * (rows + cols)).astype(dtype_of(dtype))
        out, operands = driver.DeviceMemory(4 * blocks), driver.DeviceMemory(noise.nbytes)
        operands.write(0, noise.view(np.uint8), self.context.stream)
        pointers = {"a": operands.address, "b": operands.address + noise.nbytes // (rows + cols) * rows}
        constants = {"ROWS": rows, "COLS": cols, "DEPTH": depth}
        kinds = {"out": "*fp32", "a": f"*{dtype}", "b": f"*{dtype}", "turns": "i32"}
        arguments = pointers | {"out": out.address, "turns": TURNS}
        best = self._best(machine.peak, kinds, arguments, constants, blocks, warps)
        for memory in (out, operands):
            memory.free()
        return 2.0 * rows * cols * depth * TURNS * blocks / best

    def bandwidth(self, mix: tuple[int, int, int]) -> float:
        """Bytes/s of a kernel that of every eight floats reads, writes and updates in place as many as `mix` says; an update counts
        twice."""
        read, write, update = mix
        n = NBYTES // (4 * sum(mix)) // BLOCK * BLOCK
        memory = driver.DeviceMemory(4 * n * (sum(mix) + 1))
        memory.fill(0, 0, memory.nbytes, self.context.stream)
        starts = {"a": 0, "b": read, "c": read + write}
        arguments = {name: memory.address + 4 * n * at for name, at in starts.items()} | {"n": n}
        kinds = dict.fromkeys(("a", "b", "c"), "*fp32") | {"n": "i32"}
        constants = {"READ": read, "WRITE": write, "UPDATE": update, "BLOCK": BLOCK}
        best = self._best(machine.move, kinds, arguments, constants, n // BLOCK, 4)
        memory.free()
        return 4.0 * n * (read + write + 2 * update) / best

    def _best(
        self,
        function: DeviceFunction,
        kinds: dict[str, str],
        arguments: dict[str, int],
        constants: dict[str, Any],
        blocks: int,
        warps: int,
    ) -> float:
        """The least seconds of a launch, of TRIALS."""
        pointers = tuple(name for name, kind in kinds.items() if kind[0] == "*")
        options = (("num_stages", 1), ("num_warps", warps))
        spec = Spec(function, tuple(kinds.items()), tuple(sorted(constants.items())), options, pointers)
        code = compiled([spec], self.device.arch, processes=1)[spec]
        args = [arguments[name] for name in kinds]
        launch = Launch(spec, args, lambda sizes: (blocks,), [], [], None)  # pyright: ignore[reportArgumentType]
        kernel = Kernel(code, self.device)
        bound = BoundLaunch(launch, kernel, Sizes(), lambda region: 0, 0)
        enqueue = lambda: bound.run(self.context.stream)  # noqa: E731
        best = min(graph_seconds(self.context, enqueue, REPEATS) for _ in range(TRIALS))
        kernel.unload()
        return best

    def close(self) -> None:
        self.context.close()
