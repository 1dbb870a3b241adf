"""From programs to a running session: lower, plan, compile, bind, launch.

A program's launches are captured into one CUDA graph for each batch and length that it runs with. What changes from run to run is
in device memory: the run-time scalars and the inputs, which come from two alternating pinned staging buffers, so that the next
run's are written while the last one's are still being copied.

One allocation holds the arena (from `base`, a multiple of ALIGN), the run-time scalars, the counter (single_pass_reduction.py) and
the tables (kernel.Table). A call is a launch, a library's GEMM or a collective; bound, it has the addresses and sizes of a run."""

import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from barellm.cuda import driver, kernel
from barellm.cuda.compile import compiled
from barellm.cuda.cublaslt import BoundGemm, Cublas
from barellm.cuda.fuse import FUSIONS, GROUPS
from barellm.cuda.kernel import Call, CollectiveCall, Counter, Launch, LibraryGemm, Lowering, Sizes, Specialisation, Table, Target
from barellm.cuda.launch import BoundLaunch, Kernel
from barellm.cuda.nccl import BoundCollective, Communicator, JoinCollectives
from barellm.errors import UserError
from barellm.program import scalars
from barellm.program.builder import Program
from barellm.program.dtypes import numpy_dtype
from barellm.program.integers import round_up
from barellm.program.ops.base import Op
from barellm.program.ops.collectives import Transfer
from barellm.program.planner import Plan
from barellm.program.tensor import Tensor
from barellm.runtime import poison
from barellm.runtime.arena import ArenaSession, laps, sizes_of
from barellm.runtime.cgroup import cpu_limit
from barellm.runtime.lowering import LoweredProgram, Region, decodes, plan_lowered
from barellm.runtime.memory import check_fits
from barellm.runtime.ranks import ALONE

ALIGN = 512  # bytes, of the arena
GRAPHS = 16  # that are kept, of those used last
HEADROOM = 64 << 20  # bytes of the GPU left for code, graphs and the driver
LEAVE_S = 5.0  # seconds that `close` waits for the GPU after an error
INPUT_ALIGN = 64  # bytes: of inputs in a pinned buffer, and of scalars, counter and tables


class Lowered(LoweredProgram[Lowering]):
    """A program's ops after fusion, each with its launches and scratch."""

    def __init__(self, program: Program, target: Target) -> None:
        import barellm.cuda.kernels  # noqa: F401  (fills the registry)

        cached = decodes(program)
        registry = kernel.REGISTRY
        super().__init__(program, table=FUSIONS, registry=registry, groups=GROUPS, lowering=lambda op: Lowering(op, target, cached))

    @property
    def launches(self) -> list[Call]:
        return [launch for op in self.ops for launch in self.of[op].launches]


@dataclass(frozen=True)
class LoweredPrograms:
    """Programs as launches, with an address for every byte; nothing is allocated."""

    target: Target
    lowered: dict[str, Lowered]
    plan: Plan

    @property
    def machine(self) -> dict[str, Any]:
        """The machine that the code is made for."""
        return {"isa": f"sm_{self.target.arch}", "multiprocessors": self.target.sms}

    @property
    def calls(self) -> dict[str, list[Call]]:
        """The launches of each program, in order."""
        return {name: low.launches for name, low in self.lowered.items()}

    @property
    def tables(self) -> list[Table]:
        """The tables that the launches read besides tensors."""
        launches = [call for calls in self.calls.values() for call in calls if isinstance(call, Launch)]
        return [argument for launch in launches for argument in launch.args if isinstance(argument, Table)]

    @property
    def specs(self) -> dict[Specialisation, str]:
        """Every specialisation that must be compiled, with the op that needs it first."""
        first_ops: dict[Specialisation, str] = {}
        for low in self.lowered.values():
            for launch in low.launches:
                if isinstance(launch, Launch):
                    first_ops.setdefault(launch.spec, launch.op.name)
        return first_ops


