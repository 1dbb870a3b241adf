"""Measures the GPU: FLOP/s of matmuls on chip, bytes/s of each mix of reads and writes; and compares parts of its memory."""

from collections.abc import Callable
from typing import Any

import numpy as np

from barellm.cuda import driver
from barellm.cuda.compile import compiled
from barellm.cuda.kernel import Launch, Sizes, Specialisation
from barellm.cuda.kernels import microbenchmarks
from barellm.cuda.lang import DeviceFunction
from barellm.cuda.launch import BoundLaunch, Kernel
from barellm.program.dtypes import numpy_dtype

BANDWIDTH_BYTES = 1 << 29  # that a measurement of bandwidth touches: ten times L2
BLOCK = 1024
ITERATIONS = 4096
BF16_TILE = (128, 256, 64, 8)
TILES = {"bf16": BF16_TILE, "fp16": BF16_TILE, "fp32": (64, 64, 16, 4)}  # M, N, K of a matmul, warps
REPEATS, TRIALS = 10, 5


def graph_seconds(context: driver.Context, enqueue: Callable[[], None], repeats: int) -> float:
    """Seconds of one replay of what `enqueue` puts on the stream, the mean of `repeats` in a row, after one that does not count."""
    graph = driver.Graph(context.stream, enqueue)
    try:
        return replay_seconds(context, lambda: graph.launch(context.stream), repeats)
    finally:
        graph.free()


def replay_seconds(context: driver.Context, start: Callable[[], None], repeats: int) -> float:
    """Seconds of one `start()`, the mean of `repeats` in a row after one that does not count, by events on the GPU."""
    begin, end = driver.Event(timed=True), driver.Event(timed=True)
    start()
    begin.record(context.stream)
    for _ in range(repeats):
        start()
    end.record(context.stream)
    end.wait()
    return end.since(begin) / 1e3 / repeats


def opless_kernel(
    function: DeviceFunction, kinds: dict[str, str], constants: dict[str, Any], *, warps: int = 4, aligned: tuple[str, ...] = (),
) -> Specialisation:  # fmt: skip
    """A kernel that belongs to no op. `kinds`: the types of its parameters, in their order; `aligned`: pointers that are multiples
    of 16 bytes."""
    options = (("num_stages", 1), ("num_warps", warps))
    return Specialisation(function, tuple(kinds.items()), tuple(sorted(constants.items())), options, aligned)


def peak_kernel(dtype: str) -> Specialisation:
    """The kernel that `Bench.peak` launches."""
    rows, cols, depth, warps = TILES[dtype]
    kinds = {"out": "*fp32", "a": f"*{dtype}", "b": f"*{dtype}", "iterations": "i32"}
    constants = {"ROWS": rows, "COLS": cols, "DEPTH": depth}
    return opless_kernel(microbenchmarks.peak, kinds, constants, warps=warps, aligned=("out", "a", "b"))


def bandwidth_kernel(mix: tuple[int, int, int]) -> Specialisation:
    """The kernel that `Bench.bandwidth` launches."""
    kinds = dict.fromkeys(("a", "b", "c"), "*fp32") | {"n": "i32"}
    constants = dict(zip(("READ", "WRITE", "UPDATE"), mix, strict=True)) | {"BLOCK": BLOCK}
    return opless_kernel(microbenchmarks.move, kinds, constants, aligned=("a", "b", "c"))


