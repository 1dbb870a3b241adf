"""The GPU through NVIDIA's driver API: device, context, memory, events, graphs. Handles live as long as their objects.

`bindings()` and `libcuda()` are the only ways to the driver; nothing of it is imported before a session is opened."""

import ctypes
import importlib
import importlib.util
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Any

import numpy as np

from barellm.errors import UserError

OLDEST_DRIVER, OLDEST_FOR_BLACKWELL = 12040, 12080  # cuFuncLoad's; CUDA 12.8, the first that knows sm_100
OLDEST_ARCH = 80  # bf16 in tensor cores
INSTALL = "pip install -e '.[cuda]' where barellm's pyproject.toml is"


def bindings() -> Any:
    """`cuda.bindings.driver`."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        raise UserError(f"device cuda needs the package cuda-bindings, which is not installed: {INSTALL}")
    return importlib.import_module("cuda.bindings.driver")


@cache
def libcuda() -> Any:
    """The driver's library itself: for tensor maps, since those of the bindings are not aligned, and for times."""
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *args: Any) -> Any:
    """Call a driver function. Returns what it gives besides its status: one value, a tuple of several, or None. DriverError if it
    fails."""
    cu = bindings()
    status, *values = getattr(cu, name)(*args)
    if int(status):
        raise DriverError(name, _name(cu, int(status)))
    return values[0] if len(values) == 1 else tuple(values) or None


def _name(cu: Any, status: int) -> str:
    """The driver's name for a status; a driver that is newer than the bindings may have others."""
    try:
        return cu.CUresult(status).name
    except ValueError:
        return f"status {status}"


