"""The memory plan: an address for every tensor of several programs in one arena.

The arena is a persistent segment (parameters, gradients, optimizer state, caches), then one workspace as large as the
largest program needs. Within a program, tensors that are never alive together share bytes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from barellm.errors import UserError
from barellm.program.graph import Store
from barellm.program.ops.base import Op
from barellm.program.tensor import PERSISTENT, Tensor

ALIGN = 64  # bytes: a cache line, and the widest vector
MOST_BYTES = 1 << 60  # of all tensors together: sums of their sizes stay within 64-bit integers
GOOD_ENOUGH = 1.001  # workspace over its lower bound: no further order is tried

Lifetimes = dict[Tensor, tuple[int, int]]  # first and last op, both included


@dataclass(frozen=True)
class Placement:
    """The place of a tensor in the arena, which is one line of the memory map. It is alive from op `first` to op `last` of
    `program`; if these are None, it is alive always."""

    offset: int
    nbytes: int
    name: str
    role: str
    program: str | None = None
    first: int | None = None
    last: int | None = None


@dataclass(frozen=True)
class Plan:
    """The byte offsets of all tensors in the arena. The workspace starts at `persistent_bytes`.

    `live_peak_bytes` is the size of the persistent part plus the most bytes alive at one op of any program: the minimum."""

    offsets: dict[Tensor, int]
    lifetimes: dict[str, Lifetimes]
    persistent_bytes: int
    workspace_bytes: int
    live_peak_bytes: int
    peaks: dict[str, tuple[int, int]]  # program -> most bytes alive, at which op

    @property
    def arena_bytes(self) -> int:
        return self.persistent_bytes + self.workspace_bytes

    @property
    def persistent(self) -> list[Tensor]:
        return [t for t in self.offsets if t.role in PERSISTENT]

    def by_role(self) -> dict[str, int]:
        """Bytes by tensor role: all persistent ones, and those alive at the peak of the largest program."""
        roles: dict[str, int] = {}
        tensors = self.persistent
        if self.peaks:
            name = max(self.peaks, key=lambda program: self.peaks[program][0])
            at = self.peaks[name][1]
            tensors += [t for t, (first, last) in self.lifetimes[name].items() if first <= at <= last]
        for t in tensors:
            roles[t.role] = roles.get(t.role, 0) + t.nbytes
        return roles

    def placements(self) -> list[Placement]:
        rows = [Placement(self.offsets[t], t.nbytes, t.name, t.role) for t in self.persistent]
        for program, lives in self.lifetimes.items():
            rows += [Placement(self.offsets[t], t.nbytes, t.name, t.role, program, *span) for t, span in lives.items()]
        return sorted(rows, key=lambda r: (r.offset, r.program or "", r.first or 0))


def lifetimes(ops: Sequence[Op], scratch: Callable[[Op], list[Tensor]] | None = None) -> Lifetimes:
    """(first, last) op at which each workspace tensor lives. Inputs live throughout, outputs from their first writer to the end."""
    lives: Lifetimes = {}
    end = len(ops) - 1
    for i, op in enumerate(ops):
        tensors = [t.base for t in (*op.inputs.values(), *op.outputs.values())]
        for t in (*tensors, *(scratch(op) if scratch else ())):
            if t.role in PERSISTENT:
                continue
            first, last = lives.get(t, (0 if t.role == "input" else i, i))
            lives[t] = (first, end if t.role in ("input", "output") else max(last, i))
    return lives


def plan(
    programs: Mapping[str, Sequence[Op]], store: Store, *, scratch: Callable[[Op], list[Tensor]] | None = None,
    guard: int = 0,
) -> Plan:  # fmt: skip
    """Places the tensors of each program's final (fused) ops. `scratch(op)` names what a kernel needs during its op;
    `guard` bytes, a multiple of 64, stay free after every tensor."""
    return place({name: lifetimes(ops, scratch) for name, ops in programs.items()}, store, guard)


def place(lives: dict[str, Lifetimes], store: Store, guard: int = 0) -> Plan:
    """Plan addresses for given lifetimes: persistent tensors by role, then one workspace at a common address for all programs, as
    only one runs at a time. `guard` bytes stay free after every tensor (overrun detection). `lives`: program -> tensor -> (first,
    last op that uses it); the peaks count tensors without padding and guards, the workspace with them."""
    offsets: dict[Tensor, int] = {}
    base = 0
    for role in PERSISTENT:
        for t in store.of_role(role):
            offsets[t] = base
            base += _aligned(t.nbytes) + guard
    persistent = sum(t.nbytes for t in offsets)
    _check_addressable([*offsets, *(t for spans in lives.values() for t in spans)])
    workspace = 0
    peaks = {}
    for program, spans in lives.items():
        peaks[program] = _peak(spans, [t.nbytes for t in spans])
        at, size = _pack(spans, guard)
        offsets |= {t: base + offset for t, offset in at.items()}
        workspace = max(workspace, size)
    live_peak = persistent + max((nbytes for nbytes, _ in peaks.values()), default=0)
    return Plan(offsets, lives, base, workspace, live_peak, peaks)


def overlaps(plan: Plan, lives: dict[str, Lifetimes] | None = None) -> Iterator[str]:
    """Verify a plan: yields a line for every pair of tensors that share bytes while both are alive by `lives` (default: the
    plan's), and for every tensor outside its segment. Nothing if the plan is sound."""
    for t in plan.persistent:
        if plan.offsets[t] % ALIGN or plan.offsets[t] + t.nbytes > plan.persistent_bytes:
            yield f"{t.name} lies outside the persistent segment"
    whole = dict.fromkeys(plan.persistent, (0, 0))
    for program, spans in {"": whole, **(plan.lifetimes if lives is None else lives)}.items():
        ts = sorted((t for t in spans if t.nbytes), key=lambda t: plan.offsets[t])
        start = np.array([plan.offsets[t] for t in ts], dtype=np.int64)
        end = start + np.array([t.nbytes for t in ts], dtype=np.int64)
        first, last = np.array([spans[t] for t in ts], dtype=np.int64).reshape(-1, 2).T
        for i, t in enumerate(ts):
            if program and (start[i] % ALIGN or start[i] < plan.persistent_bytes or end[i] > plan.arena_bytes):
                yield f"{program}: {t.name} lies outside the workspace"
            stop = np.searchsorted(start, end[i])
            together = (first[i + 1 : stop] <= last[i]) & (last[i + 1 : stop] >= first[i])
            for j in np.flatnonzero(together) + i + 1:
                yield f"{program or 'persistent'}: {t.name} and {ts[j].name} share bytes while both are alive"


def _check_addressable(tensors: Sequence[Tensor]) -> None:
    """UserError for sizes whose sums would overflow the 64-bit integers that addresses are."""
    largest = max(tensors, key=lambda t: t.nbytes, default=None)
    if largest is not None and sum(t.nbytes for t in tensors) > MOST_BYTES:
        shape = " x ".join(str(int(n)) for n in largest.shape)
        needed = f"{largest.name} ({shape}) alone needs {largest.nbytes / 2**20:.1f} MiB"
        raise UserError(f"{needed}: no machine can address such a program, choose smaller sizes")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _peak(spans: Lifetimes, sizes: list[int]) -> tuple[int, int]:
    """The most bytes alive at one op, and that op."""
    if not spans:
        return 0, 0
    change = np.zeros(max(last for _, last in spans.values()) + 2, dtype=np.int64)
    for (first, last), nbytes in zip(spans.values(), sizes, strict=True):
        change[first] += nbytes
        change[last + 1] -= nbytes
    alive = np.cumsum(change)
    at = int(alive.argmax())
    return int(alive[at]), at


def _pack(spans: Lifetimes, guard: int = 0) -> tuple[dict[Tensor, int], int]:
    """(offset of each tensor, total size) by first fit, in several orders until one is within GOOD_ENOUGH of the bound."""
    tensors = list(spans)
    size = np.array([_aligned(t.nbytes) + guard for t in tensors], dtype=np.int64)
    first, last = np.array([spans[t] for t in tensors], dtype=np.int64).reshape(-1, 2).T
    bound = _peak(spans, list(size))[0]
    orders = (
        np.lexsort((first, -size)),  # large ones first
        np.lexsort((first, -size, first - last)),  # long lives first
        np.lexsort((first, size * (first - last - 1))),  # large areas of bytes x ops first
        np.lexsort((-size, first)),  # in the order of the program
    )
    best: tuple[int, np.ndarray] | None = None
    for order in orders:
        offset = _first_fit(order, size, first, last)
        total = int((offset + size).max(initial=0))
        if best is None or total < best[0]:
            best = total, offset
        if best[0] <= GOOD_ENOUGH * bound:
            break
    assert best is not None
    return {t: int(offset) for t, offset in zip(tensors, best[1], strict=True)}, best[0]


def _first_fit(order: np.ndarray, size: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """First-fit packing: in order, each tensor goes to the lowest gap between placed tensors whose lifetimes overlap its own."""
    offset = np.zeros(len(size), dtype=np.int64)
    placed = np.empty((4, len(size)), dtype=np.int64)  # columns sorted by offset: offset, end, first, last
    for n, i in enumerate(order):
        row = placed[:, :n]
        alive = row[:, (row[2] <= last[i]) & (row[3] >= first[i])]
        # covered[j]: the end of all that lies before the j-th living tensor; between both is a gap, if that is larger.
        covered = np.maximum.accumulate(np.concatenate(([0], alive[1])))
        fits = alive[0] - covered[:-1] >= size[i]
        offset[i] = covered[fits.argmax()] if fits.any() else covered[-1]
        at = np.searchsorted(row[0], offset[i])
        placed[:, at + 1 : n + 1] = placed[:, at:n].copy()
        placed[:, at] = offset[i], offset[i] + size[i], first[i], last[i]
    return offset