def lower_and_plan(programs: dict[str, Program], target: Target) -> LoweredPrograms:
    """The memory that a session of `programs` allocates, to the byte, and its launches."""
    lowered = {name: Lowered(p, target) for name, p in programs.items()}
    store = next(iter(programs.values())).store
    guard = poison.GUARD if poison.requested() else 0
    return LoweredPrograms(target, lowered, plan_lowered(lowered, store, guard))


@dataclass(frozen=True)
class Run:
    """The key of a graph: the program and its sizes; `accumulate`, if a library's GEMM takes it as an argument; and `last`, whether
    the micro-batch is the step's last, if the program starts collectives then."""

    program: str
    sizes: Sizes
    accumulate: bool = False
    last: bool = False

    def __str__(self) -> str:
        return f"program {self.program!r}, batch {self.sizes.batch}, seq {self.sizes.seq}"


class Fill:
    """A call of debug mode between launches: it fills the bytes of a tensor whose life has ended."""

    def __init__(self, op: Op, memory: driver.DeviceMemory, start: int, nbytes: int) -> None:
        self.op, self.memory, self.start, self.nbytes = op, memory, start, nbytes

    def run(self, stream: Any) -> None:
        self.memory.fill(poison.BYTE, self.start, self.nbytes, stream)


Bound = BoundLaunch | BoundGemm | BoundCollective | JoinCollectives | Fill


class StagingBuffer:
    """One of the two pinned buffers: the run-time scalars, then the inputs of one program. `copied`: the event that the GPU has
    copied them; `input_views`: the arrays that show the inputs of each program."""

    def __init__(self, nbytes: int) -> None:
        self.memory = driver.PinnedMemory(nbytes)
        self.copied = driver.Event()
        self.input_views: Any = None


