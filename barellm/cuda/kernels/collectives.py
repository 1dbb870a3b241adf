"""Collectives between GPUs. Tensors travel by NCCL (`cuda.nccl`); received gradients are added here, in rank order."""

from collections.abc import Callable
from math import gcd
from typing import Any

from barellm.cuda.kernel import CollectiveCall, CollectiveSpec, Lowering, Table, lowering
from barellm.cuda.kernels.common import BLOCK, unit_of
from barellm.cuda.kernels.optim.multi_tensor import aligned_pointer, column, entry_constants, find_entry, first_programs, integer
from barellm.cuda.lang import constant, device, tl
from barellm.program.dtypes import PLANES
from barellm.program.grouping import members
from barellm.program.integers import ceil_div
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import Region, part, plane

FIELDS = ("first", "units", "y", "own", "others")
UNITS, Y, OWN, OTHERS = (constant(FIELDS.index(name)) for name in FIELDS[1:])


@device
def sum_over_ranks(table, ENTRIES, WIDE, UNIT, RANK, COUNT, BLOCK):
    """y (n) = the sum of the gradients of COUNT ranks, in rank order: `own` (n) is that of RANK, others (COUNT - 1, n) are the
    received ones. A program does BLOCK elements of one entry of the table."""
    entry, block = find_entry(table, ENTRIES, WIDE)
    n = integer(table, entry, UNITS, ENTRIES) * UNIT
    y = aligned_pointer(table, entry, Y, ENTRIES, tl.float32, UNIT)
    own = aligned_pointer(table, entry, OWN, ENTRIES, tl.float32, UNIT)
    others = aligned_pointer(table, entry, OTHERS, ENTRIES, tl.float32, UNIT)
    i = block * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    mine = tl.load(own + i, mask=mask, other=0.0)
    if RANK == 0:
        total = mine
    else:
        total = tl.load(others + i, mask=mask, other=0.0)
    for rank in tl.static_range(1, COUNT):
        if rank == RANK:
            total = total + mine
        else:
            row = rank - 1 if rank > RANK else rank
            total = total + tl.load(others + n * row + i, mask=mask, other=0.0)
    tl.store(y + i, total, mask=mask)


def sum_unit(op: Any) -> int:
    """The largest number of elements, up to a vector, that divides the operands' lengths and first elements: shards begin
    anywhere."""
    return gcd(unit_of(op.own), op.own.first_element, op.y.first_element)


@lowering("sum_over_ranks", floats="fp32", spans="own y")
def lower_sum_over_ranks(op: Any, c: Lowering) -> None:
    """Launch sum_over_ranks once for a group of shards."""
    sums: list[Any] = members(op)
    unit = sum_unit(sums[0])
    firsts, programs = first_programs(ceil_div(s.own.size, BLOCK) for s in sums)
    columns = {"first": ("i64", firsts), "units": ("i64", [s.own.size // unit for s in sums])}
    columns |= {name: column(getattr(s, name) for s in sums) for name in FIELDS[2:]}
    table = Table({name: columns[name] for name in FIELDS}, writes=("y",))
    constants = {**entry_constants(len(sums)), "UNIT": unit, "RANK": op.rank, "COUNT": sums[0].others.shape[0] + 1}
    constants["BLOCK"] = BLOCK
    c.launch(sum_over_ranks, {"table": table}, constants, grid=lambda s: (programs,), writes="")


def _append_collective(op: Any, c: Lowering, regions: Callable[[Tensor], list[Region]], *, overlapped: bool = False) -> None:
    """Append the collective of an op; regions(t): the bytes of operand t that are sent or received."""
    named = {name: regions(t) for name, t in (op.inputs | op.outputs).items()}
    c.launches.append(CollectiveCall(CollectiveSpec(op.name), op, named, overlapped))


@lowering("all_to_all", floats="fp32", spans="*")
def lower_exchange(op: Any, c: Lowering) -> None:
    _append_collective(op, c, lambda t: [part(t)])


@lowering("start_all_to_all", floats="fp32", spans="*")
def lower_start_all_to_all(op: Any, c: Lowering) -> None:
    _append_collective(op, c, lambda t: [part(t)], overlapped=True)


@lowering("wait_all_to_all", floats="fp32")
def lower_wait_all_to_all(op: Any, c: Lowering) -> None:
    """Launch nothing: the program that started the collective has waited for it."""


@lowering("all_gather", floats=f"fp32 {PLANES}", spans="*")
def lower_gather(op: Any, c: Lowering) -> None:
    _append_collective(op, c, lambda t: [plane(t, number)[0] for number in op.planes(t)] or [part(t)])
