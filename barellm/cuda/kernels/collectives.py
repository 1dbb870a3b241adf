"""Collectives between GPUs. Tensors travel by NCCL (`cuda.nccl`); received gradients are added here, in rank order."""

from collections.abc import Callable
from math import gcd
from typing import Any

from barellm.cuda.kernel import CollectiveCall, CollectiveSpec, Lowering, lowering
from barellm.cuda.kernels.common import BLOCK, unit_of
from barellm.cuda.kernels.optim.multi_tensor import aligned_pointer, column, find_entry, integer, launch_multi_tensor
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
    """The additions of a reduce-scatter: y (n) = the sum of the gradients of COUNT ranks, fp32, in rank order, so that every rank
    has the same bits: `own` (n) is that of RANK, others (COUNT - 1, n) are those that NCCL received."""
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
        total = tl.load(others + i, mask=mask, other=0.0)  # rank 0's
    for rank in tl.static_range(1, COUNT):
        if rank == RANK:
            total = total + mine
        else:
            row = rank - 1 if rank > RANK else rank  # of others, which lacks the own one
            total = total + tl.load(others + n * row + i, mask=mask, other=0.0)
    tl.store(y + i, total, mask=mask)


def sum_unit(op: Any) -> int:
    """The largest number of elements, up to a vector, that divides the operands' lengths and first elements."""
    return gcd(unit_of(op.own), op.own.first_element, op.y.first_element)


@lowering("sum_over_ranks", floats="fp32", spans="own y")
def lower_sum_over_ranks(op: Any, c: Lowering) -> None:
    """Plan one launch of sum_over_ranks for a group of shards."""
    sums: list[Any] = members(op)
    unit = sum_unit(sums[0])
    columns = {"units": ("i64", [s.own.size // unit for s in sums])}
    columns |= {name: column(getattr(s, name) for s in sums) for name in FIELDS[2:]}
    constants = {"UNIT": unit, "RANK": op.rank, "COUNT": sums[0].others.shape[0] + 1, "BLOCK": BLOCK}
    launch_multi_tensor(c, sum_over_ranks, FIELDS, (ceil_div(s.own.size, BLOCK) for s in sums), columns, constants, writes="y")


def _append_collective(op: Any, c: Lowering, regions: Callable[[Tensor], list[Region]], *, overlapped: bool = False) -> None:
    """Append the collective of an op; regions(t): the bytes of operand t that are sent or received."""
    named = {name: regions(t) for name, t in (op.inputs | op.outputs).items()}
    c.launches.append(CollectiveCall(CollectiveSpec(op.name), op, named, overlapped))


@lowering("all_to_all", "start_all_to_all", floats="fp32", spans="*")
def lower_all_to_all(op: Any, c: Lowering) -> None:
    _append_collective(op, c, lambda t: [part(t)], overlapped=op.name == "start_all_to_all")


@lowering("wait_all_to_all", floats="fp32")
def lower_wait_all_to_all(op: Any, c: Lowering) -> None:
    """Launch nothing: the program that started the collective has waited for it."""


@lowering("all_gather", floats=f"fp32 {PLANES}", spans="*")
def lower_gather(op: Any, c: Lowering) -> None:
    _append_collective(op, c, lambda t: [plane(t, number)[0] for number in op.planes(t)] or [part(t)])
