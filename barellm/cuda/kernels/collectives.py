"""What ranks on GPUs do together. Tensors travel by NCCL (`cuda.nccl`); what has arrived is added here, in the ranks' order."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

from barellm.cuda.kernel import CollectiveCall, CollectiveSpec, Lowering, Table, lowering
from barellm.cuda.kernels.common import BLOCK, unit_of
from barellm.cuda.kernels.optim.multi_tensor import (
    aligned_pointer,
    column,
    entry_constants,
    find_entry,
    first_programs,
    integer,
)
from barellm.cuda.lang import constant, device, tl
from barellm.program.dtypes import PLANES
from barellm.program.grouping import members
from barellm.program.integers import ceil_div
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import Region, part, plane

FIELDS = ("first", "units", "y", "own", "others")
UNITS, Y, OWN, OTHERS = (constant(FIELDS.index(name)) for name in FIELDS[1:])


@device
def add_ranks(
    table, ENTRIES: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr, RANK: tl.constexpr, COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """y (n) = the gradients of COUNT ranks, in their order; `own` (n) is that of RANK, and others (COUNT - 1, n) the rest."""
    entry, turn = find_entry(table, ENTRIES, WIDE)
    n = integer(table, entry, UNITS, ENTRIES) * UNIT
    y = aligned_pointer(table, entry, Y, ENTRIES, tl.float32, UNIT)
    own = aligned_pointer(table, entry, OWN, ENTRIES, tl.float32, UNIT)
    others = aligned_pointer(table, entry, OTHERS, ENTRIES, tl.float32, UNIT)
    i = turn * BLOCK + tl.arange(0, BLOCK)
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
    """Elements of which the places and the lengths of an `AddRanks` are multiples: a span may begin anywhere."""
    return gcd(unit_of(op.own), op.own.first_element, op.y.first_element)


@lowering("add_ranks", floats="fp32", spans="own y")
def lower_add_ranks(op: Any, c: Lowering) -> None:
    sums: list[Any] = members(op)
    unit = sum_unit(sums[0])
    firsts, programs = first_programs(ceil_div(s.own.size, BLOCK) for s in sums)
    columns = {
        "first": ("i64", firsts),
        "units": ("i64", [s.own.size // unit for s in sums]),
        **{name: column(getattr(s, name) for s in sums) for name in FIELDS[2:]},
    }
    table = Table({name: columns[name] for name in FIELDS}, writes=("y",))
    constants = {**entry_constants(len(sums)), "UNIT": unit, "RANK": op.rank, "COUNT": sums[0].others.shape[0] + 1}
    constants["BLOCK"] = BLOCK
    c.launch(add_ranks, {"table": table}, constants, grid=lambda s: (programs,), writes="")


def _travel(op: Any, c: Lowering, regions: Callable[[Tensor], list[Region]], *, beside: bool = False) -> None:
    named = {name: regions(t) for name, t in (op.inputs | op.outputs).items()}
    c.launches.append(CollectiveCall(CollectiveSpec(op.name), op, named, beside))


@lowering("exchange", floats="fp32", spans="*")
def lower_exchange(op: Any, c: Lowering) -> None:
    _travel(op, c, lambda t: [part(t)])


@lowering("begin_exchange", floats="fp32", spans="*")
def lower_begin_exchange(op: Any, c: Lowering) -> None:
    _travel(op, c, lambda t: [part(t)], beside=True)


@lowering("end_exchange", floats="fp32")
def lower_end_exchange(op: Any, c: Lowering) -> None:
    """Nothing: the program in which it began has waited for it."""


@lowering("gather", floats=f"fp32 {PLANES}", spans="*")
def lower_gather(op: Any, c: Lowering) -> None:
    _travel(op, c, lambda t: [plane(t, number)[0] for number in op.planes(t)] or [part(t)])
