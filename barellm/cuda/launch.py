"""Launches with everything in place: code loaded, parameters packed as the kernel reads them, tensor maps encoded."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from barellm.cuda import driver
from barellm.cuda.compile import Code, Descriptor
from barellm.cuda.kernel import Counter, Launch, Sizes, Table, TensorMap
from barellm.errors import UserError
from barellm.program.dtypes import itemsize
from barellm.runtime.lowering import Region

FREE_SHARED_BYTES = 48 << 10  # of dynamic shared memory, that every kernel may use without asking
MAP_BYTES, MAP_ALIGN = 128, 128  # of a CUtensorMap; the compiler gives it 64, cuda.h 13 asks for 128
MOST_GRID = (2**31 - 1, 65535, 65535)
PROMOTION_128B = 2  # what a tensor map's miss brings into L2
# The element types of tensor maps have other numbers on the device than in the driver's interface.
HOST_TYPE = {8: 10, 9: 8, 10: 9}
SCALAR = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "*": ctypes.c_uint64}


class Kernel:
    """Code that the driver has loaded."""

    def __init__(self, code: Code, device: driver.Device) -> None:
        if code.shared_bytes > device.shared_bytes:
            raise UserError(
                f"kernel {code.name} needs {code.shared_bytes} bytes of shared memory, {device.name} has "
                f"{device.shared_bytes} for a block"
            )
        self.code = code
        attribute = driver.bindings().CUfunction_attribute
        self.loaded = driver.call("cuLibraryLoadData", code.cubin, [], [], 0, [], [], 0)
        self.kernel = driver.call("cuLibraryGetKernel", self.loaded, code.name.encode())
        if code.shared_bytes > FREE_SHARED_BYTES:
            most = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            driver.call("cuKernelSetAttribute", most, code.shared_bytes, self.kernel, device.handle)
        self.function = driver.call("cuKernelGetFunction", self.kernel)
        # The driver loads code lazily: otherwise it would come with the first launch, or with the first graph that has one.
        driver.call("cuFuncLoad", self.function)

    def unload(self) -> None:
        """Unload the kernel. Nothing may launch it any more."""
        driver.call("cuLibraryUnload", self.loaded)


class BoundLaunch:
    """A launch for the sizes of a run. `address`: of bytes in the arena, of tables and of the counter; `scalars`: of the run-time
    scalars.

    The parameters are packed once. `run` costs one driver call, and none where a graph replays it."""

    def __init__(
        self,
        launch: Launch,
        kernel: Kernel,
        sizes: Sizes,
        address: Callable[[Region | Table | Counter], int],
        scalars: int,
    ) -> None:
        code = kernel.code
        self.op, self.function = launch.op, kernel.function
        grid = (*launch.grid(sizes), 1, 1)[:3]
        op = getattr(launch.op, "name", "none")
        self._words = f"kernel {code.name} of op {op}, grid {grid}"
        if any(n > most for n, most in zip(grid, MOST_GRID, strict=True)):
            raise UserError(
                f"{self._words}: a GPU runs at most {MOST_GRID} blocks, expected fewer or shorter sequences than "
                f"{sizes.batch} of {sizes.seq} tokens"
            )
        self.empty = 0 in grid
        if self.empty:  # its arguments may be those of no rows: a tensor map of none cannot be made
            return
        room = ctypes.create_string_buffer(sum(nbytes + MAP_ALIGN for nbytes, _ in code.params))
        slots, end = [], ctypes.addressof(room)
        for nbytes, align in code.params:  # each lies where it likes: the driver copies it from its own address
            align = MAP_ALIGN if nbytes == MAP_BYTES else align
            slots.append(-(-end // align) * align)
            end = slots[-1] + nbytes
        self.pointers = (ctypes.c_void_p * len(slots))(*slots)
        self._keep = room
        at, descriptors = iter(slots), iter(code.descriptors)

        def put(kind: str, value: int) -> None:
            SCALAR[kind].from_address(next(at)).value = value

        for kind, argument in zip(code.arguments, launch.args, strict=True):
            if isinstance(argument, TensorMap):
                rows = argument.rows if isinstance(argument.rows, int) else argument.rows(sizes)
                encode(next(at), argument, rows, address(argument.region), next(descriptors))
                for name, value in (("i32", rows), ("i32", argument.columns), ("i64", argument.stride), ("i64", 1)):
                    put(name, value)
            elif argument is None:
                put(kind, scalars)
            elif isinstance(argument, Region | Table | Counter):
                put(kind, address(argument))
            else:
                put(kind, argument if isinstance(argument, int) else argument(sizes))
        put("*", 0)  # scratch of the compiler's, of which there is none
        put("*", 0)
        self.config = _configured(code, grid)

    def __str__(self) -> str:
        return self._words

    def run(self, stream: Any) -> None:
        if not self.empty:
            self.config.hStream = stream
            driver.call("cuLaunchKernelEx", self.config, self.function, ctypes.addressof(self.pointers), 0)


def _configured(code: Code, grid: tuple[int, ...]) -> Any:
    cu = driver.bindings()
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = code.threads, 1, 1
    config.sharedMemBytes = code.shared_bytes
    return config


def encode(at: int, argument: TensorMap, rows: int, address: int, descriptor: Descriptor) -> None:
    """Write the tensor map of a row-major matrix to host address `at`."""
    nbytes = itemsize(argument.dtype)
    assert nbytes == descriptor.element_bytes and not address % 16 and not argument.stride * nbytes % 16, argument
    sizes = (ctypes.c_uint64 * 2)(argument.columns, rows)
    strides = (ctypes.c_uint64 * 1)(argument.stride * nbytes)
    box = (ctypes.c_uint32 * 2)(*reversed(descriptor.box))
    steps = (ctypes.c_uint32 * 2)(1, 1)
    kind = HOST_TYPE.get(descriptor.element_type, descriptor.element_type)
    status = driver.libcuda().cuTensorMapEncodeTiled(
        ctypes.c_void_p(at), kind, 2, ctypes.c_void_p(address), sizes, strides, box, steps,
        0, descriptor.swizzle, PROMOTION_128B, 0,
    )  # fmt: skip
    if status:
        raise driver.DriverError("cuTensorMapEncodeTiled", f"{status} for {argument}, {rows} rows at {address:#x}")
