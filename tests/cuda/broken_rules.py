"""Breaks each rule that the driver library in C holds calls against (simulators/libcuda.c), once, and keeps all others. A process
of its own, which test_libcuda.py starts; a line on stdout for each: the function and the status that it gave."""

from __future__ import annotations

import ctypes
import os
import struct
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

HEAD = struct.Struct("<16sHHIQQQIHHHHHH")  # of an ELF file of 64 bits
SECTION = struct.Struct("<IIQQQQIIQQ")
CUDA, PROGBITS, NOBITS, STRTAB = 190, 1, 8, 3
RELAXED, EXTERNAL, NON_BLOCKING, MOST_SHARED = 2, 1, 1, 8  # numbers of cuda.h; the attribute of a function
MAP_BYTES = 128


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [(name, c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")] + [
        ("stream", c_void_p), ("attributes", c_void_p), ("count", c_uint),
    ]  # fmt: skip


library = ctypes.CDLL("libcuda.so.1")


@cache
def function(name: str) -> Any:
    """The library's, of its latest version; the bindings have a short name for one."""
    found = [getattr(library, f"{name}{end}", None) for end in ("_v2", "", "WithFlags")]
    return next(one for one in found if one is not None)


def call(name: str, *args: Any) -> int:
    return function(name)(*args)


def right(name: str, *args: Any) -> None:
    assert call(name, *args) == 0, name


def wrong(name: str, *args: Any) -> None:
    print(name, call(name, *args), flush=True)


def handle(name: str, *args: Any) -> c_void_p:
    """What a function makes, which is its first argument."""
    made = c_void_p()
    right(name, byref(made), *args)
    return made


def cubin(*, arch: int = 90, threads: int = 0, registers: int = 32, parameters: tuple[int, ...] = (8,), static: int = 0) -> bytes:
    """A cubin of a kernel "k", without instructions. `parameters`: their bytes."""
    info, at = b"", 0
    for number, nbytes in enumerate(parameters):
        info += struct.pack("<BBHIHHI", 4, 0x17, 12, 0, number, at, nbytes << 18)
        at += nbytes
    if threads:
        info += struct.pack("<BBHIII", 4, 0x10, 12, threads, 1, 1)
    parts = {
        ".nv.info": (PROGBITS, struct.pack("<BBHII", 4, 0x2F, 8, 0, registers), 0),
        ".nv.info.k": (PROGBITS, info, 0),
        ".nv.shared.k": (NOBITS, b"", static),
    }
    names = b"\0" + b"".join(name.encode() + b"\0" for name in (*parts, ".shstrtab"))
    body, heads = b"", [SECTION.pack(*[0] * 10)]
    for name, (kind, data, size) in {**parts, ".shstrtab": (STRTAB, names, 0)}.items():
        heads.append(
            SECTION.pack(names.index(name.encode() + b"\0"), kind, 0, 0, HEAD.size + len(body), size or len(data), 0, 0, 1, 0)
        )
        body += data
    body = body.ljust(-(-len(body) // 8) * 8, b"\0")
    head = HEAD.pack(
        b"\x7fELF\2\1\1".ljust(16, b"\0"), 2, CUDA, 1, 0, 0, HEAD.size + len(body), arch, HEAD.size, 0, 0, SECTION.size,
        len(heads), len(heads) - 1,
    )  # fmt: skip
    return head + body + b"".join(heads)


def loaded(code: bytes) -> c_void_p:
    return handle("cuLibraryLoadData", c_char_p(code), None, None, 0, None, None, 0)


def kernel(*, ready: bool = True, **properties: Any) -> c_void_p:
    """The handle of a kernel and, here, of its function."""
    made = handle("cuLibraryGetKernel", loaded(cubin(**properties)), b"k")
    if ready:
        right("cuFuncLoad", made)
    return made


def launch(f: Any, stream: Any, **changes: Any) -> tuple[Any, ...]:
    """Arguments of a launch of a kernel with one parameter of 8 bytes, or of `at`."""
    at = changes.pop("at", c_uint64(0))
    given = dict(gx=1, gy=1, gz=1, bx=32, by=1, bz=1, shared=0, stream=stream.value) | changes
    pointers = (c_void_p * 1)(at if isinstance(at, int) else ctypes.addressof(at))
    config = Config(**given)
    kept.append((pointers, config, at))
    return byref(config), f, pointers, None


kept: list[Any] = []  # what a call is given must be there when it looks


def encode(start: int, at: int, **changes: Any) -> tuple[Any, ...]:
    """Arguments of cuTensorMapEncodeTiled for a matrix (8, 64) of bf16, in boxes (8, 32)."""
    given: dict[str, Any] = dict(
        type=9, rank=2, address=start, sizes=(64, 8), strides=(128,), box=(32, 8), steps=(1, 1), inner=0, swizzle=2, l2=2, fill=0
    )
    given |= changes
    return (
        c_void_p(at), given["type"], given["rank"], c_void_p(given["address"]), (c_uint64 * 5)(*given["sizes"]),
        (c_uint64 * 5)(*given["strides"]), (c_uint32 * 5)(*given["box"]), (c_uint32 * 5)(*given["steps"]), given["inner"],
        given["swizzle"], given["l2"], given["fill"],
    )  # fmt: skip


def break_memory(stream: c_void_p, device: int, pinned: int) -> None:
    zero, pageable = c_void_p(), ctypes.create_string_buffer(64)
    wrong("cuMemAlloc", byref(zero), c_size_t(0))
    wrong("cuMemHostAlloc", byref(zero), c_size_t(0), 0)
    wrong("cuMemFree", c_void_p(device + 16))
    wrong("cuMemFreeHost", c_void_p(device))
    wrong("cuMemcpyHtoDAsync", c_void_p(device + 4000), c_void_p(pinned), c_size_t(200), stream)
    wrong("cuMemcpyDtoHAsync", c_void_p(pinned), c_void_p(device - 1), c_size_t(8), stream)
    wrong("cuMemcpyDtoDAsync", c_void_p(device + 4096), c_void_p(device), c_size_t(8), stream)
    wrong("cuMemcpyDtoDAsync", c_void_p(device), c_void_p(device + 4096), c_size_t(8), stream)
    wrong("cuMemcpyDtoDAsync", c_void_p(device), c_void_p(device + 4), c_size_t(8), stream)
    wrong("cuMemsetD8Async", c_void_p(device), 0, c_size_t(4097), stream)
    right("cuStreamBeginCapture", stream, RELAXED)
    wrong("cuMemcpyHtoDAsync", c_void_p(device), pageable, c_size_t(8), stream)
    wrong("cuMemcpyDtoHAsync", pageable, c_void_p(device), c_size_t(8), stream)
    right("cuStreamEndCapture", stream, byref(zero))


def break_streams(stream: c_void_p, device: int) -> None:
    made, ms = c_void_p(), c_float()
    wrong("cuStreamCreate", byref(made), 0)
    wrong("cuStreamDestroy", c_void_p(device))
    wrong("cuStreamQuery", None)
    first, second = handle("cuEventCreate", 0), handle("cuEventCreate", 0)
    wrong("cuEventCreate", byref(made), 8)
    wrong("cuStreamWaitEvent", stream, first, 1)
    wrong("cuEventElapsedTime", byref(ms), first, second)
    right("cuEventRecord", first, stream)
    right("cuEventRecord", second, stream)
    wrong("cuEventElapsedTime", byref(ms), first, second)
    wrong("cuEventRecordWithFlags", first, stream, EXTERNAL)
    right("cuEventDestroy", second)
    wrong("cuEventDestroy", second)
    wrong("cuEventQuery", second)
    wrong("cuEventRecord", second, stream)
    wrong("cuEventRecordWithFlags", second, stream, EXTERNAL)
    wrong("cuStreamEndCapture", stream, byref(made))
    wrong("cuStreamBeginCapture", stream, 0)
    graph = capture(stream, lambda: break_capture(stream, first))
    wrong("cuGraphInstantiate", byref(made), None, c_uint64(0))
    wrong("cuGraphLaunch", graph, stream)
    wrong("cuGraphDestroy", None)
    ready = handle("cuGraphInstantiate", graph, c_uint64(0))
    capture(stream, lambda: (wrong("cuGraphLaunch", ready, stream), wrong("cuGraphUpload", ready, stream)))
    right("cuMemsetD8Async", c_void_p(device), 0, c_size_t(1), stream)
    wrong("cuGraphExecDestroy", ready)
    while call("cuStreamQuery", stream):
        pass
    right("cuGraphExecDestroy", ready)
    wrong("cuGraphExecDestroy", ready)


def capture(stream: c_void_p, work: Any) -> c_void_p:
    right("cuStreamBeginCapture", stream, RELAXED)
    work()
    made = c_void_p()
    right("cuStreamEndCapture", stream, byref(made))
    return made


def break_capture(stream: c_void_p, event: c_void_p) -> None:
    """What may not be called while a graph is captured."""
    f, cold = kernel_before, cold_before
    wrong("cuStreamBeginCapture", stream, RELAXED)
    wrong("cuStreamQuery", stream)
    wrong("cuStreamDestroy", stream)
    wrong("cuStreamWaitEvent", stream, event, 0)
    wrong("cuEventRecord", event, stream)
    wrong("cuFuncLoad", f)
    wrong("cuLaunchKernelEx", *launch(cold, stream))


def break_code(stream: c_void_p, device: int) -> None:
    made, offset, nbytes = c_void_p(), c_size_t(), c_size_t()
    arguments = byref(made), c_char_p(b"\x7fELF".ljust(64, b"\0")), None, None
    wrong("cuLibraryLoadData", *arguments, 0, None, None, 0)
    wrong("cuLibraryLoadData", byref(made), c_char_p(cubin()), None, None, 1, None, None, 0)
    wrong("cuLibraryLoadData", byref(made), c_char_p(cubin(arch=80)), None, None, 0, None, None, 0)
    gone = loaded(cubin())
    wrong("cuLibraryGetKernel", byref(made), gone, b"other")
    right("cuLibraryUnload", gone)
    wrong("cuLibraryUnload", gone)
    wrong("cuLibraryGetKernel", byref(made), gone, b"k")
    wrong("cuKernelGetFunction", byref(made), None)
    wrong("cuFuncLoad", None)
    f = kernel(threads=64, static=1024)
    wrong("cuKernelGetParamInfo", f, c_size_t(1), byref(offset), byref(nbytes))
    wrong("cuKernelSetAttribute", 0, 1024, f, 0)
    wrong("cuKernelSetAttribute", MOST_SHARED, 227 << 10, f, 0)
    wrong("cuLaunchKernelEx", *launch(gone, stream))
    config, *_ = launch(f, stream, bx=64)
    wrong("cuLaunchKernelEx", config, f, None, None)
    for changes in ({"gy": 0}, {"gz": 65536}, {"bx": 1025}, {"bx": 32}, {"bx": 64, "shared": (48 << 10) + 1}):
        wrong("cuLaunchKernelEx", *launch(f, stream, **changes))
    wrong("cuLaunchKernelEx", *launch(kernel(registers=128), stream, bx=1024))
    room = ctypes.create_string_buffer(2 * MAP_BYTES)
    at = -(-ctypes.addressof(room) // 64) * 64
    mapped = kernel(parameters=(MAP_BYTES,))
    wrong("cuLaunchKernelEx", *launch(mapped, stream, at=at))
    there = handle("cuMemAlloc", c_size_t(1024))
    right("cuTensorMapEncodeTiled", *encode(there.value or 0, at))
    right("cuMemFree", there)
    wrong("cuLaunchKernelEx", *launch(mapped, stream, at=at))
    right("cuLaunchKernelEx", *launch(kernel_before, stream))
    wrong("cuLibraryUnload", kernel_before)


def break_maps(device: int) -> None:
    room = ctypes.create_string_buffer(2 * MAP_BYTES)
    at = -(-ctypes.addressof(room) // 64) * 64
    right("cuTensorMapEncodeTiled", *encode(device, at))
    cube = dict(rank=3, sizes=(16, 4, 2), strides=(32, 128), box=(16, 4, 2), steps=(1, 1, 1), swizzle=1)
    right("cuTensorMapEncodeTiled", *encode(device, at, **cube, inner=2))
    for changes in (
        {"type": 13}, {"swizzle": 4}, {"l2": 4}, {"rank": 6, "sizes": (1,) * 5, "box": (1,) * 5, "steps": (1,) * 5}, {"inner": 1},
        {"address": device + 8}, {**cube, "inner": 2, "address": device + 16}, {"sizes": (64, 0)}, {"sizes": (64, (1 << 32) + 1)},
        {"box": (32, 257)}, {"box": (0, 8)}, {"steps": (1, 9)}, {"strides": (136,)}, {**cube, "inner": 2, "strides": (48, 192)},
        {"strides": (1 << 40,)}, {"strides": (112,)}, {**cube, "strides": (128, 112), "inner": 1}, {"box": (12, 8)},
        {"box": (64, 8)}, {**cube, "inner": 2, "swizzle": 2}, {"type": 1, "fill": 1}, {"sizes": (64, 33)},
    ):  # fmt: skip
        wrong("cuTensorMapEncodeTiled", *encode(device, at, **changes))
    wrong("cuTensorMapEncodeTiled", *encode(device, at + 32))
    os.environ["LIBCUDA_ARCH"] = "80"  # which has no tensor maps
    wrong("cuTensorMapEncodeTiled", *encode(device, at))
    del os.environ["LIBCUDA_ARCH"]


wrong("cuInit", 1)
right("cuInit", 0)
wrong("cuMemGetInfo", byref(c_size_t()), byref(c_size_t()))  # no context is current in this thread
right("cuCtxSetCurrent", handle("cuDevicePrimaryCtxRetain", 0))
wrong("cuDeviceGet", byref(c_int()), 1)
wrong("cuDeviceGetName", ctypes.create_string_buffer(16), 16, 0)
stream, device, pinned = handle("cuStreamCreate", NON_BLOCKING), handle("cuMemAlloc", c_size_t(4096)), c_void_p()
pinned = handle("cuMemHostAlloc", c_size_t(4096), 0)
kernel_before, cold_before = kernel(), kernel(ready=False)
break_memory(stream, device.value or 0, pinned.value or 0)
break_streams(stream, device.value or 0)
break_maps(device.value or 0)
break_code(stream, device.value or 0)
