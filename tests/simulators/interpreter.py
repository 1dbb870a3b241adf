"""Triton's interpreter over raw addresses, repaired, with every access checked: one launch, run by NumPy.

Triton 3.6.0's own gets these wrong or lets them pass:
- `tl.dot` of bf16 multiplies the bit patterns, and so do `+`, `*`, `<` and their like.
- fp32 to bf16 is cut off where the hardware rounds to nearest even; fp64 or integers to bf16, and back, are garbage. Nor does it
  round to formats of 8 bits as the hardware does, which keeps what is too large at the largest number.
- A loop over a run-time scalar fails with NumPy 2.4 and later.
- A masked load without `other` gives zeros: on a GPU the lanes hold anything. Here they hold NaN, and the largest integer;
  and where `other` is a single zero it counts as none, here it does not.
- A multiply-add rounds twice.
- It has no instructions by name. Those that kernels use are in gluon_stub.ASM.
- What lies at an address is nobody's business. Here each pointer knows the bytes that the lowering named for it, by a number in its
  upper 16 bits, and touching others fails.

The functions of `triton.language` that are kernels' own language (`tl.sum`, `tl.cdiv`) are interpreted too. Blocks run one after
the other, forward or backward: a result that depends on it is a race.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import triton.compiler.code_generator  # noqa: F401  (keeps `tl.minimum` for `min`: not those of a first import while interpreting)
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.jit import JITFunction

from barellm.cuda.kernel import Counter, Launch, Sizes, Specialisation, Table, TensorMap
from barellm.runtime.lowering import Region
from tests.simulators import gluon_block, gluon_machine, interpreter_types
from tests.simulators.gluon_stub import ASM, has_roles

EIGHTS = {tl.float8e4nv: np.dtype(ml_dtypes.float8_e4m3fn), tl.float8e5: np.dtype(ml_dtypes.float8_e5m2)}
SHORT = {tl.bfloat16: np.dtype(ml_dtypes.bfloat16), **EIGHTS}  # floats that NumPy does not know
STEP = 16  # of a contraction, that one instruction adds to an accumulator: no chain depends on how a kernel cuts it into tiles
TAG = 48  # a pointer's bits from here on number the operand; addresses of a process have fewer


class OutOfBounds(AssertionError):
    """A launch touches bytes that its lowering does not name."""


@dataclass(frozen=True)
class Pointer:
    """An address and the bytes [start, stop) around it that may be touched."""

    address: int
    start: int
    stop: int
    writable: bool


@dataclass(frozen=True)
class Box:
    """What a tensor map describes: a row-major matrix, read and written in boxes of `shape` elements."""

    pointer: Pointer
    rows: int
    columns: int
    stride: int  # elements from row to row
    shape: tuple[int, int]


@dataclass(frozen=True)
class Words:
    """A table: where it lies, and its columns, numbers as the 8 bytes have them and addresses with the bytes around them."""

    pointer: Pointer
    columns: list[list[Pointer | int]]

    @classmethod
    def read(cls, type_: str, pointer: Pointer, around: Callable[[int], Pointer]) -> Words:
        """From memory. `around(address)`: what may be touched there."""
        entries, kinds = type_.removeprefix("table<").removesuffix(">").split(":")
        shape = (len(kinds.split(",")), int(entries))
        assert pointer.address + 8 * shape[0] * shape[1] <= pointer.stop and not pointer.address % 16, (type_, pointer)
        found = np.frombuffer((ctypes.c_int64 * (shape[0] * shape[1])).from_address(pointer.address), np.int64)
        columns = []
        for kind, words in zip(kinds.split(","), found.reshape(shape).tolist(), strict=True):
            columns.append([around(word) for word in words] if kind.startswith("*") else words)
        return cls(pointer, columns)


Parameter = Pointer | Box | Words | int
Execute = Callable[[Specialisation, Sequence[Parameter], tuple[int, ...]], None]  # parameters in the signature's order, the grid


def run(
    launch: Launch, sizes: Sizes, address: Callable[[Region | Counter], tuple[int, int]], scalars: tuple[int, int], execute: Execute
) -> None:
    """One launch on host memory by `execute`. `address(region)`: where its bytes, or those of the counter, start and stop;
    `scalars`: the same of the run-time scalars."""
    grid = launch.grid(sizes)
    if 0 in grid:
        return

    def pointer(region: Region | Counter) -> Pointer:
        start, stop = address(region)
        return Pointer(start, start, stop, isinstance(region, Counter) or region in launch.writes)

    values: list[Parameter] = []
    kept: list[Any] = []  # tables, while the launch runs
    for a in launch.args:
        if a is None:
            values.append(Pointer(scalars[0], *scalars, False))
        elif isinstance(a, Region | Counter):
            values.append(pointer(a))
        elif isinstance(a, TensorMap):
            rows = a.rows if isinstance(a.rows, int) else a.rows(sizes)
            values.append(Box(pointer(a.region), rows, a.columns, a.stride, a.box))
        elif isinstance(a, Table):
            packed = ctypes.create_string_buffer(a.packed(lambda region: address(region)[0]), a.nbytes)
            start = ctypes.addressof(packed)
            regions = {address(region)[0]: pointer(region) for _, region in a.regions()}
            kept.append(packed)
            values.append(Words.read(a.type, Pointer(start, start, start + a.nbytes, False), regions.__getitem__))
        else:
            values.append(a if isinstance(a, int) else a(sizes))
    execute(launch.spec, values, grid)


def execute(
    spec: Specialisation,
    values: Sequence[Parameter],
    grid: tuple[int, ...],
    backward: bool = False,
    blocks: list[tuple[int, int, int]] | None = None,
) -> None:
    """The blocks of a grid that are named, or all of them, the last first if `backward`. `values`: the parameters, as the signature
    has them."""
    if spec.function.dialect == "gluon":
        with interpreting():
            (gluon_machine if has_roles(spec.function) else gluon_block).execute(spec, values, grid, backward)
        return
    nx, ny, nz = (*grid, 1, 1)[:3]
    blocks = blocks or [(x, y, z) for z in range(nz) for y in range(ny) for x in range(nx)]
    with interpreting():
        builder = stock.interpreter_builder
        builder.memory = memory = Memory()
        builder.set_grid_dim(nx, ny, nz)
        given = {}
        for (name, type_), value in zip(spec.signature, values, strict=True):
            given[name] = _argument(type_, value, memory)
            misaligned = isinstance(value, Pointer) and name in spec.aligned and value.address % 16
            assert not misaligned, f"{spec.name}: {name} is compiled as a multiple of 16 and is {value}"
        function = spec.function.materialised(interpreted=True).rewrite()
        for block in reversed(blocks) if backward else blocks:
            builder.set_grid_idx(*block)
            try:
                function(**given, **dict(spec.constants))
            except OutOfBounds as error:
                raise OutOfBounds(f"{spec.name}, block {block} of {(nx, ny, nz)}: {error}") from None


def _argument(type_: str, value: Parameter, memory: Memory) -> Any:
    if isinstance(value, Box):
        element = tl.str_to_ty("*" + type_.removeprefix("tensormap<").split("[")[0], None)
        return stock.interpreter_semantic.make_tensor_descriptor(
            base=_scalar(element, memory.tagged(value.pointer, element), np.uint64),
            shape=[_scalar(tl.int32, n, np.int32) for n in (value.rows, value.columns)],
            strides=[_scalar(tl.int64, value.stride, np.int64), tl.constexpr(1)],
            block_shape=[tl.constexpr(n) for n in value.shape],
            padding_option="zero",
        )
    if isinstance(value, Words):
        kind = tl.str_to_ty("*i64", None)
        return _scalar(kind, memory.table(type_, value, kind), np.uint64)
    kind = tl.str_to_ty(type_, None)
    if isinstance(value, Pointer):
        return _scalar(kind, memory.tagged(value, kind), np.uint64)
    return _scalar(kind, value, stock._get_np_dtype(kind))


def _scalar(kind: Any, value: int, dtype: Any) -> Any:
    return tl.tensor(stock.TensorHandle(np.array([value], dtype), kind), kind)


class Memory:
    """The operands of a launch. Accesses are held against them."""

    def __init__(self) -> None:
        self.operands: list[tuple[Pointer, Any]] = []
        self.tables: list[np.ndarray] = []  # as kernels see them: with the addresses numbered

    def tagged(self, pointer: Pointer, kind: Any) -> int:
        """The address, numbered."""
        assert pointer.address >> TAG == 0
        self.operands.append((pointer, kind))
        return pointer.address | (len(self.operands) - 1) << TAG

    def table(self, type_: str, words: Words, kind: Any) -> int:
        """The address of a copy whose own addresses are numbered."""
        kinds = type_.removesuffix(">").split(":")[1].split(",")
        columns = [
            [self.tagged(w, column) if isinstance(w, Pointer) else w for w in values]
            for column, values in zip(kinds, words.columns, strict=True)
        ]
        self.tables.append(np.array(columns, np.int64))
        start = self.tables[-1].ctypes.data
        return self.tagged(Pointer(start, start, start + self.tables[-1].nbytes, False), kind)

    def untagged(self, pointers: np.ndarray, mask: Any, nbytes: int, *, write: bool) -> np.ndarray:
        """Plain addresses; AssertionError where a lane of the mask touches bytes outside its operand."""
        plain = pointers & np.uint64((1 << TAG) - 1)
        mask = np.broadcast_to(np.asarray(mask.data, bool), pointers.shape)  # a handle, or of a tensor map an array
        for tag in np.unique(pointers[mask] >> np.uint64(TAG)):
            known = int(tag) < len(self.operands)
            pointer, kind = self.operands[int(tag)] if known else (Pointer(0, 0, 0, False), "?")
            touched = plain[mask & (pointers >> np.uint64(TAG) == tag)]
            wrong = (touched < pointer.start) | (touched + np.uint64(nbytes) > pointer.stop)
            if write and not pointer.writable:
                raise OutOfBounds(f"writes operand {tag} ({kind}), which it should only read")
            if wrong.any():
                at = (int(touched[wrong][0]) - pointer.start) / nbytes
                size = (pointer.stop - pointer.start) // nbytes
                what = f"{'writes' if write else 'reads'} element {at:g} of the {size} of operand {tag} ({kind})"
                raise OutOfBounds(f"{what}, {int(wrong.sum())} such lanes")
        return plain


class Builder(stock.InterpreterBuilder):
    """The operations of the interpreter, with the repairs named above."""

    memory: Memory
    zero_elsewhere = False  # in a load whose `other` is one zero, which Triton's `if other` takes for none

    def create_masked_load(self, ptrs, mask, other, cache_modifier, eviction_policy, is_volatile):
        element = ptrs.get_element_ty()
        dtype = stock._get_np_dtype(element)
        plain = self.memory.untagged(ptrs.data, mask, dtype.itemsize, write=False)
        if other is None and self.zero_elsewhere:
            other = stock.TensorHandle(np.zeros(ptrs.data.shape, dtype), element)
        elif other is None:
            unknown = np.full(ptrs.data.shape, (1 << 8 * dtype.itemsize - 1) - 1)
            other = stock.TensorHandle(unknown.astype(f"u{dtype.itemsize}").view(dtype), element)
        pointers = stock.TensorHandle(plain, ptrs.dtype)
        return super().create_masked_load(pointers, mask, other, cache_modifier, eviction_policy, is_volatile)

    def create_masked_store(self, ptrs, value, mask, cache_modifier, eviction_policy):
        nbytes = stock._get_np_dtype(ptrs.get_element_ty()).itemsize
        plain = self.memory.untagged(ptrs.data, mask, nbytes, write=True)
        pointers = stock.TensorHandle(plain, ptrs.dtype)
        return super().create_masked_store(pointers, value, mask, cache_modifier, eviction_policy)

    def create_atomic_rmw(self, rmwOp, ptr, val, mask, sem, scope):
        plain = self.memory.untagged(ptr.data, mask, val.data.dtype.itemsize, write=True)
        return super().create_atomic_rmw(rmwOp, stock.TensorHandle(plain, ptr.dtype), val, mask, sem, scope)

    def cast_impl(self, src, dst_type):
        source, target = src.dtype.scalar, dst_type.scalar
        if source not in SHORT and target not in SHORT:
            return super().cast_impl(src, dst_type)
        values = _wide(src)
        if target not in SHORT:
            return stock.TensorHandle(values.astype(stock._get_np_dtype(target)), target)
        return stock.TensorHandle(_narrow(values, target), target)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        nearest = rounding_mode in (None, stock._ir.ROUNDING_MODE.RTNE)
        if (dst_type.scalar in SHORT or src.dtype.scalar in EIGHTS) and nearest:
            return self.cast_impl(src, dst_type)
        return super().create_fp_to_fp(src, dst_type, rounding_mode)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        x, y = _wide(a), _wide(b)
        if input_precision == stock._ir.INPUT_PRECISION.TF32 and x.dtype == np.float32:
            x, y = tf32(x), tf32(y)
        total = d.data
        for k in range(0, x.shape[-1], STEP):
            part = x[..., k : k + STEP].astype(np.float64) @ y[..., k : k + STEP, :].astype(np.float64)
            total = (total + part).astype(d.data.dtype)
        return stock.TensorHandle(total, d.dtype.scalar)

    def create_fma(self, x, y, z):
        exact = _wide(x).astype(np.float64) * _wide(y) + _wide(z)
        return self._rounded(exact.astype(_wide(z).dtype), z.dtype.scalar)

    def create_inline_asm(self, asm, constraints, values, types, pure, pack):
        (result,) = [stock.TensorHandle(ASM[asm](*(v.data for v in values)), t.scalar) for t in types]
        return SimpleNamespace(get_result=lambda i: result)

    def binary_op(self, lhs, rhs, op):
        if tl.bfloat16 not in (lhs.dtype.scalar, rhs.dtype.scalar):
            return super().binary_op(lhs, rhs, op)
        return self._rounded(op(_wide(lhs), _wide(rhs)), lhs.dtype.scalar)

    def unary_op(self, arg, op):
        return self._rounded(op(_wide(arg)), arg.dtype.scalar)

    @staticmethod
    def _rounded(values: np.ndarray, dtype: Any) -> Any:
        """Comparisons stay as they are; the semantic layer gives them their type."""
        return stock.TensorHandle(values if dtype not in SHORT or values.dtype == bool else _narrow(values, dtype), dtype)


def tf32(values: np.ndarray) -> np.ndarray:
    """fp32 as tensor cores see it: the last 13 bits of the fraction are not there."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _wide(handle: Any) -> np.ndarray:
    """Numbers that NumPy can compute with: shorter floats as fp32."""
    kind = handle.dtype.scalar
    return handle.data.view(SHORT[kind]).astype(np.float32) if kind in SHORT else handle.data


