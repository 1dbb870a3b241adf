"""A kernel instance (specialisation), and the builder through which a kernel's function emits it."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from barellm.cpu import sources
from barellm.cpu.isa import ISA
from barellm.cpu.lang import Builder, Pointer, Value
from barellm.program import scalars

# The per-thread block that every kernel gets as its first argument.
RT_THREAD, RT_THREADS, RT_SCALARS, RT_PRIVATE, RT_GROUP, RT_GROUPS = 0, 8, 16, 24, 32, 40
RT_NBYTES = 64

Emit = Callable[..., None]


@dataclass(frozen=True)
class Specialisation:
    """A kernel instance: its function, the kind of each positional parameter ("fp32", "int", None, ...), and the constants."""

    emit: Emit
    operands: tuple[str | None, ...]
    constants: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        return self.emit.__name__

    @property
    def key(self) -> str:
        own = f"{self.emit.__module__}.{self.name}|{sources.of_kernel(self.emit)}|{self.operands}|{self.constants}"
        return own + scalars.layout(self.constants)

    def symbol(self) -> str:
        return f"{self.name}_{hashlib.sha256(self.key.encode()).hexdigest()[:12]}"

    def ir(self, isa: ISA) -> str:
        """LLVM IR of the instance: loads each operand from the argument array, then emits the kernel."""
        k = KernelBuilder(isa)
        pointers: list[Pointer | Value | None] = []
        slot = 0
        for kind in self.operands:
            if kind is None:
                pointers.append(None)
                continue
            slot_address = k.op("ptr", f"getelementptr i8, ptr %args, i64 {8 * slot}")
            slot += 1
            if kind == "int":
                pointers.append(k.op("i64", f"load i64, ptr {slot_address.ref}, align 8"))
            else:
                pointers.append(Pointer(k, k.op("ptr", f"load ptr, ptr {slot_address.ref}, align 8").ref, kind))
        self.emit(k, *pointers, **dict(self.constants))
        return k.function(self.symbol(), "ptr %rt, ptr noalias %args, ptr %counter")


class KernelBuilder(Builder):
    """The kernel language: IR builder plus thread index, run-time scalars, thread scratch and parallel loops."""

    def _rt(self, offset: int, type_: str) -> Value:
        p = self.op("ptr", f"getelementptr i8, ptr %rt, i64 {offset}")
        return self.op(type_, f"load {type_}, ptr {p.ref}, align 8")

    @property
    def thread(self) -> Value:
        return self._rt(RT_THREAD, "i64")

    @property
    def threads(self) -> Value:
        return self._rt(RT_THREADS, "i64")

    def thread_scratch(self, dtype: str = "fp32") -> Pointer:
        """This thread's scratch, 64-byte aligned; the lowering reserves it (`Lowering.thread_scratch`)."""
        return Pointer(self, self._rt(RT_PRIVATE, "ptr").ref, dtype)

    def scalar(self, name: str) -> Value:
        """A run-time scalar: i64, or double where it is a float."""
        block = self._rt(RT_SCALARS, "ptr")
        p = self.op("ptr", f"getelementptr i8, ptr {block.ref}, i64 {scalars.SCALARS[name].offset}")
        type_ = {"i64": "i64", "fp64": "double"}[scalars.SCALARS[name].kind]
        return self.op(type_, f"load {type_}, ptr {p.ref}, align 8")

    def size(self, n: str | int) -> Value:
        """A size that is a number, or the name of a run-time scalar."""
        return self.scalar(n) if isinstance(n, str) else self.int(n)

    def num_elements(self, dims: tuple[str, ...], inner: int = 1) -> Value:
        """`inner` times the product of run-time sizes: `k.num_elements(("batch", "seq"))` is the number of tokens."""
        n = self.int(inner)
        for d in dims:
            n = n * self.scalar(d)
        return n

    @contextmanager
    def parallel_range(self, total: Any, grain: Any = 1) -> Iterator[tuple[Value, Value]]:
        """A parallel loop with dynamic schedule over ranges [begin, end) of `total` items, `grain` at a time. Each group of threads
        (`sync.GROUPS` at most) takes items of its own contiguous part from an atomic counter, so it reads the rows that it wrote in
        the op before; then it helps the next group (work stealing), so a disturbed core costs its own share. One loop a kernel."""
        total, grain = self.int(total), self.int(grain)
        units, groups = (total + (grain - 1)) // grain, self._rt(RT_GROUPS, "i64")
        group, helped = self.var(self._rt(RT_GROUP, "i64")), self.var(self.int(0))
        with self.while_(lambda: helped.value < groups):
            counter = self.op("ptr", f"getelementptr i32, ptr %counter, i64 {group.value.ref}")
            first = units * group.value // groups  # the group's part of the units is [first, last)
            last = units * (group.value + 1) // groups
            unit = first

            def take_unit() -> Value:
                nonlocal unit
                taken = self.op("i32", f"atomicrmw add ptr {counter.ref}, i32 1 monotonic, align 4")
                unit = first + self.op("i64", f"zext i32 {taken.ref} to i64")
                return unit < last

            with self.while_(take_unit, "items"):
                begin = unit * grain
                yield begin, self.min(begin + grain, total)
            helped.value = helped.value + 1
            next_group = group.value + 1
            group.value = self.select(next_group < groups, next_group, 0)

    @contextmanager
    def parallel_for(self, total: Any) -> Iterator[Value]:
        """The same with one item at a time."""
        with self.parallel_range(total, 1) as (begin, _):
            yield begin

    def columns(self, n: int) -> list[tuple[int, Value | None]]:
        """(first column, mask or None) of the vectors of `n` columns; the last is masked if `lanes` does not divide n."""
        full: list[tuple[int, Value | None]] = [(c, None) for c in range(0, n - n % self.lanes, self.lanes)]
        return full + ([(n - n % self.lanes, self.mask_first(n % self.lanes))] if n % self.lanes else [])

    def keep(self, mode: str) -> Value | None:
        """The condition (i1) under which an output in `mode` is added to instead of stored; None if it always is stored."""
        if mode == "store":
            return None
        return self.const(1, "i1") if mode == "add" else self.scalar("accumulate").differs(0)
