"""A machine in NumPy that runs PTX: several blocks of a grid at once, an array element for each of their threads.

Warps that stand at one instruction take it in one call. Which of those that could go on does is drawn: at the start and behind
every barrier each block's warps are split in two, and one half runs until it must wait before the other begins, so that a
barrier that is missing shows in the results. What nobody has written, in registers and in shared memory, holds `poison`. A run
repeats by its seed; two runs of other seeds and poison must give equal bits.

An instruction is a function:

    @op("add")
    def add(m, i, threads): ...

for the longest beginning of the opcode that is registered. `threads`: numbers of those that take part. It returns None, or
the warps that cannot go on yet; they try again when something has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from barellm.cuda.compile import Descriptor
from tests.simulators.interpreter import Box, Memory
from tests.simulators.ptx.counts import Counts
from tests.simulators.ptx.order import WINDOW, Deadlock, Fault, Order
from tests.simulators.ptx.parse import Address, Instruction, Kernel, Number, Operand, Register, Sink, Special, Symbol

WARP = 32
PARAMETERS_AT = 1 << 40  # the address of parameters
MOST = 3_000_000  # instructions of one run, beyond which it is taken for endless
BOOL = np.dtype(bool)
BF16 = np.dtype(ml_dtypes.bfloat16)
TYPES: dict[Any, np.dtype] = {
    **{f"{kind}{8 * n}": np.dtype(f"{'i' if kind == 's' else 'u'}{n}") for kind in "sub" for n in (1, 2, 4, 8)},
    **{"pred": BOOL, "f32": np.dtype("f4"), "f64": np.dtype("f8"), "bf16": BF16, "f16": np.dtype("f2")},
    **{"bf16x2": np.dtype("u4"), "tf32": np.dtype("f4")},
}
Array = np.ndarray


Handler = Callable[["Machine", Instruction, Array], "Array | None"]
Moves = list[tuple[int, Array]]  # which warps go on at which instruction
Mover = Callable[["Machine", Instruction, Array, Array], Moves]
HANDLERS: dict[str, Handler] = {}
MOVES: dict[str, Mover] = {}  # instructions after which warps need not go on with the next
AT_END: list[Callable[[Machine], None]] = []  # called when all warps of a run have ended
IDLE: list[Callable[[Machine], bool]] = []  # called when no warp can go on; True where something has changed


def op(*opcodes: str) -> Callable[[Handler], Handler]:
    """Register what an instruction does."""

    def register(handler: Handler) -> Handler:
        for opcode in opcodes:
            assert opcode not in HANDLERS, opcode
            HANDLERS[opcode] = handler
        return handler

    return register


def move(*opcodes: str) -> Callable[[Mover], Mover]:
    """Register an instruction that moves warps: from the threads that take part, and all warps that are there."""

    def register(handler: Mover) -> Mover:
        MOVES.update(dict.fromkeys(opcodes, handler))
        return handler

    return register


def at_end(check: Callable[[Machine], None]) -> Callable[[Machine], None]:
    AT_END.append(check)
    return check


def idle(work: Callable[[Machine], bool]) -> Callable[[Machine], bool]:
    IDLE.append(work)
    return work


@dataclass(frozen=True)
class Run:
    """What is drawn and chosen of a run. `late`: asynchronous copies and products arrive when they are waited for, not at once.
    `apart`: no warps of two blocks go on together, and those behind often stay behind. It takes longer, but shows what one block
    reads of another too early."""

    seed: int = 0
    poison: int = 0xFF  # a byte; NaN in every dtype
    late: bool = True
    apart: bool = False


@dataclass
class Group:
    """Warps that stand at one instruction. `tried`: how much had been done when they last could not go on."""

    pc: int
    warps: Array
    tried: int = -1


@cache
def program(kernel: Kernel) -> tuple[Handler | None, ...]:
    """The function of each instruction; None for those that move warps, which the machine itself knows."""
    return tuple(_handler(i.opcode) for i in kernel.instructions)


def _handler(opcode: str) -> Handler | None:
    parts = opcode.split(".")
    for n in range(len(parts), 0, -1):
        start = ".".join(parts[:n])
        if start in HANDLERS:
            return HANDLERS[start]
        if start in MOVES:
            return None
    raise Fault(f"no machine knows {opcode}")


class Machine:
    """Some blocks of a launch. `blocks`: (x, y, z) of each; `memory`: of the launch; `parameters`: their bytes; `maps`: the
    tensor maps among them, by address."""

    def __init__(
        self,
        kernel: Kernel,
        blocks: list[tuple[int, int, int]],
        grid: tuple[int, int, int],
        *,
        memory: Memory,
        parameters: bytes = b"",
        shared_bytes: int = 0,
        maps: dict[int, tuple[Box, Descriptor]] | None = None,
        run: Run | None = None,
        counts: Counts | None = None,
    ) -> None:
        run = run or Run()
        self.kernel, self.program, self.memory, self.counts = kernel, program(kernel), memory, counts
        self.parameters, self.maps = np.frombuffer(parameters, np.uint8), maps or {}
        self.rng, self.poison, self.late = np.random.default_rng(run.seed), run.poison, run.late
        self.apart = run.apart
        self.state: dict[str, Any] = {}
        n = len(blocks)
        self.threads = kernel.threads
        self.block_warps = kernel.threads // WARP
        self.everyone = np.arange(n * kernel.threads)
        self.all_warps = np.arange(n * self.block_warps)
        self.shared_bytes = shared_bytes
        self.shared = np.empty((n + 1, 1 << WINDOW), np.uint8)
        self.shared[:, :shared_bytes] = run.poison
        self.shared = self.shared.reshape(-1)
        self.cluster = kernel.cluster
        self.order = Order(n, self.block_warps, shared_bytes, self.cluster)
        self.registers: dict[str, Array] = {}
        self.kinds = {name: _storage(type_) for name, type_ in kernel.registers.items()}
        self.specials = self._specials(np.array(blocks, np.uint32).reshape(n, 3), grid)
        self.labels = set(kernel.labels.values())
        self.groups: list[Group] = []
        self.done = 0  # instructions
        self.arrived = np.zeros((n, 16), np.int64)  # threads, at each named barrier
        self.expected = np.zeros((n, 16), np.int64)
        self.waiting = np.full(len(self.all_warps), -1)  # for which barrier a warp waits
        self.resume = np.zeros(len(self.all_warps), np.int64)
        self.ended = np.zeros(len(self.all_warps), bool)

    def _specials(self, blocks: Array, grid: tuple[int, int, int]) -> dict[str, Array]:
        tid = np.arange(self.threads, dtype=np.uint32)
        n = len(blocks)
        found = {"%tid.x": np.tile(tid, n), "%laneid": np.tile(tid % WARP, n), "%warpid": np.tile(tid // WARP, n)}
        found |= {f"%ctaid.{axis}": np.repeat(blocks[:, k], self.threads) for k, axis in enumerate("xyz")}
        constants = {f"%nctaid.{axis}": size for axis, size in zip("xyz", grid, strict=True)}
        constants |= {"%ntid.x": self.threads, "%ntid.y": 1, "%ntid.z": 1, "%tid.y": 0, "%tid.z": 0}
        rank = blocks[:, 0] % self.kernel.cluster
        assert (rank == np.arange(n) % self.kernel.cluster).all(), "blocks of a cluster run at once, in their order"
        found |= {name: np.repeat(rank, self.threads) for name in ("%cluster_ctarank", "%cluster_ctaid.x")}
        return found | {name: np.full(len(self.everyone), value, np.uint32) for name, value in constants.items()}

    # --- what instructions read and write ---

    def read(self, operand: Operand, threads: Array, type_: Any) -> Array:
        """Values as `type_`, a PTX type's name or a dtype: for each of the threads, of an immediate one for all. A wider register
        is cut, a narrower one filled with zeros."""
        dtype = TYPES.get(type_, type_)
        if isinstance(operand, Register):
            values = self._register(operand.name)
        elif isinstance(operand, Number):
            return _immediate(operand, dtype)
        elif isinstance(operand, Special):
            if operand.name not in self.specials:
                raise Fault(f"no machine knows {operand.name}")
            values = self.specials[operand.name]
        elif isinstance(operand, Symbol):
            values = self._symbol(operand.name)
        else:
            raise Fault(f"{operand} is no value")
        if threads is not self.everyone and values.ndim:
            values = values[threads]
        return _as(values, dtype)

    def write(self, register: Operand, threads: Array, values: Any) -> None:
        """Bits into a register; integers are widened to its size."""
        if isinstance(register, Sink):
            return
        assert isinstance(register, Register), register
        kind = self.kinds[register.name]
        values = np.asarray(values)
        if values.dtype != kind:
            if values.dtype.itemsize == kind.itemsize and kind != BOOL:
                values = values.view(kind)
            else:
                assert values.dtype.kind in "iu" and kind.itemsize > values.dtype.itemsize, (register, values.dtype)
                values = values.astype(kind)
        if threads is self.everyone:
            self.registers[register.name] = np.broadcast_to(values, threads.shape)
            return
        changed = self._register(register.name).copy()  # arrays are shared: between registers, with whoever read one
        changed[threads] = values
        self.registers[register.name] = changed

    def _register(self, name: str) -> Array:
        found = self.registers.get(name)
        if found is None:
            kind = self.kinds[name]
            value = np.full(1, bool(self.poison & 0x80)) if kind == BOOL else np.full(kind.itemsize, self.poison, np.uint8)
            found = self.registers[name] = np.broadcast_to(value.view(kind), self.everyone.shape)
        return found

    def _symbol(self, name: str) -> Array:
        if name in self.kernel.shared:
            return self.window(self.everyone)
        for p in self.kernel.parameters:
            if p.name == name:
                return np.array(PARAMETERS_AT + p.offset, np.uint64)
        raise Fault(f"what is {name}?")

    def address(self, operand: Operand, threads: Array) -> Array:
        """Of [base + offset], as 64 bits, for each of the threads."""
        assert isinstance(operand, Address), operand
        base = self.read(operand.base, threads, "u64")
        return np.broadcast_to(base + np.uint64(operand.offset & (1 << 64) - 1), threads.shape)

    # --- threads, warps, blocks, by their number in this run ---

    def blocks(self, threads: Array) -> Array:
        return threads // self.threads

    def block_of(self, address: int) -> int:
        """Whose shared memory an address is in."""
        return (address >> WINDOW) - 1

    def window(self, threads: Array) -> Array:
        """The address at which the shared memory of a thread's block begins."""
        return (self.blocks(threads).astype(np.uint64) + np.uint64(1)) << np.uint64(WINDOW)

    def warps(self, threads: Array) -> Array:
        """Sorted, each once."""
        return self.all_warps if threads is self.everyone else np.unique(threads // WARP)

    def whole(self, threads: Array) -> Array:
        """The same for an instruction that all threads of a warp take together."""
        found = self.warps(threads)
        if len(found) * WARP != len(threads):
            raise Fault("only some threads of a warp take part")
        return found

    def elsewhere(self, addresses: Array, threads: Array, rank: Array) -> Array:
        """The addresses, in the shared memory of the block of that rank in the threads' cluster."""
        own = self.specials["%cluster_ctarank"][threads].astype(np.int64)
        return (addresses.astype(np.int64) + (rank.astype(np.int64) - own << WINDOW)).astype(addresses.dtype)

    def check_shared(
        self, addresses: Array, threads: Array, nbytes: int, align: int | None = None, *, anywhere: bool = False
    ) -> None:
        """Fault where bytes are not all in the shared memory of the thread's own block, or begin where they must not. `anywhere`:
        of some block of its cluster."""
        start = self.window(threads)
        if anywhere:
            rank = (addresses >> np.uint64(WINDOW)).astype(np.int64) - 1 - self.blocks(threads) // self.cluster * self.cluster
            if ((rank < 0) | (rank >= self.cluster)).any():
                raise Fault("an address is in no block of the cluster")
            start = self.elsewhere(start, threads, rank)
        outside = (addresses < start) | (addresses + np.uint64(nbytes) > start + np.uint64(self.shared_bytes))
        if outside.any():
            at = int(addresses[outside][0]) - int(start[outside][0])
            raise Fault(f"{nbytes} bytes at {at} of {self.shared_bytes} of shared memory")
        aligned(addresses, align or nbytes)

    # --- running ---

    def run(self) -> None:
        """Until all warps have ended."""
        self.release(self.all_warps, np.zeros(len(self.all_warps), np.int64))
        with np.errstate(all="ignore"):
            while self.groups:
                ready = [g for g in self.groups if g.tried != self.done]
                if not ready:
                    if not any(work(self) for work in IDLE):
                        break
                    self.done += 1
                    continue
                # Often the lowest: then those behind catch up, and all go on in one call.
                favoured = (max if self.apart else min)(ready, key=lambda g: g.pc)
                group = favoured if self.rng.random() < 0.5 else ready[self.rng.integers(len(ready))]
                self.groups = [g for g in self.groups if g is not group]
                self._go(group)
        self._check_all_ended()
        for check in AT_END:
            check(self)

    def _check_all_ended(self) -> None:
        stuck = [(self.kernel.instructions[g.pc], g.warps) for g in self.groups]
        stuck += [(self.kernel.instructions[self.resume[w] - 1], np.array([w])) for w in np.flatnonzero(self.waiting >= 0)]
        if stuck:
            lines = [f"warps {warps % self.block_warps} at {i.number}: {i.text}" for i, warps in stuck[:8]]
            raise Deadlock("\n".join([f"{self.kernel.name}: nobody can go on", *lines]))

    def _go(self, group: Group) -> None:
        """Until these warps part, wait or end, or meet others."""
        pc, warps = group.pc, group.warps
        threads = self.threads_of(warps)
        while True:
            if pc in self.labels and (met := [g for g in self.groups if g.pc == pc]):
                self._put(pc, np.union1d(warps, np.concatenate([g.warps for g in met])), replacing=met)
                return
            i, handler = self.kernel.instructions[pc], self.program[pc]
            try:
                active = self.active(i, threads)
                if handler is None:
                    moved = MOVES[_move(i.opcode)](self, i, active, warps)
                    self.done += 1
                    if len(moved) == 1 and moved[0][1] is warps:
                        pc = moved[0][0]
                        continue
                    for at, sample_indices in moved:
                        self._put(at, sample_indices)
                    return
                stuck = handler(self, i, active) if len(active) else None
            except AssertionError as error:
                where = f"{self.kernel.name}, instruction {i.number} ({i.text[:100]})"
                kind = type(error) if isinstance(error, Fault) else Fault
                raise kind(f"{where}: {error}") from error
            if self.counts is not None:
                self.counts.instructions[i.opcode] += len(self.warps(active))
            if stuck is not None and len(stuck):
                on = np.setdiff1d(warps, stuck)
                self.done += bool(len(on))
                met = [g for g in self.groups if g.pc == pc]  # warps of a warpgroup wait for each other
                others = np.concatenate([stuck[:0], *(g.warps for g in met)])
                self._put(pc, np.union1d(stuck, others), tried=-1 if met else self.done, replacing=met)
                self._put(pc + 1, on)
                return
            self.done += 1
            if self.done > MOST:
                raise Deadlock(f"{self.kernel.name} goes on for more than {MOST} instructions")
            pc += 1

    def active(self, i: Instruction, threads: Array) -> Array:
        """Those that the instruction's guard lets take part."""
        if i.guard is None:
            return threads
        register, negated = i.guard
        on = self.read(register, threads, "pred") != negated
        return threads if on.all() else threads[on]

    def threads_of(self, warps: Array) -> Array:
        if len(warps) == len(self.all_warps):
            return self.everyone
        return (warps[:, None] * WARP + np.arange(WARP)).reshape(-1)

    def _put(self, pc: int, warps: Array, *, tried: int = -1, replacing: list[Group] | None = None) -> None:
        if replacing:
            self.groups = [g for g in self.groups if not any(g is r for r in replacing)]
        if len(warps):
            self.groups.append(Group(int(pc), warps, tried))

    def release(self, warps: Array, pcs: Array) -> None:
        """These go on, in two halves of each block, in a drawn order."""
        early = self.rng.random(len(warps)) < 0.5
        part = early + 2 * (warps // self.block_warps) if self.apart else early
        for number in np.unique(part)[::-1]:
            for pc in np.unique(pcs[part == number]):
                self._put(pc, warps[(part == number) & (pcs == pc)])


@cache
def _move(opcode: str) -> str:
    return next(name for name in MOVES if opcode == name or opcode.startswith(f"{name}."))


def _storage(type_: str) -> np.dtype:
    return TYPES[type_] if type_ == "pred" else np.dtype(f"u{TYPES[type_].itemsize}")


def _as(values: Array, dtype: np.dtype) -> Array:
    if values.dtype == dtype:
        return values
    if values.dtype.itemsize == dtype.itemsize and BOOL not in (values.dtype, dtype):
        return values.view(dtype)
    assert values.dtype.kind == "u" and dtype != BOOL, (values.dtype, dtype)
    return values.astype(f"u{dtype.itemsize}").view(dtype)


@cache
def _immediate(number: Number, dtype: np.dtype) -> Array:
    if dtype == BOOL:
        return np.array(number.bits != 0)
    return np.array(number.bits & (1 << 8 * dtype.itemsize) - 1, f"u{dtype.itemsize}").view(dtype)


def aligned(addresses: Array, nbytes: int) -> None:
    if (wrong := addresses & np.uint64(nbytes - 1)).any():
        raise Fault(f"an address is {int(wrong[wrong != 0][0])} bytes off a multiple of {nbytes}")
