"""A GPU's driver in Python: the functions of `cuda.bindings.driver` that barellm calls, over host memory.

Work is done as late as the driver may do it: copies, launches and graphs wait in their stream until somebody synchronises, so a
pinned buffer that is overwritten too early shows in the results. Every launch is held against its code: grid, block, shared
memory, each byte of the parameters, each tensor map, each pointer. Then the interpreter runs it, or the PTX machine.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from cuda.bindings import driver as real

from barellm.cuda import bench, driver, step
from barellm.cuda.compile import Code
from barellm.cuda.kernel import Specialisation
from tests.cuda import standin
from tests.cuda.standin import ELEMENTS
from tests.simulators import interpreter
from tests.simulators.parameters import MAGIC, MAP, decoded, with_tables

OK, NOT_READY = real.CUresult.CUDA_SUCCESS, real.CUresult.CUDA_ERROR_NOT_READY
# What needs no context of the thread; cuKernelGetFunction does, as an H200's driver (580.159) said.
ANYWHERE = re.compile(r"cu(Init|Driver|Device|Ctx|Library|Kernel(?!GetFunction)|TensorMap|Profiler)\w*")
LAUNCH_MS = 0.25  # what an event sees of each launch


@dataclass
class Node:
    """Work of a graph, from the stream with this handle, after the nodes with the numbers `after`."""

    work: Callable[[], None]
    stream: int
    after: frozenset[int]


@dataclass
class Capture:
    """A graph as streams build it: `origin` is the one where it began, and where all must have come together at its end."""

    origin: int
    mode: Any
    nodes: list[Node] = field(default_factory=list)
    events: dict[int, frozenset[int]] = field(default_factory=dict)  # recorded, each after these nodes
    waited: set[int] = field(default_factory=set)
    spoilt: bool = False

    def in_order(self, *, late: bool) -> list[Callable[[], None]]:
        """The work in an order that its dependences allow: what other streams do as `late` as they may, or as early."""
        if all(node.stream == self.origin for node in self.nodes):
            return [node.work for node in self.nodes]
        left, done, found = list(range(len(self.nodes))), set[int](), []
        while left:
            ready = [i for i in left if self.nodes[i].after <= done]
            chosen = min(ready, key=lambda i: ((self.nodes[i].stream != self.origin) == late, i))
            left.remove(chosen)
            done.add(chosen)
            found.append(self.nodes[chosen].work)
        return found

    def before(self, ends: frozenset[int]) -> set[int]:
        """These nodes and all that come before them."""
        found = set(ends)
        for i in reversed(range(len(self.nodes))):
            if i in found:
                found |= self.nodes[i].after
        return found


@dataclass
class Stream:
    """Work in its order. While a graph is captured it goes there, after the nodes `ends`."""

    queue: list[Callable[[], None]] = field(default_factory=list)
    captured: Capture | None = None
    ends: frozenset[int] = frozenset()


@dataclass(eq=False)
class Token:
    """An event that is recorded: who waits for it waits for this, also where it is recorded again."""

    reached: bool = False


class Gpu:
    """The module. `arch`, `memory`: what the device says that it has. `execute`: who does the work of a launch."""

    def __init__(
        self,
        *,
        arch: int = 80,
        sms: int = 3,
        memory: int = 1 << 30,
        version: int = 13000,
        count: int = 1,
        late: bool = True,
        execute: interpreter.Execute = interpreter.execute,
    ) -> None:
        self.execute = execute
        self.arch, self.sms, self.memory, self.version, self.count = arch, sms, memory, version, count
        self.uuid = bytes(16)
        self.late = late  # what other streams than its own do in a graph
        self.allocated: dict[int, Any] = {}  # address -> bytes of the device
        self.pinned: dict[int, Any] = {}
        self.streams: list[Stream] = []
        self.known: dict[bytes, tuple[Specialisation, Code]] = {}  # by cubin
        self.functions: list[SimpleNamespace] = []
        self.graphs: list[Capture | None] = []
        self.events: list[float | Token | None] = []
        self.clock = 0.0
        self.cost: Callable[[Specialisation], float] = lambda spec: 1.0  # of LAUNCH_MS
        self.launched: list[tuple[str, tuple[int, ...]]] = []
        self.profiling = False
        self.profiled: list[Specialisation] = []  # what was launched while a profiler looked
        self.calls: list[str] = []
        self.errors: dict[str, int] = {}  # function -> the status that it returns instead
        self.hangs = False  # no work ever ends
        self.here = threading.local()  # where a context is current

    def __getattr__(self, name: str) -> Any:
        """Enumerations and structures are the real ones; a function that nobody wrote here is an error."""
        assert not name.startswith("cu") or name.startswith("cu__"), f"the mock has no {name}"
        return getattr(real, name)

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name.startswith("cu"):
            self.calls.append(name)
            if name in self.errors:
                return lambda *_: (real.CUresult(self.errors[name]),)
            if not ANYWHERE.fullmatch(name) and not hasattr(self.here, "context"):
                return lambda *_: (real.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        return found

    def install(self, monkeypatch: Any) -> None:
        """Instead of the driver, and instead of compiling: code without instructions that has a specialisation's parameters."""
        monkeypatch.setattr(driver, "bindings", lambda: self)
        monkeypatch.setattr(driver, "libcuda", lambda: self)
        for module in (step, bench):
            monkeypatch.setattr(module, "compiled", self.compiled)

    def compiled(self, specs: Iterable[Specialisation], arch: int, *, processes: int) -> dict[Specialisation, Code]:
        assert arch == self.arch and processes >= 1
        made = {}
        for i, spec in enumerate(specs):
            made[spec] = code = standin.code(spec, arch, f"{i} {spec.key}".encode())
            self.know(spec, code)
        return made

    def know(self, spec: Specialisation, code: Code) -> None:
        """A cubin that may be loaded."""
        self.known[code.cubin] = spec, code

    # --- the device ---

    def cuInit(self, flags):
        return (OK,)

    def cuDriverGetVersion(self):
        return OK, self.version

    def cuDeviceGetCount(self):
        return OK, self.count

    def cuDeviceGet(self, index):
        assert 0 <= index < self.count
        return OK, index

    def cuDeviceGetUuid(self, device):
        return OK, SimpleNamespace(bytes=self.uuid[:-1] + bytes([device]))

    def cuDeviceGetName(self, length, device):
        return OK, b"Mock GPU".ljust(length, b"\0")

    def cuDeviceTotalMem(self, device):
        return OK, self.memory

    def cuDeviceGetAttribute(self, attribute, device):
        kinds = real.CUdevice_attribute
        values = {
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: self.arch // 10,
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: self.arch % 10,
            kinds.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: self.sms,
            kinds.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: 232448,
        }
        return OK, values[attribute]

    def cuDevicePrimaryCtxRetain(self, device):
        return OK, 1

    def cuCtxSetCurrent(self, context):
        self.here.context = context
        return (OK,)

    # --- memory ---

    def cuMemGetInfo(self):
        used = sum(len(block) for block in self.allocated.values())
        return OK, self.memory - used, self.memory

    def cuMemAlloc(self, nbytes):
        block = ctypes.create_string_buffer(b"\xff" * nbytes, nbytes)
        self.allocated[ctypes.addressof(block)] = block
        return OK, ctypes.addressof(block)

    def _unsafe(self) -> tuple[Any, ...] | None:
        """What a function that may wait for the GPU returns while this thread captures: unless the capture is relaxed, that spoils
        it."""
        relaxed = real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        hit = [s.captured for s in self.streams if s.captured is not None and s.captured.mode != relaxed]
        for capture in hit:
            capture.spoilt = True
        return (real.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,) if hit else None

    def cuMemFree(self, address):
        if bad := self._unsafe():
            return bad
        del self.allocated[int(address)]
        return (OK,)

    def cuMemHostAlloc(self, nbytes, flags):
        block = ctypes.create_string_buffer(nbytes)
        self.pinned[ctypes.addressof(block)] = block
        return OK, ctypes.addressof(block)

    def cuMemFreeHost(self, address):
        if bad := self._unsafe():
            return bad
        del self.pinned[int(address)]
        return (OK,)

    def span(self, address: int, nbytes: int = 1) -> tuple[int, int]:
        """The allocation that holds these bytes."""
        for start, block in self.allocated.items():
            if start <= address and address + nbytes <= start + len(block):
                return start, start + len(block)
        raise AssertionError(f"{nbytes} bytes at {address:#x} are not the device's")

    def cuMemcpyHtoDAsync(self, to, source, nbytes, stream):
        self.span(int(to), nbytes)
        self._put(stream, lambda: ctypes.memmove(int(to), int(source), nbytes))
        return (OK,)

    def cuMemcpyDtoHAsync(self, to, source, nbytes, stream):
        self.span(int(source), nbytes)
        self._put(stream, lambda: ctypes.memmove(int(to), int(source), nbytes))
        return (OK,)

    def cuMemcpyDtoDAsync(self, to, source, nbytes, stream):
        self.span(int(to), nbytes)
        self.span(int(source), nbytes)
        assert abs(int(to) - int(source)) >= nbytes, "what is copied overlaps"
        self._put(stream, lambda: ctypes.memmove(int(to), int(source), nbytes))
        return (OK,)

    def cuMemsetD8Async(self, address, value, nbytes, stream):
        self.span(int(address), nbytes)
        self._put(stream, lambda: ctypes.memset(int(address), value, nbytes))
        return (OK,)

    # --- streams, events, graphs ---

    def _at(self, handle: Any) -> Stream:
        return self.streams[int(handle) - 1]

    def _capturing(self) -> bool:
        return any(stream.captured is not None for stream in self.streams)

    def _put(self, handle: Any, work: Callable[[], Any]) -> None:
        stream = self._at(handle)
        if stream.captured is None:
            stream.queue.append(work)
            return
        nodes = stream.captured.nodes
        nodes.append(Node(work, int(handle), stream.ends))
        stream.ends = frozenset({len(nodes) - 1})

    def cuStreamCreate(self, flags):
        assert flags == 1, "a stream that waits for the default one"
        self.streams.append(Stream())
        return OK, len(self.streams)

    def cuStreamDestroy(self, stream):
        assert self._at(stream).captured is None
        return (OK,)

    def _drain(self, until: Callable[[], bool] = lambda: False, but: int = 0) -> None:
        """Do what streams have to do, one after the other, but for the stream `but`."""
        for handle, stream in enumerate(self.streams, 1):
            while handle != but and stream.queue and not until():
                stream.queue.pop(0)()

    def cuStreamWaitEvent(self, stream, event, flags):
        assert flags == 0
        at, state = self._at(stream), self.events[event]
        captures = {id(s.captured): s.captured for s in self.streams if s.captured is not None}
        capture = next((c for c in captures.values() if event in c.events), None)
        if capture is None:
            assert at.captured is None, "work of a graph waits for an event that no graph has"
            if isinstance(state, Token):
                at.queue.append(lambda: self._drain(lambda: state.reached, but=int(stream)))
            return (OK,)
        assert at.captured in (None, capture), "one stream in two graphs"
        at.captured, at.ends = capture, at.ends | capture.events[event]
        capture.waited.add(event)
        return (OK,)

    def cuStreamQuery(self, stream):
        """All is done while somebody waits, who then asks again."""
        assert self._at(stream).captured is None, "asked for while a graph is captured"
        if self.hangs:
            return (NOT_READY,)
        busy = any(s.queue for s in self.streams)
        self._drain()
        return (NOT_READY if busy else OK,)

    def cuEventCreate(self, flags):
        self.events.append(None)
        return OK, len(self.events) - 1

    def cuEventDestroy(self, event):
        return (OK,)

    def cuEventRecord(self, event, stream):
        if (capture := self._at(stream).captured) is not None:
            capture.events[event] = self._at(stream).ends
            return (OK,)
        token = self.events[event] = Token()
        self._put(stream, partial(self._reach, event, token))
        return (OK,)

    def cuEventRecordWithFlags(self, event, stream, flags):
        assert flags == 1 and self._at(stream).captured is not None, "an event that only orders work of the graph"
        self._put(stream, partial(self._reach, event, None))
        return (OK,)

    def _reach(self, event: int, token: Token | None) -> None:
        if token is not None:
            token.reached = True
        if token is None or self.events[event] is token:
            self.events[event] = self.clock

    def cuEventQuery(self, event):
        """Done where it was never recorded."""
        if self.hangs:
            return (NOT_READY,)
        waited = isinstance(self.events[event], Token)
        self._drain(lambda: not isinstance(self.events[event], Token))
        return (NOT_READY if waited else OK,)

    def cuEventElapsedTime(self, ms, first, second):
        ms._obj.value = self.events[second.value or 0] - self.events[first.value or 0]
        return 0

    def cuStreamBeginCapture(self, stream, mode):
        assert self._at(stream).captured is None
        self._at(stream).captured, self._at(stream).ends = Capture(int(stream), mode), frozenset()
        return (OK,)

    def cuStreamEndCapture(self, stream):
        capture = self._at(stream).captured
        assert capture is not None and capture.origin == int(stream), "a capture ends where it began"
        self.graphs.append(capture)
        joined = capture.before(self._at(stream).ends)
        others = [s for s in self.streams if s.captured is capture]
        for one in others:
            one.captured, one.ends = None, frozenset()
        if capture.spoilt:
            return real.CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, 0
        assert set(capture.events) == capture.waited, "an event of the graph that nothing waits for"
        if len(joined) < len(capture.nodes):
            return real.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNJOINED, 0
        return OK, len(self.graphs) - 1

    def cuGraphInstantiate(self, graph, flags):
        self.graphs.append(self.graphs[graph])
        return OK, len(self.graphs) - 1

    def cuGraphDestroy(self, graph):
        self.graphs[graph] = None
        return (OK,)

    def cuGraphExecDestroy(self, graph):
        assert not any(stream.queue for stream in self.streams), "a graph that may still run"
        self.graphs[graph] = None
        return (OK,)

    def cuGraphUpload(self, graph, stream):
        assert self.graphs[graph] is not None
        return (OK,)

    def cuGraphLaunch(self, graph, stream):
        captured = self.graphs[graph]
        assert captured is not None
        for work in captured.in_order(late=self.late):
            self._put(stream, work)
        return (OK,)

    # --- code ---

    def cuLibraryLoadData(self, cubin, jit, jit_values, jits, options, values, count):
        assert (jit, jit_values, jits, options, values, count) == ([], [], 0, [], [], 0)
        spec, code = self.known[cubin]
        self.functions.append(SimpleNamespace(spec=spec, code=code, shared=48 << 10, loaded=False))
        return OK, len(self.functions) - 1

    def cuLibraryUnload(self, library):
        assert not any(stream.queue for stream in self.streams), "code that may still run"
        assert self.functions[library].spec is not None, "unloaded twice"
        self.functions[library].spec = None
        return (OK,)

    def cuLibraryGetKernel(self, library, name):
        assert name.decode() == self.functions[library].code.name
        return OK, library

    def cuKernelGetFunction(self, kernel):
        return OK, kernel

    def cuFuncLoad(self, function):
        assert not self._capturing(), "code that is loaded while a graph is captured"
        self.functions[function].loaded = True
        return (OK,)

    def cuProfilerStart(self):
        self.profiling = True
        return (OK,)

    def cuProfilerStop(self):
        self.profiling = False
        return (OK,)

    def cuKernelGetParamInfo(self, kernel, index):
        code: Code = self.functions[kernel].code
        if index >= len(code.params):
            return real.CUresult.CUDA_ERROR_INVALID_VALUE, 0, 0
        return OK, *standin.placed(code.params, code.arch)[index]

    def cuKernelSetAttribute(self, attribute, value, kernel, device):
        assert attribute.name == "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES" and value <= 232448
        self.functions[kernel].shared = value
        return (OK,)

    def cuTensorMapEncodeTiled(self, at, kind, rank, address, sizes, strides, box, steps, inner, swizzle, l2, fill):
        """What NVIDIA's manual asks of the arguments, then the arguments themselves."""
        at, address = at.value, address.value
        nbytes = {number: size for number, _, size in ELEMENTS.values()}[kind]
        assert rank == 2 and at % 128 == 0 and address % 16 == 0 and list(steps) == [1, 1] and inner == fill == 0
        assert all(1 <= n <= 1 << 32 for n in sizes) and strides[0] % 16 == 0 and strides[0] < 1 << 40
        assert all(1 <= n <= 256 for n in box) and box[0] * nbytes % 16 == 0
        assert swizzle in (0, 1, 2, 3) and (not swizzle or box[0] * nbytes <= 16 << swizzle)
        assert strides[0] >= sizes[0] * nbytes, "rows that overlap"
        data = MAP.pack(MAGIC, kind, nbytes, address, sizes[0], sizes[1], strides[0], *box, swizzle, l2, fill)
        ctypes.memmove(at, data.ljust(128, b"\0"), 128)
        return 0

    def cuLaunchKernelEx(self, config, function, pointers, extra):
        found = self.functions[function]
        assert found.spec is not None, "code that was unloaded"
        assert found.loaded, f"{found.code.name} is not loaded before its first launch"
        if self.profiling:
            self.profiled.append(found.spec)
        code: Code = found.code
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        limits = (2**31 - 1, 65535, 65535)
        assert all(1 <= n <= most for n, most in zip(grid, limits, strict=True)), f"{code.name}: grid {grid}"
        assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (code.threads, 1, 1) and code.threads <= 1024
        assert config.sharedMemBytes == code.shared_bytes <= found.shared and extra == 0
        attributes = {a.id.name: a.value for a in config.attrs} if config.numAttrs else {}
        assert not attributes
        table = (ctypes.c_void_p * len(code.params)).from_address(pointers)
        params = [ctypes.string_at(at, nbytes) for at, (nbytes, _) in zip(table, code.params, strict=True)]
        misplaced = [at for at, (_, align) in zip(table, code.params, strict=True) if at % align]
        assert not misplaced, f"{code.name}: parameters at {misplaced}"
        values = decoded(found.spec, code, params, self.span)  # now: the driver copies parameters when it is called
        self._put(config.hStream, partial(self._execute, found.spec, values, grid))
        return (OK,)

    def _execute(self, spec: Specialisation, values: list[interpreter.Parameter], grid: tuple[int, ...]) -> None:
        self.clock += LAUNCH_MS * self.cost(spec)
        self.launched.append((spec.name, grid))
        self.execute(spec, with_tables(spec, values, self.span), grid)


def memory_of(gpu: Gpu, session: Any) -> np.ndarray:
    """The arena as this process sees it."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * session.plan.arena_bytes).from_address(session.base))
