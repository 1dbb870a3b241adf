"""Launches ready to run: code loaded, parameters packed as the kernel reads them, tensor maps encoded."""

import ctypes
from collections.abc import Callable
from typing import Any

from barellm.cuda import driver
from barellm.cuda.compile import Code, Descriptor
from barellm.cuda.kernel import Counter, Launch, Sizes, Table, TensorMap
from barellm.errors import UserError
from barellm.program.dtypes import itemsize
from barellm.program.integers import round_up
from barellm.runtime.lowering import Region

FREE_SHARED_BYTES = 48 << 10  # of dynamic shared memory, that every kernel may use without asking
MAP_BYTES, MAP_ALIGN = 128, 128  # of a CUtensorMap; the compiler aligns it to 64, cuda.h 13 asks for 128
MOST_GRID = (2**31 - 1, 65535, 65535)  # blocks along each axis
INTERLEAVE_NONE, PROMOTION_128B, FILL_ZEROS = (0, 2, 0)  # CUtensorMapInterleave, CUtensorMapL2promotion, CUtensorMapFloatOOBfill
# CUtensorMapDataType of fp16, fp32 and bf16 by Triton's element types, which are the device's numbers; others are equal.
HOST_TYPE = {8: 10, 9: 8, 10: 9}
SCALAR = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "*": ctypes.c_uint64}


class Kernel:
    """Code that the driver has loaded."""

    def __init__(self, code: Code, device: driver.Device) -> None:
        """Load the cubin into the current context. UserError where it needs more shared memory than the device has."""
        if code.shared_bytes > device.shared_bytes:
            needed = f"kernel {code.name} needs {code.shared_bytes} bytes of shared memory"
            raise UserError(f"{needed}, {device.name} has {device.shared_bytes} for a block")
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
    """A launch for the sizes of a run. Its parameters are packed once; `run` costs one driver call, in a graph none."""

    def __init__(
        self, launch: Launch, kernel: Kernel, sizes: Sizes, address: Callable[[Region | Table | Counter], int], scalars: int
    ) -> None:  # fmt: skip
        """`address`: the device address of bytes in the arena, of tables and of the counter; `scalars`: that of the run-time
        scalars. UserError if the grid is larger than a GPU can run."""
        code = kernel.code
        self.op, self.function = launch.op, kernel.function
        grid = (*launch.grid(sizes), 1, 1)[:3]
        op = getattr(launch.op, "name", "none")
        self._words = f"kernel {code.name} of op {op}, grid {grid}"
        if any(n > most for n, most in zip(grid, MOST_GRID, strict=True)):
            expected = f"fewer or shorter sequences than {sizes.batch} of {sizes.seq} tokens"
            raise UserError(f"{self._words}: a GPU runs at most {MOST_GRID} blocks, expected {expected}")
        self.empty = 0 in grid
        if self.empty:  # its arguments may be those of no rows: a tensor map of none cannot be made
            return
        slots = self._allocate(code)
        # cuLaunchKernel takes an array of pointers to the parameters, which need not be contiguous.
        self.pointers = (ctypes.c_void_p * len(slots))(*slots)
        slot, descriptors = iter(slots), iter(code.descriptors)

        def write(kind: str, value: int) -> None:
            SCALAR[kind].from_address(next(slot)).value = value

        for kind, argument in zip(code.arguments, launch.args, strict=True):
            if isinstance(argument, TensorMap):  # five parameters: the map, then sizes and strides, which Triton passes too
                rows = argument.rows if isinstance(argument.rows, int) else argument.rows(sizes)
                encode_tensor_map(next(slot), argument, rows, address(argument.region), next(descriptors))
                for name, value in (("i32", rows), ("i32", argument.columns), ("i64", argument.stride), ("i64", 1)):
                    write(name, value)
            elif argument is None:
                write(kind, scalars)
            elif isinstance(argument, Region | Table | Counter):
                write(kind, address(argument))
            else:
                write(kind, argument if isinstance(argument, int) else argument(sizes))
        write("*", 0)  # Triton's global and profiler scratch, which no kernel uses (compile.code_of)
        write("*", 0)
        self.config = _launch_config(code, grid)

    def _allocate(self, code: Code) -> list[int]:
        """Host addresses for the parameters, aligned as the code expects, in memory that is kept with this object."""
        self._buffer = ctypes.create_string_buffer(sum(nbytes + MAP_ALIGN for nbytes, _ in code.params))
        slots, end = [], ctypes.addressof(self._buffer)
        for nbytes, align in code.params:
            align = MAP_ALIGN if nbytes == MAP_BYTES else align
            slots.append(round_up(end, align))
            end = slots[-1] + nbytes
        return slots

    def __str__(self) -> str:
        return self._words

    def run(self, stream: Any) -> None:
        """Put the launch on the stream, unless its grid is empty."""
        if not self.empty:
            self.config.hStream = stream
            driver.call("cuLaunchKernelEx", self.config, self.function, ctypes.addressof(self.pointers), 0)


def _launch_config(code: Code, grid: tuple[int, ...]) -> Any:
    """The driver's CUlaunchConfig; its stream is set by each run."""
    config = driver.bindings().CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = code.threads, 1, 1
    config.sharedMemBytes = code.shared_bytes
    return config


def encode_tensor_map(at: int, argument: TensorMap, rows: int, address: int, descriptor: Descriptor) -> None:
    """Write the CUtensorMap of a row-major matrix (rows, columns) at device address `address` to host address `at`, with the box,
    swizzle and element type that the code was compiled for. The driver wants the address and the rows' stride to be multiples of 16
    bytes, and lists the innermost dimension first."""
    nbytes = itemsize(argument.dtype)
    assert nbytes == descriptor.element_bytes and not address % 16 and not argument.stride * nbytes % 16, argument
    sizes = (ctypes.c_uint64 * 2)(argument.columns, rows)
    strides = (ctypes.c_uint64 * 1)(argument.stride * nbytes)  # in bytes, of the outer dimension alone
    box = (ctypes.c_uint32 * 2)(*reversed(descriptor.box))
    element_strides = (ctypes.c_uint32 * 2)(1, 1)
    element_type = HOST_TYPE.get(descriptor.element_type, descriptor.element_type)
    status = driver.libcuda().cuTensorMapEncodeTiled(
        ctypes.c_void_p(at), element_type, 2, ctypes.c_void_p(address), sizes, strides, box, element_strides,
        INTERLEAVE_NONE, descriptor.swizzle, PROMOTION_128B, FILL_ZEROS,
    )  # fmt: skip
    if status:
        raise driver.DriverError("cuTensorMapEncodeTiled", f"{status} for {argument}, {rows} rows at {address:#x}")