# Errors after which every later call in this process fails with the same status.
LOST = ("ILLEGAL_ADDRESS", "ILLEGAL_INSTRUCTION", "MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "INVALID_PC")
LOST_WORDS = "a kernel before it went wrong"
LOST += ("LAUNCH_FAILED", "LAUNCH_TIMEOUT", "HARDWARE_STACK_ERROR", "ECC_UNCORRECTABLE", "ASSERT", "UNKNOWN")


class DriverError(UserError):
    """A driver function that failed. `status`: the driver's name for it; `lost`: this process cannot use the GPU any more."""

    def __init__(self, function: str, status: str) -> None:
        self.status, self.lost = status, status.removeprefix("CUDA_ERROR_") in LOST
        why = ""
        if self.lost:
            latest = f" (the latest: {_latest})" if _latest else ""
            advice = "" if blocking() else f"; {BLOCKING}=1 launches one kernel at a time and names it"
            why = f": {LOST_WORDS}{latest}, and this process cannot use the GPU any more{advice}"
        super().__init__(f"{function} failed: {status}{why}")


BLOCKING = "CUDA_LAUNCH_BLOCKING"  # the driver's own variable
SPIN_S, POLL_S = 1e-3, 2e-4  # seconds of polling without a pause, and the pauses after that
SLOW_S = 60.0  # seconds of waiting, after which a line says for what
_latest: object = None  # what was launched last


def blocking() -> bool:
    """Whether the user wants one launch after the other, each waited for."""
    return os.environ.get(BLOCKING, "0") not in ("", "0")


def note_launch(what: object) -> None:
    """Remember what is put on the GPU now, for messages: its str() is the name of what hangs or fails."""
    global _latest
    _latest = what


def wait(query: str, handle: Any, most_s: float = inf) -> bool:
    """Wait until a stream or an event is done, by polling the driver's function `query`; False after `most_s` seconds. Polling,
    because the driver's own synchronization does not let Ctrl-C through. DriverError where the GPU failed."""
    cu, began, reported = bindings(), time.monotonic(), False
    not_ready = int(cu.CUresult.CUDA_ERROR_NOT_READY)
    while status := int(getattr(cu, query)(handle)[0]):
        if status != not_ready:
            raise DriverError(query, _name(cu, status))
        waited = time.monotonic() - began
        if waited > most_s:
            return False
        if waited > SLOW_S and not reported:
            reported = True
            words = f"the GPU has not ended its work for {waited:.0f} s (the latest: {_latest}); Ctrl-C stops waiting"
            print(f"barellm: {words}", file=sys.stderr, flush=True)
        if waited > SPIN_S:
            time.sleep(POLL_S)
    return True


class NoGpu(UserError):
    """There is a driver, but no GPU that it may use."""


@dataclass(frozen=True)
class Device:
    """A GPU. `arch`: compute capability, 90 for 9.0; `sms`: streaming multiprocessors; `driver`: 12080 for CUDA 12.8."""

    handle: Any
    name: str
    arch: int
    sms: int
    nbytes: int
    shared_bytes: int  # dynamic shared memory that a block may ask for
    driver: int
    uuid: str = ""  # which no other GPU has


def device(number: int = 0) -> Device:
    """The GPU of rank `number` on this machine, among those in CUDA_VISIBLE_DEVICES; if there is only one, that one (a launcher may
    have given each rank its own). UserError, from driver to card, if there is none that barellm can use."""
    cu = bindings()
    try:
        status = int(cu.cuInit(0)[0])
    except (RuntimeError, ImportError, OSError):  # the bindings find no driver library
        raise UserError("device cuda needs an NVIDIA driver, and none is installed here (no libcuda.so.1)") from None
    if status == int(cu.CUresult.CUDA_ERROR_NO_DEVICE):
        raise NoGpu("device cuda needs a GPU, and the NVIDIA driver sees none (CUDA_VISIBLE_DEVICES?)")
    if status:
        raise UserError(f"the NVIDIA driver does not start: {_name(cu, status)}")
    count = int(call("cuDeviceGetCount"))
    if not count:
        raise NoGpu("device cuda needs a GPU, and the NVIDIA driver sees none (CUDA_VISIBLE_DEVICES?)")
    if count > 1 and number >= count:
        found = f"this machine has {count} GPUs, and rank number {number} on it (from 0) has none"
        raise UserError(f"{found}: start at most {count} here")
    handle = call("cuDeviceGet", number if count > 1 else 0)

    def attribute(kind: Any) -> int:
        return int(call("cuDeviceGetAttribute", kind, handle))

    kinds = cu.CUdevice_attribute
    major = attribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
    arch = 10 * major + attribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
    name = bytes(call("cuDeviceGetName", 128, handle)).split(b"\0")[0].decode()
    version, oldest = int(call("cuDriverGetVersion")), OLDEST_FOR_BLACKWELL if arch >= 100 else OLDEST_DRIVER
    if version < oldest:
        knows, needs = (f"{v // 1000}.{v % 1000 // 10}" for v in (version, oldest))
        raise UserError(f"the NVIDIA driver knows CUDA {knows}, barellm's kernels need {needs} on {name}: update the driver")
    if arch < OLDEST_ARCH:
        raise UserError(f"{name} has compute capability {arch / 10}, barellm needs {OLDEST_ARCH / 10} or later")
    return Device(
        handle, name, arch, attribute(kinds.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT), int(call("cuDeviceTotalMem", handle)),
        attribute(kinds.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN), version,
        bytes(call("cuDeviceGetUuid", handle).bytes).hex(),
    )  # fmt: skip


class Context:
    """The device's primary context, made current in each thread that asks for the stream, and a non-blocking stream. The context
    stays until the process ends: events and memory that outlive a session would be freed in a context that is gone, and the next
    session would wait for a new one."""

    def __init__(self, on: Device) -> None:
        cu = bindings()
        self.device = on
        self.handle = call("cuDevicePrimaryCtxRetain", on.handle)
        self._here = threading.local()
        self.enter()
        self._stream = call("cuStreamCreate", int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self.close = finalizer(self, "cuStreamDestroy", self._stream)

    def enter(self) -> None:
        """Make the context current in this thread, if it is not yet."""
        if not hasattr(self._here, "entered"):
            call("cuCtxSetCurrent", self.handle)
            self._here.entered = True

    @property
    def stream(self) -> Any:
        """The stream; the context becomes current in this thread."""
        self.enter()
        return self._stream

    def free_bytes(self) -> int:
        return int(call("cuMemGetInfo")[0])

    def synchronize(self) -> None:
        wait("cuStreamQuery", self.stream)

    def ends(self, most_s: float) -> bool:
        """Whether the work on the stream ends within `most_s` seconds, without an error."""
        try:
            return wait("cuStreamQuery", self.stream, most_s)
        except DriverError:
            return False


class DeviceMemory:
    """A piece of memory of the GPU."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address = int(call("cuMemAlloc", nbytes))
        self.free = finalizer(self, "cuMemFree", self.address)

    def read(self, start: int, stop: int, stream: Any) -> np.ndarray:
        """A copy of bytes [start, stop), made after all earlier work on the stream."""
        out = np.empty(stop - start, np.uint8)
        if out.size:
            call("cuMemcpyDtoHAsync", out.ctypes.data, self.address + start, out.size, stream)
            wait("cuStreamQuery", stream)
        return out

    def write(self, start: int, data: np.ndarray, stream: Any) -> None:
        """Copy `data` to the bytes from `start` on; returns when that is done."""
        if data.nbytes:
            assert data.flags.c_contiguous and start + data.nbytes <= self.nbytes
            call("cuMemcpyHtoDAsync", self.address + start, data.ctypes.data, data.nbytes, stream)
            wait("cuStreamQuery", stream)

    def copy(self, start: int, address: int, nbytes: int, stream: Any) -> None:
        """Copy `nbytes` from the GPU's memory at `address` to the bytes from `start` on; they must not overlap."""
        assert start + nbytes <= self.nbytes
        call("cuMemcpyDtoDAsync", self.address + start, address, nbytes, stream)

    def fill(self, value: int, start: int, nbytes: int, stream: Any) -> None:
        if nbytes:
            call("cuMemsetD8Async", self.address + start, value, nbytes, stream)


def device_view(address: int, nbytes: int) -> np.ndarray:
    """An array whose data are `nbytes` at a device address. Only its address and slices may be used: the host cannot read it."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class PinnedMemory:
    """A piece of memory of the host that the GPU reads while the processor goes on. `array` shows it as uint8."""

    def __init__(self, nbytes: int) -> None:
        self.address = int(call("cuMemHostAlloc", nbytes, 0))
        self.array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.address))
        self.free = finalizer(self, "cuMemFreeHost", self.address)


class Event:
    """A point in a stream. `timed`: it records when it was reached."""

    def __init__(self, *, timed: bool = False) -> None:
        flags = bindings().CUevent_flags
        kind = flags.CU_EVENT_DEFAULT if timed else flags.CU_EVENT_DISABLE_TIMING
        self.handle = call("cuEventCreate", int(kind))
        finalizer(self, "cuEventDestroy", self.handle)

    def record(self, stream: Any) -> None:
        call("cuEventRecord", self.handle, stream)

    def record_in_graph(self, stream: Any) -> None:
        """Record the event in the graph that is being captured: each launch of the graph records it again, for `since`."""
        call("cuEventRecordWithFlags", self.handle, stream, int(bindings().CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL))

    def hold(self, stream: Any) -> None:
        """Make all later work on the stream wait for the event. An event of a graph's capture makes the stream join it."""
        call("cuStreamWaitEvent", stream, self.handle, 0)

    def wait(self) -> None:
        """Block until it is reached; at once where it was never recorded."""
        wait("cuEventQuery", self.handle)

    def since(self, earlier: "Event") -> float:
        """Milliseconds from the event `earlier` to this one."""
        ms, begin, end = ctypes.c_float(), ctypes.c_void_p(int(earlier.handle)), ctypes.c_void_p(int(self.handle))
        if status := libcuda().cuEventElapsedTime(ctypes.byref(ms), begin, end):  # the bindings' is newer than OLDEST_DRIVER
            raise DriverError("cuEventElapsedTime", _name(bindings(), status))
        return ms.value


class Graph:
    """A CUDA graph of the work that `enqueue` puts on the stream, instantiated and uploaded."""

    def __init__(self, stream: Any, enqueue: Callable[[], None]) -> None:
        """Capture what `enqueue` puts on the stream, instantiate and upload it; if `enqueue` fails, the capture is ended."""
        # Relaxed: Python may collect garbage meanwhile, and in any other mode freeing memory would invalidate the capture.
        call("cuStreamBeginCapture", stream, bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            enqueue()
        except BaseException:
            with suppress(DriverError):
                call("cuGraphDestroy", call("cuStreamEndCapture", stream))
            raise
        captured = call("cuStreamEndCapture", stream)
        try:
            self.handle = call("cuGraphInstantiate", captured, 0)
        finally:
            call("cuGraphDestroy", captured)
        self.free = finalizer(self, "cuGraphExecDestroy", self.handle)
        call("cuGraphUpload", self.handle, stream)

    def launch(self, stream: Any) -> None:
        call("cuGraphLaunch", self.handle, stream)


@contextmanager
def profiled() -> Iterator[None]:
    """Within the context a profiler records launches, if it was started to wait for that (ncu --profile-from-start off)."""
    call("cuProfilerStart")
    try:
        yield
    finally:
        call("cuProfilerStop")


def finalizer(owner: object, name: str, handle: Any) -> weakref.finalize:
    """A finalizer that frees `handle` by the driver function `name`, when it is called or when the owner is collected; errors are
    ignored, since the driver may be gone. It does not run at the end of the process: that frees everything, even if the GPU
    hangs."""
    function = getattr(bindings(), name)

    def give_back() -> None:
        with suppress(Exception):
            function(handle)

    found = weakref.finalize(owner, give_back)
    found.atexit = False
    return found
