"""Kernels' work for the driver library in C (libcuda.c): each launch that reaches it runs on the PTX machine, in the process that
launched it.

With LIBCUDA_PYTHON=tests.simulators.emulator the library imports this when the driver starts, in every process, so `barellm train`
and its children run as on a GPU: through NVIDIA's bindings, from the cubins in the cache, with the parameters' bytes of the
launch. Beside each cubin lies the PTX that it was made from.

A launch that does what a kernel must not do gets a line on stderr, and the context is lost, as on a GPU; where its warps wait for
ever, the launch never ends. EMULATOR_COPIES=early: asynchronous copies arrive at once, not as late as they may, and what nobody
has written has another value; the bits must be the same. The two microbenchmarks that keep a whole card busy to measure it do
nothing: nothing here has a speed."""

from __future__ import annotations

import ctypes
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cuda.bindings import driver

from barellm.cuda import compile as compiler
from barellm.cuda.compile import Code
from barellm.cuda.kernel import Specialisation
from barellm.cuda.kernels import microbenchmarks
from barellm.runtime import artefacts
from tests.cuda import standin
from tests.simulators.interpreter import Parameter
from tests.simulators.parameters import decoded, with_tables
from tests.simulators.ptx import launch
from tests.simulators.ptx.counts import Counts
from tests.simulators.ptx.machine import Run
from tests.simulators.ptx.order import Deadlock

FAILED = int(driver.CUresult.CUDA_ERROR_LAUNCH_FAILED)
NEVER_ENDS = -1
LATE, EARLY = launch.RUNS.values()  # which must give equal bits
EXECUTE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_uint * 3), ctypes.c_uint, ctypes.c_uint,
)  # fmt: skip

Before = Callable[[Specialisation, Code, list[Parameter], tuple[int, ...]], None]


class Emulator:
    """What runs launches. `before`: called ahead of each; `launched`: how often each kernel ran; `counts`: what each did."""

    def __init__(self, run: Run | None = None) -> None:
        self.run = run or (EARLY if os.environ.get("EMULATOR_COPIES") == "early" else LATE)
        self.specs: dict[Path, Specialisation] = {}
        self.cubins: dict[bytes, list[Specialisation]] = {}
        self._read: set[Path] = set()
        self.launched: Counter[str] = Counter()
        self.counts: dict[str, Counts] = {}
        self.before: list[Before] = []
        self._library = ctypes.CDLL("libcuda.so.1")
        self._callback = EXECUTE(self._execute)

    def start(self) -> None:
        """From now on."""
        find = compiler._path

        def path(spec: Specialisation, arch: int) -> Path:
            launch.compile_to_cache(spec, arch)
            self.specs[find(spec, arch)] = spec
            return find(spec, arch)

        compiler._path = path
        self._library.libcuda_execute(self._callback)

    def span(self, address: int, nbytes: int) -> tuple[int, int]:
        """The allocation that holds these bytes."""
        start, size = ctypes.c_void_p(), ctypes.c_size_t()
        found = self._library.libcuda_allocation(ctypes.c_void_p(address), ctypes.byref(start), ctypes.byref(size))
        first = start.value or 0
        assert found and address + nbytes <= first + size.value, f"{nbytes} bytes at {address:#x} are not the device's"
        return first, first + size.value

    def _spec(self, cubin: bytes) -> Specialisation:
        """The specialisation whose cubin this is. Where several have the same, code that is right for each of them, only the
        pointers that are multiples of 16 in all of them count as such."""
        if cubin not in self.cubins:
            for path in [path for path in self.specs if path not in self._read]:
                data = artefacts.load(path)
                if data is not None:
                    self._read.add(path)
                    self.cubins.setdefault(Code.unpacked(data).cubin, []).append(self.specs[path])
        first, *others = self.cubins[cubin]
        aligned = tuple(name for name in first.aligned if all(name in other.aligned for other in others))
        return replace(first, aligned=aligned)

    def _execute(self, cubin, nbytes, name, parameters, parameter_bytes, grid, threads, shared_bytes) -> int:
        """What the library calls: 0, the status of a context that is lost, or NEVER_ENDS."""
        try:
            image = ctypes.string_at(cubin, nbytes)
            spec = self._spec(image)
            if spec.function in (microbenchmarks.peak, microbenchmarks.move):
                return 0
            arch = int(os.environ.get("LIBCUDA_ARCH", "90"))
            code = launch.code_of(self.cubins[image][0], arch)
            assert (code.name.encode(), code.threads, code.shared_bytes) == (name, threads, shared_bytes), spec
            packed = ctypes.string_at(parameters, parameter_bytes)
            params = [packed[at : at + n] for at, n in standin.placed(code.params, arch)]
            values = with_tables(spec, decoded(spec, code, params, self.span), self.span)
            shape = tuple(grid.contents)
            for look in self.before:
                look(spec, code, values, shape)
            self.launched[spec.name] += 1
            how = replace(self.run, seed=self.run.seed + self.launched.total())
            launch.execute(spec, values, shape, arch=arch, run=how, counts=self.counts.setdefault(spec.name, Counts()), code=code)
        except AssertionError as error:
            print(f"emulator: {name.decode()}: {error}", file=sys.stderr, flush=True)
            return NEVER_ENDS if isinstance(error, Deadlock) else FAILED
        return 0


current: Emulator | None = None


def start() -> None:
    """What the library calls when the driver starts."""
    global current
    current = Emulator()
    current.start()
