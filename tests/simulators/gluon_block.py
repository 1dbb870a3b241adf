"""A Gluon kernel without roles, one block after the other in NumPy: its own functions, run as they stand.

All warps of such a block do the same, and what they bring to shared memory comes by cp.async, in groups. A copy arrives when its
group is waited for, or as soon as it is started: what a kernel reads before it has waited, or overwrites while it still needs it,
then differs. Where elements lie in registers, and barriers between warps, are not modelled: the PTX machine has both.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from barellm.cuda.kernel import Specialisation
from barellm.cuda.kernels.gemm.quantized_mma import INT4_BF16, INT4_FP16, NF4_BF16, NF4_FP16
from barellm.program.quantization import INTEGERS, NORMAL_QUANTILES
from tests.simulators import gluon_stub
from tests.simulators.gluon_machine import DTYPES, _memory
from tests.simulators.gluon_stub import Fault, Layout, materialised

TYPES = DTYPES | {"i32": np.dtype(np.int32)}  # of operands
GARBAGE = 0x5A


class Values(np.ndarray):
    """A tensor in registers."""

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=None)

    def permute(self, order: tuple[int, ...]) -> Values:
        return self.transpose(order)

    def to(self, dtype: np.dtype, bitcast: bool = False) -> Values:
        return self.view(dtype) if bitcast else self.astype(dtype)


def values(array: Any) -> Values:
    return np.asarray(array).view(Values)


class Pointers:
    """Addresses in global memory, as numbers of elements of an operand."""

    def __init__(self, operand: np.ndarray, at: Any = 0) -> None:
        self.operand, self.at = operand, at

    def __add__(self, more: Any) -> Pointers:
        return Pointers(self.operand, self.at + more)

    def inside(self, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of the elements that a mask leaves, and the mask. Fault where one is outside the operand."""
        at = np.asarray(self.at)
        mask = np.broadcast_to(True if mask is None else np.asarray(mask), at.shape)
        found = at[mask]
        if found.size and (found.min() < 0 or found.max() >= self.operand.size):
            raise Fault(f"element {found.min()} or {found.max()} of {self.operand.size}")
        return found, mask

    def read(self, mask: Any, other: Any) -> Values:
        at, mask = self.inside(mask)
        found = np.full(mask.shape, other, self.operand.dtype)
        found[mask] = self.operand[at]
        return values(found)


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape = array, array.shape

    def index(self, i: int) -> Shared:
        assert 0 <= i < self.shape[0]
        return Shared(self.array[i])

    def slice(self, start: int, length: int, dim: int) -> Shared:
        assert dim == 1 and start + length <= self.shape[1]
        return Shared(self.array[:, start : start + length])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.array.transpose(order))

    def load(self, layout: Any) -> Values:
        return values(self.array.copy())


