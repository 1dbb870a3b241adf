"""From programs to a running session: lower, plan, compile, link into tables, run.

A program becomes a table of records {function, arguments, barrier after, counters}. All threads execute the table; a barrier stands
only where a call touches bytes that a call since the last barrier has written, or writes bytes that one has read."""

import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from barellm.cpu import compilers, jit
from barellm.cpu.fuse import table
from barellm.cpu.isa import ISA, host
from barellm.cpu.kernel import REGISTRY, Call, Lowering, Specialisation
from barellm.cpu.kernels.gemm.amx import uses_tiles
from barellm.cpu.kernels.gemm.skinny_gemm import FEW
from barellm.cpu.lang.sync import STAMPS
from barellm.cpu.poison import with_poison
from barellm.cpu.threads import Pool, allowed_cpus, record_table, thread_count
from barellm.program.builder import Program
from barellm.program.fused_grad_norm import SquareSums, fuse_grad_norm, recompute_square_sums
from barellm.program.ops.base import Op, Tensor
from barellm.program.planner import Plan
from barellm.runtime import arena, poison
from barellm.runtime.lowering import LoweredProgram, Region, decodes, plan_lowered
from barellm.runtime.memory import check_fits

HUGE = 2 << 20
RECOMPUTE_SQUARES = "squares"  # the program that sums the squares of gradients again


class Lowered(LoweredProgram[Lowering]):
    """A program's ops after fusion, each with its calls and scratch."""

    def __init__(self, program: Program, isa: ISA, threads: int, *, skinny_gemm: bool | None = None, config: Any = None) -> None:
        """`skinny_gemm`: GEMMs may have few rows; None: they may where text is written a token at a time."""
        import barellm.cpu.kernels  # noqa: F401  (fills the registry)

        few = decodes(program) if skinny_gemm is None else skinny_gemm
        super().__init__(program, table=table(isa), registry=REGISTRY, lowering=lambda op: Lowering(op, isa, threads, few, config))

    @property
    def calls(self) -> list[Call]:
        return [call for op in self.ops for call in self.of[op].calls]

    @property
    def thread_scratch_bytes(self) -> int:
        return max((c.thread_scratch_bytes for c in self.of.values()), default=0)


def barriers(calls: list[Call], address: Any) -> list[bool]:
    """Whether all threads must synchronize after each of the calls, in their order: where the next one reads or writes bytes that
    one since the last barrier wrote, or writes bytes that one read. The last call always ends with a barrier. `address(region)`
    gives its (start, stop) in the arena, in bytes."""
    after = [False] * len(calls)
    reads: list[tuple[int, int]] = []
    writes: list[tuple[int, int]] = []

    def touches(spans: Iterable[tuple[int, int]], others: list[tuple[int, int]]) -> bool:
        return any(a < d and c < b for a, b in spans for c, d in others)

    for i, call in enumerate(calls):
        r, w = [address(x) for x in call.reads], [address(x) for x in call.writes]
        if touches(r, writes) or touches(w, writes) or touches(w, reads):
            after[i - 1] = True
            reads, writes = [], []
        reads += r
        writes += w
    if after:
        after[-1] = True
    return after


@dataclass(frozen=True)
class LoweredPrograms:
    """Programs as calls, with an address for every byte; nothing is allocated. `kept`: sums of squares of gradients that the
    programs which store these leave for others; `thread_scratch`: each thread's own scratch."""

    isa: ISA
    threads: int
    programs: Mapping[str, Program]  # as they were lowered
    kept: SquareSums
    lowered: dict[str, Lowered]
    plan: Plan
    calls: dict[str, list[Call]]
    thread_scratch: Tensor

    @property
    def machine(self) -> dict[str, Any]:
        """The machine that the code is made for."""
        return {"isa": self.isa.name, "threads": self.threads}

    @property
    def specs(self) -> dict[Specialisation, str]:
        """Every specialisation that must be compiled, with the op that needs it first."""
        first_ops: dict[Specialisation, str] = {}
        for calls in self.calls.values():
            for call in calls:
                first_ops.setdefault(call.spec, call.op.name)
        return first_ops


