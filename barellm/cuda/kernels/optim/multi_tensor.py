"""Multi-tensor launches (as PyTorch's multi-tensor apply): the operands of many tensors for one launch, in a table of 8-byte
numbers with a column (field) for each operand and a row (entry) for each tensor. Column 0 is the first program (index in grid axis
0) of each entry, so a program finds its entry by counting those that begin before it.

Kernels take `table`; their compile-time ENTRIES is the number of entries and FIELD the index of a column."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

from barellm.cuda.kernel import POINTER, Lowering, Table
from barellm.cuda.kernels.common import pow2
from barellm.cuda.lang import DeviceFunction, device, tl
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import Region, part, share


@device
def find_entry(table, ENTRIES, WIDE):
    """(entry, index of this program among the programs of that entry), i64. WIDE: ENTRIES padded to a power of two."""
    j = tl.arange(0, WIDE)
    first = tl.load(table + j, mask=j < ENTRIES, other=0x7FFFFFFF)  # column 0; behind the last entry: never reached
    program = tl.program_id(0).to(tl.int64)
    entry = tl.sum((first <= program).to(tl.int32), 0) - 1  # the entries that begin at or before this program, less one
    return entry, program - tl.load(table + entry)


@device
def integer(table, entry, FIELD, ENTRIES):
    """Load an entry's field as i64."""
    return tl.load(table + FIELD * ENTRIES + entry)


@device
def number(table, entry, FIELD, ENTRIES):
    """Load an entry's field as fp64."""
    return integer(table, entry, FIELD, ENTRIES).to(tl.float64, bitcast=True)


@device
def pointer(table, entry, FIELD, ENTRIES, TYPE, ALIGN):
    """Load an entry's field as a pointer to elements of TYPE. ALIGN: its alignment in bytes, which a table does not show."""
    return tl.multiple_of(integer(table, entry, FIELD, ENTRIES).to(tl.pointer_type(TYPE)), ALIGN)


@device
def aligned_pointer(table, entry, FIELD, ENTRIES, TYPE, UNIT):
    """As `pointer`, aligned to UNIT elements (16 bytes at most): so are a bank's matrices of a multiple of UNIT."""
    BYTES: tl.constexpr = UNIT * TYPE.primitive_bitwidth // 8
    ALIGN: tl.constexpr = 16 if BYTES % 16 == 0 else 8 if BYTES % 8 == 0 else 4 if BYTES % 4 == 0 else 2
    return pointer(table, entry, FIELD, ENTRIES, TYPE, ALIGN)


@device
def matrix_pointer(table, entry, FIELD, ENTRIES, UNIT, HALF, FP16):
    """Load a field as a pointer to a matrix of the dtype that HALF and FP16 say (`matrix_constants`), aligned to UNIT elements."""
    TYPE: tl.constexpr = tl.float16 if FP16 else tl.bfloat16 if HALF else tl.float32
    return aligned_pointer(table, entry, FIELD, ENTRIES, TYPE, UNIT)


def matrix_constants(dtype: str) -> dict[str, Any]:
    """The constants of a matrix's dtype: HALF = its elements have 16 bits; FP16 = they are fp16, else None."""
    return {"HALF": dtype != "fp32", "FP16": dtype == "fp16" or None}


def first_programs(counts: Iterable[int]) -> tuple[list[int], int]:
    """(first program of each entry, number of all programs), given the number of programs of each entry."""
    *firsts, programs = accumulate(counts, initial=0)
    return firsts, programs


def entry_constants(entries: int) -> dict[str, int]:
    """The constants of `find_entry`."""
    return {"ENTRIES": entries, "WIDE": pow2(entries)}


def launch_multi_tensor(
    c: Lowering, function: DeviceFunction, fields: Sequence[str], programs_of: Iterable[int], columns: dict[str, Any],
    constants: dict[str, Any], *, writes: str, operands: dict[str, Any] | None = None, warps: int = 4, blocks: int = 1,
) -> None:  # fmt: skip
    """Plan one launch of `function` over the entries of a table with these `fields`: "first" and the given `columns`, of which
    `writes` names those that are written. programs_of: how many programs each entry has, axis 0 of the grid; `blocks`: axis 1;
    `operands`, `constants`: those besides the table, ENTRIES and WIDE."""
    firsts, programs = first_programs(programs_of)
    columns = {"first": ("i64", firsts), **columns}
    table = Table({name: columns[name] for name in fields}, writes=tuple(writes.split()))
    constants = {**entry_constants(len(firsts)), **constants}
    c.launch(function, {"table": table, **(operands or {})}, constants, grid=lambda s: (programs, blocks), writes="", warps=warps)


def of_matrices(group: Sequence[Any], operands: Iterable[Any]) -> tuple[str, list[Region]]:
    """A column of addresses: for each op of `group`, its operand's matrices (a bank's shares of equal size), an entry each."""
    pairs = zip(group, operands, strict=True)
    return column(share(operand, i, op.matrices) for op, operand in pairs for i in range(op.matrices))


def repeated(group: Sequence[Any], value: Callable[[Any], Any]) -> list[Any]:
    """A column of numbers: value(op), repeated for each matrix of the op's bank."""
    return [value(op) for op in group for _ in range(op.matrices)]


def floats_of(group: Sequence[Any], name: str) -> tuple[str, list[float]]:
    """A column of an attribute of the ops of `group` in fp64, repeated for each matrix."""
    return "fp64", repeated(group, lambda op: float(getattr(op, name)))


def column(operands: Iterable[Tensor | tuple[Region, str]]) -> tuple[str, list[Region]]:
    """A column (kind, addresses) of operands of one dtype: tensors, or pairs of a region and a dtype."""
    pairs = [t if isinstance(t, tuple) else (part(t), t.dtype) for t in operands]
    (kind,) = {POINTER[dtype] for _, dtype in pairs}
    return kind, [region for region, _ in pairs]
