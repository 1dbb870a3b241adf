"""Gluon's language on the host: a kernel's own functions, run as they stand, become one list of steps for each role.

No step's order depends on data: what comes out of shared memory is a `Lazy`, which refuses to be a condition. So every role's list
can be taken once, and gluon_machine.py then runs the lists against each other in any order that hardware may choose.
"""

from __future__ import annotations

import inspect
import operator
import sys
import textwrap
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from barellm.cuda.lang import DeviceFunction, LazyModule, constant


class Fault(Exception):
    """What must not happen has happened."""


BARRIER = "barrier"  # the layout that tells barriers from data


class Lazy:
    """A value that is computed when its step runs. `like` has its shape and dtype. `under_way`: it is a product's, and its role has
    not waited for it, so that only another product may add to it."""

    __array_ufunc__ = None

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args, self.under_way = function, args, False
        if any(isinstance(a, Lazy) and a.under_way for a in args):
            raise Fault("a product is read before it is waited for")
        with np.errstate(all="ignore"):
            self.like = function(*(a.like if isinstance(a, Lazy) else a for a in args))
        self.shape, self.dtype = self.like.shape, self.like.dtype

    def value(self, known: dict[int, Any]) -> Any:
        """The array, with what `known` holds of leaves and of values computed before."""
        if id(self) not in known:
            args = [a.value(known) if isinstance(a, Lazy) else a for a in self.args]
            with np.errstate(over="ignore"):
                known[id(self)] = self.function(*args)
        return known[id(self)]

    def __bool__(self) -> bool:
        raise TypeError("control flow depends on data")

    def to(self, dtype: Any) -> Lazy:
        return Lazy(lambda x: x.astype(dtype), self)

    def reshape(self, shape: list[int]) -> Lazy:
        return Lazy(lambda x: x.reshape(shape), self)

    def permute(self, *order: int) -> Lazy:
        return Lazy(lambda x: x.transpose(order), self)

    def split(self) -> tuple[Lazy, Lazy]:
        return Lazy(lambda x: x[..., 0], self), Lazy(lambda x: x[..., 1], self)


def _operator(function: Callable[..., Any], swapped: bool = False) -> Callable[[Lazy, Any], Lazy]:
    return lambda self, other: Lazy(function, other, self) if swapped else Lazy(function, self, other)


for _name in ("add", "sub", "mul", "truediv", "lt", "gt", "ge"):
    setattr(Lazy, f"__{_name}__", _operator(getattr(operator, _name)))
    setattr(Lazy, f"__r{_name}__", _operator(getattr(operator, _name), swapped=True))


class Pointer:
    """An address in global memory that no tensor map describes: run-time scalars, a bias, sums."""

    def __init__(self, array: np.ndarray, at: Any = 0) -> None:
        self.array, self.at = array, at
        self.dtype = types.SimpleNamespace(element_ty=array.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.array, self.at + more)


@dataclass(eq=False)
class Map:
    """A tensor map: a matrix in global memory, read and written in boxes."""

    array: np.ndarray
    block_shape: list[int]
    layout: str = "swizzled"

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    @property
    def block_type(self) -> Any:
        return types.SimpleNamespace(nbytes=self.block_shape[0] * self.block_shape[1] * self.dtype.itemsize)

    def _edges(self, at: tuple[int, int]) -> tuple[slice, slice]:
        return slice(at[0], min(at[0] + self.block_shape[0], self.array.shape[0])), slice(
            at[1], min(at[1] + self.block_shape[1], self.array.shape[1])
        )

    def read(self, at: tuple[int, int]) -> np.ndarray:
        """The box at (row, column), with zeros beyond the matrix."""
        box, inside = np.zeros(self.block_shape, self.dtype), self.array[self._edges(at)]
        box[: inside.shape[0], : inside.shape[1]] = inside
        return box

    def write(self, at: tuple[int, int], box: np.ndarray) -> None:
        inside = self.array[self._edges(at)]
        inside[...] = box[: inside.shape[0], : inside.shape[1]]