def lower_and_plan(
    programs: Mapping[str, Program], *, threads: int | None = None, isa: ISA | None = None, written: bool = False,
    config: Any = None,
) -> LoweredPrograms:  # fmt: skip
    """Lower the programs to calls and plan their memory, to the byte. With `written`, gradients may be written from outside: if
    programs keep sums of their squares, a further program, RECOMPUTE_SQUARES, sums the squares of those in memory. `config`: that
    of GEMMs, None: tuned or default ones."""
    isa, threads = isa or host(), threads or thread_count()
    store, compute = (given := next(iter(programs.values()))).store, given.compute
    # Kernels that can sum the squares of the gradient that they store (`fuse.SQUARES`).
    programs, kept = fuse_grad_norm(programs, takes=lambda op: op.name == "matmul_dw" and uses_tiles(isa, op.x.dtype))
    if written and kept:
        programs = {**programs, RECOMPUTE_SQUARES: recompute_square_sums(store, kept, compute)}
    lowered = {name: Lowered(p, isa, threads, config=config) for name, p in programs.items()}
    # Each thread's own scratch is on the map like everything else: in whole pages, one at least; 2 bytes are a bf16.
    thread_scratch_bytes = -(-max(max(low.thread_scratch_bytes for low in lowered.values()), 64) // 4096) * 4096
    thread_scratch = store.get("threads.scratch", (threads, thread_scratch_bytes // 2), "bf16", "cache")
    made = plan_lowered(lowered, store, guard=poison.GUARD if poison.requested() else 0)
    calls = {name: low.calls for name, low in lowered.items()}
    if poison.requested():
        calls = {name: with_poison(low.ops, {op: low.of[op].calls for op in low.ops}, made, name) for name, low in lowered.items()}
    return LoweredPrograms(isa, threads, programs, kept, lowered, made, calls, thread_scratch)


class CpuSession(arena.ArenaSession):
    """Programs over one arena, compiled and ready. A `runtime.session.Session`."""

    piece = FEW  # of more rows the GEMM packs its weight, and adds in another order

    def __init__(
        self, programs: dict[str, Program], *, threads: int | None = None, isa: ISA | None = None, config: Any = None
    ) -> None:
        """Lower, plan, map, compile and link the programs, and start the threads. None: this machine's, or default ones."""
        lap = arena.laps()
        built = lower_and_plan(programs, threads=threads, isa=isa, written=True, config=config)
        check_fits(built.plan, what=arena.sizes_of(programs))
        super().__init__(built.programs, built.plan)
        self._squared, self._written = {t.name: sums for t, sums in built.kept.items()}, False
        inputs_of = {name: {t for op in p.ops for t in op.inputs.values()} for name, p in built.programs.items()}
        self._norms = {name for name, inputs in inputs_of.items() if not inputs.isdisjoint(self._squared.values())}
        self.isa, self.threads = built.isa, built.threads
        self.lowered, self.calls, self.specs = built.lowered, built.calls, built.specs
        thread_scratch = built.thread_scratch
        self.thread_scratch_bytes = thread_scratch.nbytes // self.threads
        self.seconds = {"plan": lap()}  # of opening, by stage
        self._map_arena()
        self.seconds["map"] = lap()
        self.write_constants()
        self._compile()
        self.seconds["compile"] = lap()
        self._link()
        self._inputs = self._input_rooms(lambda t: self.stored(t).reshape(-1))
        self.pool = Pool(self.threads, self.isa)
        memory = (self.arena, self.code, self._keep, self._block)
        self.pool.bind(self._block.address, self.base + self.plan.offsets[thread_scratch], self.thread_scratch_bytes, memory=memory)
        self.trace(None)
        # A session that is dropped without close() must not leave threads behind; at exit nobody waits for a step.
        weakref.finalize(self, self.pool.release).atexit = False

    # --- building ---

    def _map_arena(self) -> None:
        """Map the arena, aligned to huge pages, which save TLB misses."""
        # Private: shared anonymous memory gets no huge pages, and its first touch took 0.4 million page faults instead of 1000.
        self._mmap = mmap.mmap(-1, self.plan.arena_bytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._mmap.madvise(mmap.MADV_HUGEPAGE)
        raw = np.frombuffer(self._mmap, np.uint8)
        skip = -raw.ctypes.data % HUGE
        self.arena = raw[skip : skip + self.plan.arena_bytes]
        self.base = self.arena.ctypes.data
        self.guards = poison.Guards(self, self.plan) if poison.requested() else None

    def _compile(self) -> None:
        emitters = {spec.key: partial(spec.ir, self.isa) for spec in self.specs}
        objects = compilers.cached_objects(emitters, self.isa, processes=min(self.threads, len(allowed_cpus())))
        self.code = jit.Library(objects, self.isa)

    def _address(self, region: Region) -> tuple[int, int]:
        start = self.plan.offsets[region.tensor]
        return start + region.start, start + region.stop

    def _link(self) -> None:
        """Build each program's table: for each call its code's address, its arguments' addresses and whether a barrier follows."""
        self._tables: dict[str, tuple[int, int]] = {}
        self.records: dict[str, np.ndarray] = {}  # program -> its table, (calls, 8) int64
        self._keep: list[Any] = []
        for name, calls in self.calls.items():
            after, records = barriers(calls, self._address), record_table(len(calls))
            args = np.zeros(sum(len(c.args) for c in calls) + 1, np.int64)
            at = 0
            for i, call in enumerate(calls):
                records[i, :3] = (self.code.address(call.spec.symbol()), args.ctypes.data + 8 * at, after[i])
                for a in call.args:
                    args[at] = a if isinstance(a, int) else self.base + self._address(a)[0]
                    at += 1
            self._tables[name], self.records[name] = (records.ctypes.data, len(calls)), records
            self._keep += [records, args, *(c.keeps for c in calls if c.keeps is not None)]

    # --- running ---

    def run(self, program: str, **values: Any) -> None:
        if self._written and program in self._norms:
            super().run(RECOMPUTE_SQUARES)
            self._written = False
        super().run(program, **values)

    def write_rows(self, name: str, lo: int, array: np.ndarray) -> None:
        super().write_rows(name, lo, array)
        self._written |= name in self._squared

    def new_stamps(self) -> dict[str, np.ndarray]:
        """Room for a trace: program -> (threads, calls, 3) int64, `pool.now()` before a call, after it, and after its barrier."""
        made = {name: np.full((self.threads, len(c), STAMPS), -1, np.int64) for name, c in self.calls.items()}
        self._keep += made.values()
        return made

    def trace(self, stamps: dict[str, np.ndarray] | None) -> None:
        """Make every later run write its time stamps there, over those of the run before. None ends the tracing."""
        where = {name: room.ctypes.data for name, room in (stamps or {}).items()}
        self._starts = {
            name: partial(self.pool.run, *table, where.get(name, 0)) for name, table in self._tables.items() if table[1]
        }

    def each_op(self, program: str) -> Iterator[tuple[Op, Callable[[], None]]]:
        """The ops of a run that has begun (`runtime.op_check`), each with a function that runs its calls alone, and waits."""
        records, first = self.records[program], 0
        records[:, 2] = 1  # a barrier after each call, as a table must end with one
        for op, calls in groupby(self.calls[program], key=lambda call: call.op):
            count = len(list(calls))
            yield op, partial(self.pool.run, records[first:].ctypes.data, count)
            first += count

    def close(self) -> None:
        """Stop the threads. The arena stays readable."""
        self.pool.close()

    def _get(self, start: int, stop: int) -> np.ndarray:
        return self.arena[start:stop]

    def _fill(self, start: int, stop: int, byte: int) -> None:
        self.arena[start:stop] = byte

    def _set(self, start: int, data: np.ndarray) -> None:
        self.arena[start : start + data.nbytes] = data.reshape(-1).view(np.uint8)
