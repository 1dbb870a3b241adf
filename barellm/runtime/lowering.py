"""What all backends share of lowering and planning: bytes of tensors, scratch of ops, programs after fusion."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from os import environ
from typing import Any, Generic, Protocol, TypeVar

from barellm.program import dtypes, grouping, planner
from barellm.program.builder import Program, Store
from barellm.program.fusion import Fusion, fuse
from barellm.program.ops.base import Op, Span, Tensor
from barellm.runtime.registry import Registry


@dataclass(frozen=True)
class Region:
    """The bytes [start, stop) of a tensor, counted from its address."""

    tensor: Tensor
    start: int
    stop: int


def part(tensor: Tensor, start: int = 0, stop: int | None = None) -> Region:
    """Bytes [start, stop) of a tensor, or all of them. For a view these are the bytes from its first element to the end of its
    base; a span's bytes lie one after the other."""
    base, skip = tensor.base, tensor.first_element * dtypes.itemsize(tensor.dtype)
    assert base is tensor or (start, stop) == (0, None), f"{tensor.name} is a view: its rows are not adjacent"
    if isinstance(tensor, Span):
        return Region(base, skip, skip + tensor.nbytes)
    return Region(base, start + skip, base.nbytes if stop is None else stop)


def plane(tensor: Tensor, number: int) -> tuple[Region, str]:
    """The bytes and the dtype of one plane of a tensor whose format has several."""
    f, base = dtypes.FORMATS[tensor.dtype], tensor.base
    dtype = f.planes[number]
    start = f.start_of(number, base.size) + dtypes.FORMATS[dtype].nbytes(tensor.first_element)
    return Region(base, start, start + dtypes.FORMATS[dtype].nbytes(tensor.size)), dtype


def share(operand: Tensor | tuple[Region, str], number: int, count: int) -> tuple[Region, str]:
    """Number `number` of the `count` equal parts of a tensor's elements, one after the other: a matrix of a bank."""
    region, dtype = operand if isinstance(operand, tuple) else (part(operand), operand.dtype)
    size = (region.stop - region.start) // count
    first = region.start + number * size
    return Region(region.tensor, first, first + size), dtype


def weight_operand(weight: Tensor) -> Tensor | tuple[Region, str]:
    """The matrix as a matmul reads it: the first plane where its format has several."""
    return plane(weight, 0) if dtypes.FORMATS[weight.dtype].planes else weight


def view_stride(operand: Any) -> int | None:
    """Elements from a row of an operand to the next where rows do not lie side by side, as those of a view; else None."""
    wide = isinstance(operand, Tensor) and operand.row_stride != operand.shape[-1]
    return operand.row_stride if wide else None


def rows_of(tensor: Tensor, first: int, count: int, width: int) -> tuple[Region, str]:
    """Rows [first, first + count), of `width` elements each, of an activation; clipped to its planned maximum."""
    row = width * dtypes.itemsize(tensor.dtype)
    return part(tensor, min(first * row, tensor.nbytes), min((first + count) * row, tensor.nbytes)), tensor.dtype


def decodes(program: Program) -> bool:
    """Whether a program goes on from a cache, and so runs with a few rows as often as with many. Such a cache is written on by the
    op that reads it; what one program leaves for another in a cache is only read there."""
    return any(t.role == "cache" and t in op.outputs.values() for op in program.ops for t in op.inputs.values())


class OpLowering(Protocol):
    """The calls that a backend makes of one op, and their scratch, which lives in the workspace as long as the op."""

    scratch_tensors: list[Tensor]


L = TypeVar("L", bound=OpLowering)


class LoweredProgram(Generic[L]):
    """A program's ops after fusion and grouping, each lowered. ValueError for an op that the backend has no kernel for."""

    def __init__(
        self, program: Program, *, table: Iterable[Fusion], registry: Registry[L], lowering: Callable[[Op], L],
        groups: Mapping[str, grouping.Alike] | None = None,
    ) -> None:  # fmt: skip
        # BARELLM_FUSION=0: each op is a kernel of its own, so that other intermediate results are rounded
        rows = [] if environ.get("BARELLM_FUSION") == "0" else list(table)
        self.ops = grouping.group(fuse(program.ops, rows, takes=registry.fuses), groups or {})
        self.of: dict[Op, L] = {}
        for op in self.ops:
            self.of[op] = c = lowering(op)
            registry.lower(op, c)


def plan_lowered(lowered: Mapping[str, LoweredProgram[L]], store: Store, guard: int = 0) -> planner.Plan:
    """An address for every tensor and for each op's scratch."""
    scratch = {op: c.scratch_tensors for low in lowered.values() for op, c in low.of.items()}
    return planner.plan({name: low.ops for name, low in lowered.items()}, store, scratch=lambda op: scratch[op], guard=guard)