@dataclass(frozen=True)
class Shared:
    """Shared memory: an allocation, one buffer or barrier of it, that buffer transposed, or some of its columns."""

    allocation: int
    shape: tuple[int, ...]
    dtype: Any
    at: int | None = None
    transposed: bool = False
    sliced: tuple[int, int] | None = None  # the first of its columns, and how many the buffer has

    @property
    def key(self) -> tuple[int, int]:
        assert self.at is not None, "a buffer is meant, not the whole allocation"
        return self.allocation, self.at

    def index(self, i: int) -> Shared:
        assert self.at is None and 0 <= i < self.shape[0]
        return Shared(self.allocation, self.shape[1:], self.dtype, i)

    def permute(self, order: tuple[int, int]) -> Shared:
        assert tuple(order) == (1, 0)
        return Shared(self.allocation, self.shape[::-1], self.dtype, self.at, not self.transposed)

    def slice(self, start: int, length: int, dim: int) -> Shared:
        rows, columns = self.shape
        assert dim == 1 and not self.transposed and start + length <= columns
        return Shared(self.allocation, (rows, length), self.dtype, self.at, sliced=(start, columns))

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of the whole buffer as it lies in memory."""
        shape = self.shape[::-1] if self.transposed else self.shape
        return (shape[0], self.sliced[1]) if self.sliced else shape

    def of(self, stored: np.ndarray) -> np.ndarray:
        if self.sliced:
            stored = stored[:, self.sliced[0] : self.sliced[0] + self.shape[1]]
        return stored.T if self.transposed else stored

    def load(self, layout: Any) -> Lazy:
        leaf = Lazy(lambda: np.zeros(self.shape, self.dtype))
        TRACE.add(Step("read", reads=(self,), result=leaf))
        return leaf

    def store(self, value: Lazy) -> None:
        assert value.shape == self.shape and value.dtype == self.dtype, (value.shape, value.dtype, self)
        if TRACE.current is None:  # by all warps, before there are roles
            TRACE.held[self.key], TRACE.fenced = value.value({}), False
        else:
            TRACE.add(Step("write", writes=self, value=value))


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a role. `kind`: wait, arrive, expect, load, mma, mma_wait, read, write, fence, store, store_wait, or put: `value`
    to global memory, where `mask` has it."""

    kind: str
    barrier: tuple[int, int] | None = None
    number: int = 0  # phase, arrivals, bytes, or how many may be pending
    reads: tuple[Shared, ...] = ()
    writes: Shared | None = None
    map: Map | None = None
    at: tuple[int, int] = (0, 0)
    value: Lazy | None = None
    result: Lazy | None = None
    pointer: Pointer | None = None
    mask: Any = True
    registers: Lazy | None = None  # of a product: its first operand, where that is not read from shared memory