class Block:
    """Where a block is in its grid, and its copies: those of no group yet, and the groups under way."""

    def __init__(self, at: tuple[int, ...], early: bool) -> None:
        self.at, self.early = at, early
        self.open: list[Callable[[], None]] = []
        self.groups: list[list[Callable[[], None]]] = []

    def copy(self, to: Shared, pointers: Pointers, mask: Any) -> None:
        assert to.shape == np.shape(pointers.at) == np.shape(mask), (to.shape, np.shape(pointers.at))
        pointers.inside(mask)
        to.array.view(np.uint8)[...] = GARBAGE

        def arrive() -> None:
            to.array[...] = pointers.read(mask, 0)

        if self.early:
            arrive()
        self.open.append(arrive)

    def commit(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait(self, pending: int) -> None:
        while len(self.groups) > pending:
            for arrive in self.groups.pop(0):
                if not self.early:
                    arrive()

    def settled(self) -> None:
        """What a conversion of layouts needs: it goes through shared memory, and may lie where the copies go."""
        if self.open or any(self.groups):
            raise Fault("a layout is converted while copies are under way")


BLOCK = Block((), False)


def _allocate(dtype: np.dtype, shape: list[int], layout: Any) -> Shared:
    return Shared(np.full((*shape[:-1], shape[-1] * dtype.itemsize), GARBAGE, np.uint8).view(dtype))


def _convert(x: Values, layout: Any, assert_trivial: bool = False) -> Values:
    if not assert_trivial:
        BLOCK.settled()
    return x


def _store(to: Pointers, value: Any, mask: Any = None) -> None:
    at, mask = to.inside(mask)
    to.operand[at] = np.asarray(value)[mask]


def _codes(x: Any, table: tuple[float, ...]) -> Callable[[Values, Values, Values], Values]:
    """Sums (warps, 2, 8, 4, 2) of 16 columns, odd ones apart, and 8 rows. Words (warps, ., 8, 4, .) have the codes of two columns,
    four elements each; pairs (warps, ., 8, 4, 2), of the rows, two elements of `x` each."""

    def multiplied(words: Values, pairs: Values, sums: Values) -> Values:
        nibbles = (np.asarray(words)[:, 0, :, :, 0, None] >> np.arange(0, 32, 4)) & 15  # (warps, 8, 4, 8)
        value = np.array(table)[nibbles.reshape(*nibbles.shape[:3], 2, 2, 2)]  # column, element, four elements on
        given = np.ascontiguousarray(pairs[:, 0]).view(x).astype(np.float64).reshape(*pairs.shape[:1], 8, 4, 2, 2)
        found = np.einsum("wgthbe,wnteb->whgn", value, given).reshape(sums.shape)
        return (sums + found).astype(np.float32)

    return multiplied


ASM: dict[str, Callable[..., Values]] = {}
for _dtype, _integers, _normal in ((ml_dtypes.bfloat16, INT4_BF16, NF4_BF16), (np.float16, INT4_FP16, NF4_FP16)):
    ASM |= {_integers.value: _codes(_dtype, INTEGERS), _normal.value: _codes(_dtype, NORMAL_QUANTILES)}
LAYOUTS = ("NVMMADistributedLayout", "DistributedLinearLayout", "SwizzledSharedLayout", "BlockedLayout", "SliceLayout",
           "DotOperandLayout")  # fmt: skip
gl = types.SimpleNamespace(
    int32=np.dtype(np.int32), uint32=np.dtype(np.uint32), int64=np.dtype(np.int64), float32=np.dtype(np.float32),
    constexpr=None, **dict.fromkeys(LAYOUTS, Layout), static_range=range, cdiv=lambda a, b: -(-a // b),
    program_id=lambda axis: values(np.int32((*BLOCK.at, 0, 0)[axis])), allocate_shared_memory=_allocate,
    zeros=lambda shape, dtype, layout: values(np.zeros(shape, dtype)),
    arange=lambda start, stop, layout: values(np.arange(start, stop, dtype=np.int32)),
    sum=lambda x, axis: x.sum(axis, dtype=x.dtype), expand_dims=np.expand_dims, convert_layout=_convert, store=_store,
    load=lambda at, mask=None, other=0: at.read(mask, other),
    broadcast=lambda x, y: [values(v) for v in np.broadcast_arrays(x, y)],
    inline_asm_elementwise=lambda asm, constraints, args, *how, **more: ASM[asm](*args),
)  # fmt: skip
tl = types.SimpleNamespace(
    constexpr=None, load=gl.load, store=_store, uint32=gl.uint32, float32=gl.float32, exp2=np.exp2, where=np.where,
    inline_asm_elementwise=lambda asm, constraints, args, *how: gluon_stub.ASM[asm](*args),
)  # fmt: skip
ampere = types.SimpleNamespace(
    async_copy=types.SimpleNamespace(
        async_copy_global_to_shared=lambda to, pointers, mask: BLOCK.copy(to, pointers, mask),
        commit_group=lambda: BLOCK.commit(),
        wait_group=lambda pending: BLOCK.wait(pending),
    )
)
STUBS = {"triton.language": tl, "triton.experimental.gluon.language": gl}
STUBS["triton.experimental.gluon.language.nvidia.ampere"] = ampere


def execute(spec: Specialisation, given: Sequence[Any], grid: tuple[int, ...], backward: bool, kernel: Any = None) -> None:
    """All blocks of a launch, as interpreter.execute has it. Copies arrive early where blocks go backward. `kernel`: instead of the
    specialisation's own."""
    global BLOCK
    kernel = kernel or materialised(spec.function, stubs=STUBS)
    args: dict[str, Any] = dict(spec.constants)
    for (name, type_), value in zip(spec.signature, given, strict=True):
        if not isinstance(value, int):
            memory = _memory(value.address, value.stop, TYPES[type_.removeprefix("*")])
            memory.flags.writeable = value.writable
            value = Pointers(memory)
        args[name] = value
    blocks = [(x, y) for y in range((*grid, 1)[1]) for x in range(grid[0])]
    for at in reversed(blocks) if backward else blocks:
        BLOCK = Block(at, early=backward)
        kernel(**args)
