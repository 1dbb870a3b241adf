"""Device functions and launches that kernels share: run-time scalars, writing an output, a program's indices."""

from collections.abc import Callable
from math import gcd
from typing import Any

from barellm.cuda.kernel import MODES, Count, Lowering, lowering
from barellm.cuda.lang import DeviceFunction, constant, device, tl
from barellm.program.integers import ceil_div
from barellm.program.scalars import SCALARS
from barellm.program.tensor import Dim, Tensor
from barellm.runtime.lowering import view_stride

_AT = {name: i for i, name in enumerate(SCALARS)}
POS, ACCUMULATE, STEP, SEED, SAMPLE, LR, INV_TARGETS, MOMENTUM = (
    constant(_AT[name]) for name in ("pos", "accumulate", "step", "seed", "sample", "lr", "inv_targets", "momentum")
)
STORE, ADD = constant(MODES["store"]), constant(MODES["add"])

VECTOR = 16  # elements: 16 bytes are 8 of the smallest type, and Triton wants to see twice that
# Least columns of a block whose rows are summed: two for each of 32 lanes. With one, the product before the sum is fused into the
# butterfly reduction over lanes: of two lanes that add each other's, each rounds only the other's product, and they differ in the
# end.
MIN_SUM_COLUMNS = 64
BLOCK = 1024  # elements of one program: 8 for each of 128 threads, 16 or 32 bytes a tensor


@device
def store_or_add(to, mask, value, scalars, MODE):
    """Store `value` to the pointers `to`, or add it to what they point to, by MODE: STORE, ADD, or as the scalar `accumulate`
    says."""
    if MODE == STORE:
        tl.store(to, value, mask=mask)
    else:
        adding = mask
        if MODE != ADD:
            adding = mask & (tl.load(scalars + ACCUMULATE) != 0)
        before = tl.load(to, mask=adding, other=0.0)
        tl.store(to, before + value, mask=mask)


@device
def scalar_fp64(scalars, AT):
    """The run-time scalar number AT, one that is a float, as fp64."""
    return tl.load(scalars + AT).to(tl.float64, bitcast=True)


@device
def flat_indices(units, UNIT, BLOCK):
    """(indices (BLOCK,) i64 of this program's elements, mask of those below n = units * UNIT). The factor UNIT shows the compiler
    that n is a multiple of a vector: with a bare count no masked access would be wider than an element."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return i, i < units.to(tl.int64) * UNIT


@device
def tile_indices(rows, C, BR, BC):
    """(rows (BR,) i64, columns (BC,), mask (BR, BC) of those below `rows` and C). Grid: blocks of rows, of columns."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    return row, column, (row < rows)[:, None] & (column < C)[None, :]


def unit_of(t: Tensor) -> int:
    """UNIT of a tensor: the largest number of elements, up to a vector, that divides its count in every run."""
    return gcd(t.width, VECTOR)


def matrix_unit(op: Any, t: Tensor) -> int:
    """UNIT of each matrix of a bank t."""
    return gcd(t.size // op.matrices, VECTOR)


def pow2(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def axis_size(t: Tensor, axis: int, times: int = 1) -> Count:
    """A function of the run's sizes: the length of an axis of t, times a number."""
    n = t.shape[axis]
    return Count((n.name,), times) if isinstance(n, Dim) else Count((), int(n) * times)


def view_strides(**operands: Any) -> dict[str, int | None]:
    """Constants NAME_STRIDE of operands of any kind: elements from a row of a view to the next; None where rows are contiguous."""
    return {f"{name.upper()}_STRIDE": view_stride(operand) for name, operand in operands.items()}


def kernel(*op_names: str, constants: Callable[[Any], dict[str, Any]] = lambda op: {}, **takes: Any) -> Callable[..., Any]:
    """Mark and register a kernel that is all of the ops named: over the elements of their first output (parameter `units`), over
    its rows (`rows`), or else by one program of one warp. Its other parameters are the op's (`Lowering.own`), and `constants`."""

    def register(function: Callable[..., Any]) -> DeviceFunction:
        marked = device(function)

        def lower(op: Any, c: Lowering) -> None:
            walk = elementwise if "units" in marked.parameters else rowwise if "rows" in marked.parameters else one_program
            walk(c, marked, next(iter(op.outputs.values())), {}, **constants(op))

        lowering(*op_names, **takes)(lower)
        return marked

    return register


def one_program(c: Lowering, function: DeviceFunction, like: Tensor, operands: dict[str, Any], **constants: Any) -> None:
    """Launch one program of one warp."""
    c.launch(function, operands, constants, grid=lambda s: (1,), warps=1)


def elementwise(
    c: Lowering, function: DeviceFunction, like: Tensor, operands: dict[str, Any], *, writes: str = "", **constants: Any
) -> None:
    """Launch a kernel with parameters `units`, UNIT and BLOCK over the elements of `like`, BLOCK for each program."""
    unit = unit_of(like)
    units = Count(tuple(d.name for d in like.dims), like.width // unit)
    c.launch(
        function, {**operands, "units": units}, {"UNIT": unit, "BLOCK": BLOCK, **constants},
        grid=lambda s: (ceil_div(units(s) * unit, BLOCK),), writes=writes,
    )  # fmt: skip


def rowwise(
    c: Lowering, function: DeviceFunction, like: Tensor, operands: dict[str, Any], *, writes: str = "", least: int = 1,
    **constants: Any,
) -> None:  # fmt: skip
    """Plan one launch of a kernel with parameters `rows`, C, BR and BC (`tile_indices`) over blocks (BR, BC) of the rows (..., C)
    of `like`: BLOCK elements, `least` to 256 columns wide, both powers of two. `writes`: as in `Lowering.launch`."""
    C = int(like.shape[-1])
    rows = c.rows(like)
    BC = max(least, min(256, pow2(C)))
    BR = BLOCK // BC
    c.launch(
        function, {**operands, "rows": rows}, {"C": C, "BR": BR, "BC": BC, **constants},
        grid=lambda s: (ceil_div(rows(s), BR), ceil_div(C, BC)), writes=writes,
    )  # fmt: skip
