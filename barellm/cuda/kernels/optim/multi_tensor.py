"""Multi-tensor launches (as PyTorch's multi-tensor apply): operands of many tensors for one launch, in a table. A table has a
column for each field, 8 bytes for each entry; the first column is an entry's first program, so a program finds its entry by
counting those that began before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

from barellm.cuda.kernel import POINTER
from barellm.cuda.kernels.common import pow2
from barellm.cuda.lang import device, tl
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import Region, part, share


@device
def find_entry(table, ENTRIES: tl.constexpr, WIDE: tl.constexpr):
    """This program's entry, and its number among the programs of that entry. WIDE: ENTRIES padded to a power of two."""
    j = tl.arange(0, WIDE)
    first = tl.load(table + j, mask=j < ENTRIES, other=0x7FFFFFFF)
    program = tl.program_id(0).to(tl.int64)
    entry = tl.sum((first <= program).to(tl.int32), 0) - 1
    return entry, program - tl.load(table + entry)


@device
def integer(table, entry, FIELD: tl.constexpr, ENTRIES: tl.constexpr):
    """An entry's field as i64."""
    return tl.load(table + FIELD * ENTRIES + entry)


@device
def number(table, entry, FIELD: tl.constexpr, ENTRIES: tl.constexpr):
    """An entry's field as fp64."""
    return integer(table, entry, FIELD, ENTRIES).to(tl.float64, bitcast=True)


@device
def pointer(table, entry, FIELD: tl.constexpr, ENTRIES: tl.constexpr, TYPE: tl.constexpr, ALIGN: tl.constexpr):
    """A pointer to elements of TYPE, a multiple of ALIGN bytes: the compiler cannot see that in a table."""
    return tl.multiple_of(integer(table, entry, FIELD, ENTRIES).to(tl.pointer_type(TYPE)), ALIGN)


@device
def aligned_pointer(table, entry, FIELD: tl.constexpr, ENTRIES: tl.constexpr, TYPE: tl.constexpr, UNIT: tl.constexpr):
    """A pointer to elements of TYPE that is a multiple of UNIT of them, as for the matrices of a bank that have so many
    elements."""
    BYTES: tl.constexpr = UNIT * TYPE.primitive_bitwidth // 8
    ALIGN: tl.constexpr = 16 if BYTES % 16 == 0 else 8 if BYTES % 8 == 0 else 4 if BYTES % 4 == 0 else 2
    return pointer(table, entry, FIELD, ENTRIES, TYPE, ALIGN)


@device
def matrix_pointer(
    table, entry, FIELD: tl.constexpr, ENTRIES: tl.constexpr, UNIT: tl.constexpr, HALF: tl.constexpr, FP16: tl.constexpr
):
    """A pointer to a matrix as `matrix_constants` describes it, a multiple of UNIT elements."""
    TYPE: tl.constexpr = tl.float16 if FP16 else tl.bfloat16 if HALF else tl.float32
    return aligned_pointer(table, entry, FIELD, ENTRIES, TYPE, UNIT)


def matrix_constants(dtype: str) -> dict[str, Any]:
    """HALF: elements have 16 bits. FP16: they are fp16; None where they are not."""
    return {"HALF": dtype != "fp32", "FP16": dtype == "fp16" or None}


def first_programs(counts: Iterable[int]) -> tuple[list[int], int]:
    """The first program of each entry, given how many programs work for each; and the number of all programs."""
    *firsts, programs = accumulate(counts, initial=0)
    return firsts, programs


def entry_constants(entries: int) -> dict[str, int]:
    """The constants of `find_entry`."""
    return {"ENTRIES": entries, "WIDE": pow2(entries)}


def of_matrices(each: Sequence[Any], operands: Iterable[Any]) -> tuple[str, list[Region]]:
    """A field of addresses: of ops' operands, an entry for each matrix of each bank."""
    pairs = zip(each, operands, strict=True)
    return column(share(operand, i, op.matrices) for op, operand in pairs for i in range(op.matrices))


def repeated(each: Sequence[Any], value: Callable[[Any], Any]) -> list[Any]:
    """The value of an op for each matrix of its bank."""
    return [value(op) for op in each for _ in range(op.matrices)]


def column(operands: Iterable[Tensor | tuple[Region, str]]) -> tuple[str, list[Region]]:
    """A field of addresses: operands of one type."""
    pairs = [t if isinstance(t, tuple) else (part(t), t.dtype) for t in operands]
    (kind,) = {POINTER[dtype] for _, dtype in pairs}
    return kind, [region for region, _ in pairs]