@dataclass
class Trace:
    """What one block does: its barriers' counts, what it has put into shared memory before its roles begin, and each role's
    steps."""

    program: int
    programs: int
    allocations: list[int] = field(default_factory=list)
    counts: dict[tuple[int, int], int] = field(default_factory=dict)
    held: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    roles: list[list[Step]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    current: list[Step] | None = None
    fenced: bool = True

    def add(self, step: Step) -> None:
        assert self.current is not None, f"{step.kind} outside the roles"
        self.current.append(step)


TRACE = Trace(0, 1)


def _allocate(dtype: Any, shape: list[int], layout: Any) -> Shared:
    TRACE.allocations.append(shape[0])
    return Shared(len(TRACE.allocations) - 1, tuple(shape), dtype if layout == BARRIER else np.dtype(dtype))


def _load(pointer: Pointer, mask: Any = None, other: float = 0.0) -> Any:
    if mask is None:
        return int(pointer.array[pointer.at])
    return Lazy(lambda: np.where(mask, pointer.array[np.where(mask, pointer.at, 0)], np.float32(other)))


def _specialize(roles: list[tuple[Callable[..., None], tuple]], warps: list[int], registers: list[int]) -> None:
    if not TRACE.fenced:
        raise Fault("barriers are not fenced for the asynchronous proxy")
    assert len(warps) == len(registers) == len(roles) - 1
    for function, args in roles:
        TRACE.current = []
        function(*args)
        TRACE.roles.append(TRACE.current)
        TRACE.names.append(function.__name__)
    TRACE.current = None


def _init(barrier: Shared, count: int) -> None:
    TRACE.counts[barrier.key], TRACE.fenced = count, False


def _fence() -> None:
    if TRACE.current is None:
        TRACE.fenced = True
    else:
        TRACE.add(Step("fence"))


def _wait(barrier: Shared, phase: int, pred: bool = True) -> None:
    if pred:
        TRACE.add(Step("wait", barrier.key, int(phase)))


def _wait_reduce_scatter(barrier: Shared, count: int = 1, pred: bool = True) -> None:
    if pred:
        TRACE.add(Step("arrive", barrier.key, count))


def _expect(barrier: Shared, nbytes: int, pred: bool = True) -> None:
    if pred:
        TRACE.add(Step("expect", barrier.key, int(nbytes)))


def _copy_in(source: Map, at: list[int], barrier: Shared, to: Shared, pred: bool = True) -> None:
    assert tuple(source.block_shape) == to.shape and source.dtype == to.dtype
    if pred:
        TRACE.add(Step("load", barrier.key, source.block_type.nbytes, writes=to, map=source, at=tuple(at)))


def _copy_out(to: Map, at: list[int], source: Shared) -> None:
    assert tuple(to.block_shape) == source.shape and to.dtype == source.dtype
    TRACE.add(Step("store", reads=(source,), map=to, at=tuple(at)))


def _mma(a: Shared | Lazy, b: Shared, acc: Lazy, is_async: bool, use_acc: bool = True) -> Lazy:
    assert is_async and a.shape[1] == b.shape[0] and acc.shape == (a.shape[0], b.shape[1])
    leaf = Lazy(lambda: np.zeros(acc.shape, np.float32))
    leaf.under_way = True
    first = acc if use_acc else Lazy(lambda: np.zeros(acc.shape, np.float32))
    if isinstance(a, Shared):
        TRACE.add(Step("mma", reads=(a, b), value=first, result=leaf))
    else:
        assert a.dtype == b.dtype, (a.dtype, b.dtype)
        TRACE.add(Step("mma", reads=(b,), value=first, result=leaf, registers=a))
    return leaf


def _mma_wait(pending: int, deps: tuple[Lazy, ...]) -> Any:
    TRACE.add(Step("mma_wait", number=pending))
    products = [step.result for step in TRACE.current or () if step.kind == "mma"]
    for product in products[: max(0, len(products) - pending)]:
        product.under_way = False
    return deps if len(deps) > 1 else deps[0]


def _put(pointer: Pointer, value: Lazy, mask: Any) -> None:
    assert value.shape == np.shape(pointer.at) == np.shape(mask), (value.shape, pointer.at, mask)
    TRACE.add(Step("put", value=value, pointer=pointer, mask=mask))


def _along(axis: int, n: int) -> int:
    assert axis == 0, "grids of these kernels have one axis"
    return n


class Layout(types.SimpleNamespace):
    """Where elements lie does not change what they are."""

    def __init__(self, *args: Any) -> None:
        super().__init__(args=args)


gl = types.SimpleNamespace(
    float32=np.dtype(np.float32), bfloat16=np.dtype(ml_dtypes.bfloat16), int64="int64", constexpr=None,
    NVMMADistributedLayout=Layout, SliceLayout=Layout, NVMMASharedLayout=Layout, BlockedLayout=Layout,
    DotOperandLayout=Layout, DistributedLinearLayout=Layout,
    program_id=lambda axis: _along(axis, TRACE.program), num_programs=lambda axis: _along(axis, TRACE.programs),
    cdiv=lambda a, b: -(-a // b), cast=lambda x, dtype: x, static_range=range, warp_specialize=_specialize,
    allocate_shared_memory=_allocate,
    zeros=lambda shape, dtype, layout: Lazy(lambda: np.zeros(shape, dtype)),
    full=lambda shape, value, dtype, layout: Lazy(lambda: np.full(shape, value, dtype)),
    max=lambda x, axis: Lazy(lambda v: v.max(axis), x), sum=lambda x, axis: Lazy(lambda v: v.sum(axis), x), store=_put,
    maximum=lambda x, y: Lazy(np.maximum, x, y), exp2=lambda x: Lazy(np.exp2, x), log2=lambda x: Lazy(np.log2, x),
    arange=lambda start, stop, layout: np.arange(start, stop),
    load=_load, max_constancy=lambda mask, count: mask,
    expand_dims=lambda x, axis: Lazy(lambda v: np.expand_dims(v, axis), x) if isinstance(x, Lazy) else np.expand_dims(x, axis),
    convert_layout=lambda x, layout, assert_trivial=False: x,
    where=lambda condition, x, y: Lazy(lambda v: np.where(condition, v, np.float32(y)), x),
)  # fmt: skip
hopper = types.SimpleNamespace(
    mbarrier=types.SimpleNamespace(
        MBarrierLayout=lambda: BARRIER, init=_init, wait=_wait, arrive=_wait_reduce_scatter, expect=_expect
    ),
    tma=types.SimpleNamespace(
        async_copy_global_to_shared=_copy_in,
        async_copy_shared_to_global=_copy_out,
        store_wait=lambda pending: TRACE.add(Step("store_wait", number=pending)),
    ),
    fence_async_shared=_fence,
    warpgroup_mma=_mma,
    warpgroup_mma_wait=_mma_wait,
)
# Instructions that kernels name, as exactly as fp32 has them.
ASM = {"rcp.approx.ftz.f32 $0, $1;": lambda x: np.float32(1) / x}
tl = types.SimpleNamespace(
    exp2=lambda x: Lazy(np.exp2, x), where=lambda c, x, y: Lazy(np.where, c, x, y), constexpr=None, float32=np.float32,
    inline_asm_elementwise=lambda asm, constraints, args, *how: Lazy(ASM[asm], *args),
)  # fmt: skip
STUBS = {"triton.language": tl, "triton.experimental.gluon.language": gl}
STUBS["triton.experimental.gluon.language.nvidia.hopper"] = hopper


def materialised(
    function: DeviceFunction, edits: dict[str, tuple[str, str]] | None = None, stubs: dict[str, Any] = STUBS
) -> Callable[..., None]:
    """The function over the stubs. `edits`: {function: (old, new)} in the source of those it calls, for tests of the tests; of
    its own module where several modules have one of that name."""
    edits = dict(edits or {})
    defined = {value.name for value in vars(sys.modules[function.module]).values() if _defined_in(function.module, value)}
    spaces: dict[str, dict[str, Any]] = {}

    def space(module: str) -> dict[str, Any]:
        if module in spaces:
            return spaces[module]
        made = spaces[module] = {}
        for name, value in vars(sys.modules[module]).items():
            if isinstance(value, LazyModule):
                made[name] = stubs[value.module]
            elif isinstance(value, constant):
                made[name] = value.value
            elif isinstance(value, DeviceFunction) and value.module != module:
                made[name] = space(value.module)[value.name]
            elif isinstance(value, DeviceFunction):
                meant = module == function.module or name not in defined
                made[name] = _function(value, made, edits.pop(name, None) if meant else None)
            else:
                made[name] = value
        return made

    found = space(function.module)[function.name]
    assert not edits, f"no function to edit: {sorted(edits)}"
    return found


def _defined_in(module: str, value: object) -> bool:
    return isinstance(value, DeviceFunction) and value.module == module


def has_roles(kernel: DeviceFunction) -> bool:
    """Whether the warps of a Gluon kernel have roles, or all do the same."""
    return "warp_specialize" in kernel.function.__code__.co_names


def _function(device: DeviceFunction, names: dict[str, Any], edit: tuple[str, str] | None) -> Callable[..., Any]:
    if edit is None:
        return types.FunctionType(device.function.__code__, names, device.name)
    source = textwrap.dedent(inspect.getsource(device.function))
    source = source[source.index("def ") :]
    assert source.count(edit[0]) == 1, f"{device}: {source.count(edit[0])} x {edit[0]!r}"
    code = compile("from __future__ import annotations\n" + source.replace(*edit), device.name, "exec")
    made: dict[str, Any] = {}
    exec(code, names, made)
    return made[device.name]


def trace(kernel: Callable[..., None], args: dict[str, Any], program: int = 0, programs: int = 1) -> Trace:
    """What block `program` of `programs` does."""
    global TRACE
    TRACE = Trace(program, programs)
    kernel(**args)
    return TRACE