def _narrow(values: np.ndarray, kind: Any) -> np.ndarray:
    """The bits of a shorter float, rounded to nearest even; in 8 bits what is beyond the largest becomes that."""
    values = values.astype(np.float32)
    if kind in EIGHTS:
        most = np.float32(ml_dtypes.finfo(EIGHTS[kind]).max)
        return np.clip(values, -most, most).astype(EIGHTS[kind]).view(np.uint8)
    return values.astype(SHORT[kind]).view(np.uint16)


_stock_load = stock.TritonSemantic.load


def _load(semantic: Any, pointer: Any, mask: Any, other: Any, *rest: Any) -> Any:
    Builder.zero_elsewhere = other is not None
    return _stock_load(semantic, pointer, mask, other, *rest)


def _multiple_of(x: Any, value: Any) -> Any:
    """What a kernel promises the compiler of one number must be so."""
    value = int(getattr(value, "value", value))
    assert not np.any(x.handle.data.astype(np.int64) % value), f"{x.handle.data} are no multiples of {value}"
    return x


_depth = 0


@contextmanager
def interpreting() -> Iterator[None]:
    """`triton.language` computes with NumPy inside, and compiles again outside."""
    global _depth
    _depth += 1
    if _depth > 1:
        try:
            yield
        finally:
            _depth -= 1
        return
    scope = stock._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    builder = stock.interpreter_builder
    kept, options = builder.__class__, builder.options
    try:
        scope.set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.reshape(())))
        scope.set_attr(stock.InterpretedFunction, "__call__", lambda self, *a, **k: self.rewrite()(*a, **k))
        scope.set_attr(JITFunction, "__call__", lambda self, *a, **k: _interpreted(self.fn).rewrite()(*a, **k))
        scope.set_attr(stock.TritonSemantic, "load", _load)
        scope.set_attr(tl, "multiple_of", _multiple_of)
        interpreter_types.install(scope)
        builder.__class__ = Builder
        builder.options = stock.InterpreterOptions(sanitize_overflow=False)  # as without debug: counters of bits wrap
        with np.errstate(all="ignore"):
            yield
    finally:
        builder.__class__, builder.options = kept, options
        scope.restore()
        _depth -= 1


@cache
def _interpreted(function: Callable[..., Any]) -> Any:
    return stock.InterpretedFunction(function)