class CudaSession(ArenaSession):
    """Programs over one arena on a GPU, compiled and ready. A `runtime.session.Session`."""

    tells_launches = False  # whether `each_op` prints them

    def __init__(
        self, programs: dict[str, Program], *, device: driver.Device | None = None, built: LoweredPrograms | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        """Plan, compile, load and allocate. `built`: the lowered programs, None: lowered here, with the options of `Target.of`.
        `device`: None: that of this rank. UserError if the GPU has too little memory."""
        lap = laps()
        self.ranks = next((op.ranks for p in programs.values() for op in p.ops if isinstance(op, Transfer)), ALONE)
        self.device = device or driver.device(self.ranks.number)
        self.context = driver.Context(self.device)
        built = built or lower_and_plan(programs, Target.of(self.device, **options))
        super().__init__(programs, built.plan)
        self.target, self.lowered, self.calls, self.specs = built.target, built.lowered, built.calls, built.specs
        free = max(self.context.free_bytes() - HEADROOM, 0)
        limit = (free, f"free memory of {self.device.name}, less {HEADROOM >> 20} MiB for code,")
        check_fits(self.plan, what=sizes_of(programs), limit=limit)
        self.seconds = {"plan": lap()}  # seconds of opening, by stage
        codes = compiled(self.specs, self.device.arch, processes=processes())
        self.seconds["compile"] = lap()
        self.kernels = {spec: Kernel(code, self.device) for spec, code in codes.items()}
        # Programs whose graphs depend on `accumulate` and on `last` (Run), and those that call libraries.
        gemms = {n: [c for c in calls if isinstance(c, LibraryGemm)] for n, calls in self.calls.items()}
        self._by_accumulate = {name for name, found in gemms.items() if any(p.by_accumulate for p in found)}
        collectives = {n: [c for c in calls if isinstance(c, CollectiveCall)] for n, calls in self.calls.items()}
        self._by_last = {name for name, found in collectives.items() if any(t.overlapped for t in found)}
        self._by_library = {name for name in self.calls if gemms[name] or collectives[name]}
        self._ran: set[Run] = set()
        self.cublas = Cublas() if any(gemms.values()) else None
        self._communicator: Communicator | None = None
        self.seconds["load"] = lap()
        self._map_arena(built.tables)
        self.write_constants()
        self.guards = poison.Guards(self, self.plan) if poison.requested() else None
        self._staging_buffers = [self._new_staging_buffer() for _ in range(2)]
        self._starts = {name: partial(self._start, name) for name, low in self.lowered.items() if low.ops}
        self._graphs: OrderedDict[Run, driver.Graph] = OrderedDict()
        self._pid = os.getpid()
        self.seconds["map"] = lap()

    @property
    def stream(self) -> Any:
        """The context's, for this thread."""
        return self.context.stream

    # --- building ---

    def _map_arena(self, tables: list[Table]) -> None:
        """Allocate and clear the arena, the run-time scalars, the counter and the tables behind it, and write the tables."""
        counter = self.plan.arena_bytes + round_up(scalars.NBYTES, INPUT_ALIGN)
        end = counter + INPUT_ALIGN
        offsets: dict[Table, int] = {}
        for table in tables:
            offsets[table] = end
            end += round_up(table.nbytes, INPUT_ALIGN)
        try:
            self.memory = driver.DeviceMemory(end + ALIGN)
        except driver.DriverError as error:
            raise UserError(f"{self.device.name} refuses an arena of {self.plan.arena_bytes} bytes: {error}") from None
        self.base = round_up(self.memory.address, ALIGN)
        self._skip = self.base - self.memory.address
        self._scalars = self.base + self.plan.arena_bytes
        self._counter = self.base + counter
        self.memory.fill(0, 0, self.memory.nbytes, self.stream)
        self._tables = {table: self.base + start for table, start in offsets.items()}
        for table, start in offsets.items():
            self._set(start, np.frombuffer(table.packed(self._address), np.uint8))

    def _new_staging_buffer(self) -> StagingBuffer:
        """A buffer for the scalars and the inputs of any one program: programs share the memory of the inputs."""
        start = round_up(scalars.NBYTES, INPUT_ALIGN)
        offsets: dict[Tensor, int] = {}
        most = start
        for program in self.programs:
            end = start
            for t in self._inputs_of(program).values():
                offsets[t] = end
                end += round_up(t.nbytes, INPUT_ALIGN)
            most = max(most, end)
        buffer = StagingBuffer(most)

        def view(t: Tensor) -> np.ndarray:
            return buffer.memory.array[offsets[t] : offsets[t] + t.nbytes].view(numpy_dtype(t.dtype))

        buffer.input_views = self._input_rooms(view)
        return buffer

    def _address(self, region: Region | Table | Counter) -> int:
        """The device address of an argument."""
        if isinstance(region, Counter):
            return self._counter
        if isinstance(region, Table):
            return self._tables[region]
        return self.base + self.plan.offsets[region.tensor] + region.start

    def _bound(self, run: Run) -> list[Bound]:
        """The calls of a run, bound. In debug mode a tensor is filled after the last op that reads it; collectives that overlap the
        program are waited for at its end."""
        low, dead = self.lowered[run.program], poison.deaths(self.plan, run.program) if self.guards else {}
        bound: list[Bound] = []
        for i, op in enumerate(low.ops):
            bound += [self._bind(call, run) for call in low.of[op].launches]
            bound += [Fill(op, self.memory, self._skip + self.plan.offsets[t], t.nbytes) for t in dead.get(i, ())]
        started = [i for i, call in enumerate(bound) if isinstance(call, BoundCollective) and call.begins]
        if started:
            bound.append(JoinCollectives(bound[started[-1]].op, started[-1], self.communicator()))
        return bound

    def communicator(self) -> Communicator:
        """NCCL's communicator of all ranks. They make it together, when each is about to send for the first time: earlier, one of
        them may still be preparing something for the others, which would wait."""
        if self._communicator is None:
            self._communicator = Communicator(self.ranks, self.device)
        return self._communicator

    def _bind(self, call: Call, run: Run) -> Bound:
        """A call with the addresses and sizes of a run."""
        if isinstance(call, Launch):
            return BoundLaunch(call, self.kernels[call.spec], run.sizes, self._address, self._scalars)
        if isinstance(call, CollectiveCall):
            return BoundCollective(call, self.communicator(), self._address, last=run.last)
        assert self.cublas is not None
        return BoundGemm(call, self.cublas, run.sizes, self._address, run.accumulate)

    def _graph(self, run: Run) -> driver.Graph:
        """The graph of a run: the kept one, or captured now; if there are GRAPHS, the least recently used one is freed."""
        if run in self._graphs:
            self._graphs.move_to_end(run)
            return self._graphs[run]
        if len(self._graphs) == GRAPHS:
            self.context.synchronize()  # the oldest may still run
            self._graphs.popitem(last=False)[1].free()
        self._graphs[run] = self._capture(self._bound(run))
        return self._graphs[run]

    def _capture(self, bound: list[Bound]) -> driver.Graph:
        """A graph of these calls, in order."""

        def enqueue() -> None:
            for call in bound:
                call.run(self.stream)

        return driver.Graph(self.stream, enqueue)

    # --- running ---

    def run(self, program: str, **values: Any) -> None:
        """The same as `ArenaSession.run`. It returns when the GPU has the work; `read` and `synchronize` wait for it."""
        if os.getpid() != self._pid:  # a context does not survive a fork
            raise RuntimeError("this process was forked from one with a running backend: open a new session in it")
        self.context.enter()
        self._staging_buffers.reverse()
        self._staging_buffers[0].copied.wait()
        self._inputs = self._staging_buffers[0].input_views
        super().run(program, **values)

    def _scalar(self, name: str) -> int:
        return int(self._block.ints[scalars.SCALARS[name].index])

    def _run(self, program: str) -> Run:
        """The key of the run that begins, from its scalars. Only sizes that the program has are in it."""
        sizes = Sizes.of({name: self._scalar(name) for name in self._limits[program]})
        accumulate = program in self._by_accumulate and bool(self._scalar("accumulate"))
        return Run(program, sizes, accumulate, program in self._by_last and bool(self._scalar("last")))

    def _captures(self, run: Run) -> bool:
        """Whether this run may be captured as a graph; it counts as run from now on. A program with calls of libraries must run
        once before: in the first call they load code, or connect ranks."""
        ready = run.program not in self._by_library or run in self._ran
        self._ran.add(run)
        return ready

    def _start(self, program: str) -> None:
        """Put a run on the stream: the copies of its inputs, then its graph, or its calls one by one."""
        self._send_inputs(program)
        run = self._run(program)
        driver.note_launch(run)
        if self._captures(run) and not driver.blocking():
            self._graph(run).launch(self.stream)
        else:
            self._launch_each(run)

    def _launch_each(self, run: Run) -> None:
        """The calls of a run without a graph. With CUDA_LAUNCH_BLOCKING each is waited for, so that an error names its launch."""
        for launch in self._bound(run):
            if driver.blocking():
                driver.note_launch(launch)
            launch.run(self.stream)
            if driver.blocking():
                self.context.synchronize()

    def each_op(self, program: str) -> Iterator[tuple[Op, Callable[[], None]]]:
        """The ops of a run that begins (`runtime.op_check`), each with a function that launches its calls alone, and waits."""
        self._send_inputs(program)
        run, low = self._run(program), self.lowered[program]

        def launch(op: Op) -> None:
            for call in low.of[op].launches:
                bound = self._bind(call, run)
                driver.note_launch(bound)
                if self.tells_launches:
                    print(f"{op.name}: {bound}", flush=True)
                bound.run(self.stream)
                self.synchronize()

        return ((op, partial(launch, op)) for op in low.ops)

    def _send_inputs(self, program: str) -> None:
        """Start the copies of the scalars and of the inputs, as long as they are in this run, from the staging buffer."""
        buffer = self._staging_buffers[0]
        buffer.memory.array[: scalars.NBYTES] = self._block.ints.view(np.uint8)
        driver.call("cuMemcpyHtoDAsync", self._scalars, buffer.memory.address, scalars.NBYTES, self.stream)
        for name, t in self._inputs_of(program).items():
            nbytes, view = self._staged[name].nbytes, buffer.input_views[program][name][0]
            at = self.base + self.plan.offsets[t]
            driver.call("cuMemcpyHtoDAsync", at, view.ctypes.data, nbytes, self.stream)
        buffer.copied.record(self.stream)

    def timed(self, program: str, **values: Any) -> list[tuple[Op, float]]:
        """Run a program. Returns (op, milliseconds on the GPU between events) for each call, in order. Waiting for other ranks at
        the end of a program counts for the last collective that was started."""
        bound: list[Bound] = []
        events: list[driver.Event] = []

        def enqueue(record: Callable[[driver.Event, Any], None]) -> None:
            def mark() -> None:
                events.append(driver.Event(timed=True))
                record(events[-1], self.stream)

            mark()
            for launch in bound:
                launch.run(self.stream)
                mark()

        def start() -> None:
            """Run it once with an event between calls: call by call if it may not be captured yet, else as a graph."""
            run = self._run(program)
            bound[:] = self._bound(run)
            if not self._captures(run):
                enqueue(driver.Event.record)
                self.context.synchronize()
                return
            graph = driver.Graph(self.stream, lambda: enqueue(driver.Event.record_in_graph))
            graph.launch(self.stream)
            self.context.synchronize()
            graph.free()

        self._run_by(start, program, values)
        times = [after.since(before) for before, after in pairwise(events)]
        ending = bound[-1]
        if isinstance(ending, JoinCollectives):
            bound.pop()
            times[ending.last] += times.pop()
        return [(launch.op, ms) for launch, ms in zip(bound, times, strict=True)]

    def run_unrolled(self, program: str, **values: Any) -> None:
        """The same as `run`, but launch by launch instead of by a graph."""

        self._run_by(lambda: self._launch_each(self._run(program)), program, values)

    def _run_by(self, start: Callable[[], None], program: str, values: dict[str, Any]) -> None:
        """Run a program, but with start() instead of its graph, after the copies of its inputs."""

        def begin() -> None:
            self._send_inputs(program)
            start()

        usual_start = self._starts[program]
        self._starts[program] = begin
        try:
            self.run(program, **values)
        finally:
            self._starts[program] = usual_start

    def replay(self, program: str, **sizes: int) -> None:
        """Launch the graph of a run of these sizes, with the inputs and run-time scalars of the last run."""
        self._graph(replace(self._run(program), sizes=Sizes.of(sizes))).launch(self.stream)

    def captured(self, program: str, wanted: Callable[[Call], bool], **sizes: int) -> driver.Graph:
        """A graph of those calls of a run of these sizes that are `wanted`, with the run-time scalars of the last run."""
        run = replace(self._run(program), sizes=Sizes.of(sizes))
        return self._capture([self._bind(call, run) for call in self.calls[program] if wanted(call)])

    def synchronize(self) -> None:
        """Wait until every run has ended."""
        self.context.synchronize()

    def close(self) -> None:
        """Wait for what runs, and free the GPU's memory. Safe to call twice. After an error nothing is waited for longer than
        LEAVE_S: if the GPU hangs or is lost, all is left to the end of the process, and no second error hides the first."""
        if self.memory.free.alive:
            failed = sys.exc_info()[0] is not None
            if self._communicator and failed:
                with suppress(driver.DriverError):
                    self._communicator.close(failed=True)  # what waits for other ranks on the GPU ends
            if failed and not self.context.ends(LEAVE_S):
                left = [self.context.close, *(buffer.memory.free for buffer in self._staging_buffers), self.memory.free]
                for one in left + [graph.free for graph in self._graphs.values()]:
                    one.detach()
                return
            self.context.synchronize()
            for graph in self._graphs.values():
                graph.free()
            if self._communicator and not failed:
                self._communicator.close()
            for loaded in self.kernels.values():
                loaded.unload()
            self.memory.free()
            for buffer in self._staging_buffers:
                buffer.memory.free()
            if self.cublas:
                self.cublas.close()
            self.context.close()

    def _get(self, start: int, stop: int) -> np.ndarray:
        return self.memory.read(self._skip + start, self._skip + stop, self.stream)

    def _fill(self, start: int, stop: int, byte: int) -> None:
        self.memory.fill(byte, self._skip + start, stop - start, self.stream)

    def _set(self, start: int, data: np.ndarray) -> None:
        self.memory.write(self._skip + start, data, self.stream)


def processes() -> int:
    """How many processes may compile at once: one for each core that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, int(cpu_limit() or cores)))
