"""What kernels of every family share: run-time scalars, how an output is written, the two ways to walk a tensor."""

from __future__ import annotations

from math import gcd
from typing import Any

from barellm.cuda.kernel import MODES, Count, Lowering
from barellm.cuda.lang import DeviceFunction, constant, device, tl
from barellm.program.integers import ceil_div
from barellm.program.scalars import SCALARS
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import view_stride

_AT = {name: i for i, name in enumerate(SCALARS)}
POS, ACCUMULATE, STEP, SEED, SAMPLE, LR, INV_TARGETS, MOMENTUM = (
    constant(_AT[name]) for name in ("pos", "accumulate", "step", "seed", "sample", "lr", "inv_targets", "momentum")
)
STORE, ADD = constant(MODES["store"]), constant(MODES["add"])

VECTOR = 16  # elements: 16 bytes of the smallest type are 8 of them, and Triton wants to see twice that
# Columns of a block whose rows are summed. With one to a lane, its product is fused with the sum over lanes: of two that add each
# other's, each rounds only the other's, and they end with different sums, of which any may be written.
MIN_SUM_COLUMNS = 64
BLOCK = 1024  # elements of one program: 8 for each of 128 threads, 16 or 32 bytes a tensor


@device
def store_or_add(to, mask, value, scalars, MODE: tl.constexpr):
    """Store `value`, or add it to what is there, as the mode and the run's `accumulate` say."""
    if MODE == STORE:
        tl.store(to, value, mask=mask)
    else:
        adding = mask
        if MODE != ADD:
            adding = mask & (tl.load(scalars + ACCUMULATE) != 0)
        before = tl.load(to, mask=adding, other=0.0)
        tl.store(to, before + value, mask=mask)


@device
def scalar_fp64(scalars, AT: tl.constexpr):
    """A run-time scalar that is a float, as fp64."""
    return tl.load(scalars + AT).to(tl.float64, bitcast=True)


@device
def flat_indices(units, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Indices (BLOCK,) of this program's elements and the mask of those below units * UNIT. What is a multiple of a vector is
    visible to the compiler, which a bare count is not: without it no masked access would be wider than an element."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return i, i < units.to(tl.int64) * UNIT


@device
def tile_indices(rows, C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """This program's row numbers (BR,) i64, columns (BC,), and the mask (BR, BC) of those below rows and C."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    return row, column, (row < rows)[:, None] & (column < C)[None, :]


def unit_of(t: Tensor) -> int:
    """Elements, up to a vector, of which a tensor's count is a multiple."""
    return gcd(t.width, VECTOR)


def matrix_unit(op: Any, t: Tensor) -> int:
    """The same of one matrix of a bank."""
    return gcd(t.size // op.matrices, VECTOR)


def pow2(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def row_strides(**tensors: Tensor) -> dict[str, int]:
    """Constants NAME_STRIDE: how many elements apart the rows of a tensor or view lie."""
    return {f"{name.upper()}_STRIDE": t.row_stride for name, t in tensors.items()}


def view_strides(**operands: Any) -> dict[str, int | None]:
    """Constants NAME_STRIDE as `row_strides` has them, for operands of any kind; None where rows lie side by side."""
    return {f"{name.upper()}_STRIDE": view_stride(operand) for name, operand in operands.items()}


def elementwise(
    c: Lowering, function: DeviceFunction, like: Tensor, operands: dict[str, Any], *, writes: str, **constants: Any
) -> None:
    """Launch a kernel with parameters `units`, UNIT and BLOCK over the elements of `like`."""
    unit = unit_of(like)
    units = Count(tuple(d.name for d in like.dims), like.width // unit)
    c.launch(
        function,
        {**operands, "units": units},
        {"UNIT": unit, "BLOCK": BLOCK, **constants},
        grid=lambda s: (ceil_div(units(s) * unit, BLOCK),),
        writes=writes,
    )


def rowwise(
    c: Lowering,
    function: DeviceFunction,
    like: Tensor,
    operands: dict[str, Any],
    *,
    writes: str,
    least: int = 1,
    **constants: Any,
) -> None:
    """Launch a kernel with parameters `rows`, C, BR and BC over tiles of the rows (..., C) of `like`, at least `least` columns
    wide."""
    C = int(like.shape[-1])
    rows = c.rows(like)
    BC = max(least, min(256, pow2(C)))
    BR = BLOCK // BC
    c.launch(
        function,
        {**operands, "rows": rows},
        {"C": C, "BR": BR, "BC": BC, **constants},
        grid=lambda s: (ceil_div(rows(s), BR), ceil_div(C, BC)),
        writes=writes,
    )