class Bench:
    """Runs single kernels on this machine's GPU."""

    def __init__(self, device: driver.Device | None = None) -> None:
        self.device = device or driver.device()
        self.context = driver.Context(self.device)
        self.machine = self.device.name

    def peak(self, dtype: str) -> float:
        """FLOP/s of all multiprocessors on random numbers: the roofline of a `dtype` matmul, at the clock rate that power leaves.
        TF32 is not used. That of "fp8" is not measured: data sheets have twice the rate of bf16."""
        if dtype == "fp8":
            return 2 * self.peak("bf16")
        rows, cols, depth, _ = TILES[dtype]
        blocks = 2 * self.device.sms
        noise = np.random.default_rng(0).standard_normal(depth * (rows + cols)).astype(numpy_dtype(dtype))
        out, operands = driver.DeviceMemory(4 * blocks), driver.DeviceMemory(noise.nbytes)
        operands.write(0, noise.view(np.uint8), self.context.stream)
        pointers = {"a": operands.address, "b": operands.address + noise.nbytes // (rows + cols) * rows}
        arguments = pointers | {"out": out.address, "iterations": ITERATIONS}
        best = self._best(peak_kernel(dtype), arguments, blocks)
        for memory in (out, operands):
            memory.free()
        return 2.0 * rows * cols * depth * ITERATIONS * blocks / best

    def bandwidth(self, mix: tuple[int, int, int]) -> float:
        """Bytes/s of a kernel that reads, writes and updates `mix` = (reads, writes, updates) streams of floats; an update counts
        twice."""
        read, write, update = mix
        n = BANDWIDTH_BYTES // (4 * sum(mix)) // BLOCK * BLOCK
        memory = driver.DeviceMemory(4 * n * (sum(mix) + 1))
        memory.fill(0, 0, memory.nbytes, self.context.stream)
        starts = {"a": 0, "b": read, "c": read + write}
        arguments = {name: memory.address + 4 * n * at for name, at in starts.items()} | {"n": n}
        best = self._best(bandwidth_kernel(mix), arguments, n // BLOCK)
        memory.free()
        return 4.0 * n * (read + write + 2 * update) / best

    def _best(self, spec: Specialisation, arguments: dict[str, int], blocks: int) -> float:
        """The least seconds of a launch, of TRIALS."""
        kernel = OplessKernel(self.device, spec)
        bound = kernel.bound(arguments, blocks)
        enqueue = lambda: bound.run(self.context.stream)  # noqa: E731
        best = min(graph_seconds(self.context, enqueue, REPEATS) for _ in range(TRIALS))
        kernel.kernel.unload()
        return best

    def close(self) -> None:
        self.context.close()


class OplessKernel:
    """A kernel without an op, loaded."""

    def __init__(self, device: driver.Device, spec: Specialisation) -> None:
        self.spec = spec
        self.kernel = Kernel(compiled([spec], device.arch, processes=1)[spec], device)

    def bound(self, arguments: dict[str, int], blocks: int) -> BoundLaunch:
        args = [arguments[name] for name, _ in self.spec.signature]
        launch = Launch(self.spec, args, lambda sizes: (blocks,), [], [], None)  # pyright: ignore[reportArgumentType]
        return BoundLaunch(launch, self.kernel, Sizes(), lambda region: 0, 0)


class MemoryComparison:
    """Finds where ranges of GPU memory differ, without copying them to the host."""

    PROGRAMS, BLOCK = 1024, 4096  # at most; numbers of 2 bytes
    MOST = 1 << 31  # bytes at a time

    def __init__(self, device: driver.Device) -> None:
        self.context = driver.Context(device)  # which is current from here on: the driver loads no kernel without
        self.differences = OplessKernel(device, self.kernel())
        self.found = driver.DeviceMemory(4 * self.PROGRAMS)

    @classmethod
    def kernel(cls) -> Specialisation:
        """What it launches."""
        kinds = {"found": "*i32", "a": "*i16", "b": "*i16", "n": "i32", "blocks": "i32"}
        return opless_kernel(microbenchmarks.differences, kinds, {"BLOCK": cls.BLOCK})

    def first(self, a: driver.DeviceMemory, b: driver.DeviceMemory, start: int, stop: int, shift: int, stream: Any) -> int | None:
        """The first byte of [start, stop), two even numbers, in which b differs from a, where the same bytes are `shift` further
        on; None where all are equal."""
        for at in range(start, stop, self.MOST):
            if (found := self._first(a, b, at, min(stop, at + self.MOST), shift, stream)) is not None:
                return found
        return None

    def _first(self, a: Any, b: Any, start: int, stop: int, shift: int, stream: Any) -> int | None:
        """The same for at most MOST bytes: the GPU counts differences in each program's part, the host compares the first such
        part."""
        n = (stop - start) // 2
        programs = min(self.PROGRAMS, -(-n // self.BLOCK))
        blocks = -(-n // (programs * self.BLOCK))
        arguments = {"found": self.found.address, "a": a.address + shift + start, "b": b.address + start, "n": n}
        self.differences.bound(arguments | {"blocks": blocks}, programs).run(stream)
        (hits,) = np.nonzero(self.found.read(0, 4 * programs, stream).view(np.int32))
        if not hits.size:
            return None
        first = start + int(hits[0]) * blocks * self.BLOCK * 2
        last = min(stop, first + blocks * self.BLOCK * 2)
        left, right = a.read(shift + first, shift + last, stream), b.read(first, last, stream)
        return first + int(np.flatnonzero(left != right)[0])

    def close(self) -> None:
        self.differences.kernel.unload()
        self.found.free()
        self.context.close()
