"""Lowering, from ops to launches: which kernel, with which constants, on which grid, over which bytes.

A lowering is registered by the op's name and appends launches:

    @lowering("cast")
    def lower_cast(op, c):
        c.launch(cast, dict(n=c.elements(op.x)), dict(BLOCK=1024), grid=lambda s: ...)

Parameters that it does not name are the op's own: y, x, MODE. A kernel that is the whole of an op over its elements or rows needs
no lowering (`kernels.common.kernel`). Nothing here knows addresses: they come when a session binds the launches for a batch and a
length. No Triton, no driver."""

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from barellm.cuda.lang import DeviceFunction
from barellm.program.dtypes import FORMATS
from barellm.program.ops.base import Op
from barellm.program.tensor import Dim, Tensor
from barellm.runtime import registry
from barellm.runtime.lowering import Region, part, weight_operand
from barellm.runtime.registry import Registry

POINTER = {name: "*i16" if f.kind == "code" else f"*{name}" for name, f in FORMATS.items() if not f.planes}
POINTER |= {"e4m3": "*fp8e4nv", "e5m2": "*fp8e5"}  # Triton's names


@dataclass(frozen=True)
class Target:
    """The GPU that kernels are compiled for. `sms`: multiprocessors, which decide the size of persistent grids and never a result;
    `name`: of the card, by which tuned configurations are found."""

    arch: int = 90  # compute capability: 80, 89, 90, 100
    sms: int = 132
    matmul: str = "barellm"  # the GEMM backend where several can: "barellm", "triton" or "cublaslt"
    name: str = ""
    tf32: bool = False  # GEMMs of fp32 operands by tensor cores, which see 10 bits of their fractions
    plain_attention: bool = False  # by Triton's kernels alone, also where Hopper has its own
    config: Any = field(default=None, hash=False)  # of kernels, instead of a tuned or default one (`given_config`)

    @classmethod
    def of(cls, device: Any, matmul: str = "barellm", tf32: bool = False, plain_attention: bool = False) -> "Target":
        """The target of a `driver.Device`."""
        return cls(device.arch, device.sms, matmul, device.name, tf32, plain_attention)

    @property
    def hopper(self) -> bool:
        """Whether wgmma, TMA and mbarriers of sm_90a are there."""
        return self.arch == 90


@dataclass(frozen=True)
class Sizes:
    """The sizes of one run. `others`: of Dims with other names than these two."""

    batch: int = 1
    seq: int = 1
    others: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> "Sizes":
        """The sizes from a number for each name; batch and seq are 1 if they are not among them."""
        known = {name: n for name, n in sizes.items() if name in ("batch", "seq")}
        return cls(**known, others=tuple(sorted((name, n) for name, n in sizes.items() if name not in known)))

    def __getitem__(self, name: str) -> int:
        return {"batch": self.batch, "seq": self.seq, **dict(self.others)}[name]

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    def __str__(self) -> str:
        return f"{self.batch} x {self.seq}"


Size = Callable[[Sizes], int]


@dataclass(frozen=True)
class Count:
    """A `Size` that counts the rows or elements that a tensor has at run time: `inner` times the product of its run-time axes."""

    dims: tuple[str, ...]
    inner: int

    def __call__(self, sizes: Sizes) -> int:
        return self.inner * prod(sizes[d] for d in self.dims)


@dataclass(frozen=True)
class TensorMap:
    """A tensor map (TMA descriptor) of a row-major matrix (rows, columns), whose rows are `stride` elements apart, in boxes of
    `box` = (rows, columns) elements."""

    region: Region
    dtype: str
    rows: Size | int
    columns: int
    box: tuple[int, int]
    stride: int


@dataclass(frozen=True, eq=False)
class Table:
    """Operands of many tensors, for kernels that do all of them in one launch: in device memory, written once when a session is
    made. A column for each field, 8 bytes for each of `entries`.

    `fields`: name -> (type, values): addresses, "*fp32" and the like, of Regions; or numbers, "i64" or "fp64". `writes`: names of
    the fields whose tensors are written."""

    fields: dict[str, tuple[str, list[Any]]]
    writes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert {len(values) for _, values in self.fields.values()} == {self.entries}

    @property
    def entries(self) -> int:
        return len(next(iter(self.fields.values()))[1])

    @property
    def nbytes(self) -> int:
        return 8 * self.entries * len(self.fields)

    @property
    def type(self) -> str:
        return f"table<{self.entries}:{','.join(kind for kind, _ in self.fields.values())}>"

    def regions(self) -> Iterator[tuple[str, Region]]:
        """(field, bytes) of every tensor."""
        for name, (_, values) in self.fields.items():
            yield from ((name, v) for v in values if isinstance(v, Region))

    def packed(self, address: Callable[[Region], int]) -> bytes:
        """The table as it lies in memory."""
        parts = []
        for kind, values in self.fields.values():
            words = [address(v) if isinstance(v, Region) else v for v in values]
            parts.append(struct.pack(f"<{self.entries}{'d' if kind == 'fp64' else 'q'}", *words))
        return b"".join(parts)


@dataclass(frozen=True)
class Counter:
    """A 32-bit counter of the session, for reductions in one launch (`kernels.single_pass_reduction`). It is zero between
    launches. One is enough, because launches follow one another in a stream."""


COUNTER = Counter()
Argument = Region | TensorMap | Table | Counter | int | Size


@dataclass(frozen=True)
class Specialisation:
    """One kernel as it is compiled. `signature` holds the types of the parameters that are not constants; a tensor map's is
    "tensormap<bf16[128,64]>", a table's "table<12:i64,*fp32>", with its entries and fields. `options` go to the compiler
    (num_warps, num_stages, maxnreg)."""

    function: DeviceFunction
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, int], ...]
    aligned: tuple[str, ...]  # pointers that are multiples of 16

    @property
    def name(self) -> str:
        return self.function.name

    @property
    def key(self) -> str:
        return f"{self.function}|{self.signature}|{self.constants}|{self.options}|{self.aligned}"

    @property
    def operands(self) -> tuple[str, ...]:
        return tuple(f"{name} {kind}" for name, kind in self.signature)

    def symbol(self) -> str:
        """The name that tells it from other specialisations."""
        return f"{self.name}_{hashlib.sha256(self.key.encode()).hexdigest()[:12]}"


@dataclass
class Launch:
    """One launch: a specialisation, its arguments in the signature's order, the grid by sizes."""

    spec: Specialisation
    args: list[Argument | None]  # None: the address of the run-time scalars
    grid: Callable[[Sizes], tuple[int, ...]]
    reads: list[Region]
    writes: list[Region]
    op: Op


@dataclass(frozen=True)
class GemmSpec:
    """A GEMM of a library, as `kernels.matmul.append_gemm` means it: gemm_kind, N and K are those there. `dtype`: of both
    operands; `out`: of the result; `epilogue`: "", "gelu", "gelu_backward"; `mode`: how the result is written."""

    gemm_kind: str
    N: int
    K: int
    dtype: str
    out: str
    epilogue: str
    mode: str
    tf32: bool = False
    name: str = "cublaslt"

    def symbol(self) -> str:
        """The name that tells it from other GEMMs."""
        words = [self.name, self.gemm_kind, f"{self.N}x{self.K}", self.dtype, self.out]
        words += ["tf32" if self.tf32 else "", self.epilogue, self.mode]
        return "_".join(word for word in words if word)


@dataclass
class LibraryGemm:
    """One GEMM that a library does, instead of launches. `bias` has the result's dtype, `pre` is GELU's input, written or read,
    `residual` is added."""

    spec: GemmSpec
    out: Region
    a: Region
    b: Region
    bias: Region | None
    pre: Region | None
    residual: Region | None
    workspace: Region
    rows: Size
    op: Op

    @property
    def by_accumulate(self) -> bool:
        """Whether the run's `accumulate` is part of the call."""
        return self.spec.mode == "start"


@dataclass(frozen=True)
class CollectiveSpec:
    """The kind of a collective: the name of its op."""

    op: str
    name: str = "nccl"

    def symbol(self) -> str:
        return f"{self.name}_{self.op}"


@dataclass
class CollectiveCall:
    """A collective's sends and receives: those of an `ops.collectives.Transfer`. `regions`: the bytes of each operand that travel.
    `overlapped`: it starts in the last micro-batch of a step and overlaps the backward pass; it is complete when the program
    ends."""

    spec: CollectiveSpec
    op: Any
    regions: dict[str, list[Region]]
    overlapped: bool = False


Call = Launch | LibraryGemm | CollectiveCall


@dataclass
class _Arguments:
    """The arguments of one launch, in the order of its kernel's parameters, while `Lowering.launch` gathers them. `written`: names
    of the operands that the kernel writes; the lists: as in `Specialisation` and `Launch`."""

    written: set[str]
    signature: list[tuple[str, str]] = field(default_factory=list)
    values: list[Argument | None] = field(default_factory=list)
    reads: list[Region] = field(default_factory=list)
    writes: list[Region] = field(default_factory=list)
    aligned: list[str] = field(default_factory=list)

    def add(self, name: str, kind: str, value: Argument | None, *, aligned: bool = False) -> None:
        self.signature.append((name, kind))
        self.values.append(value)
        if aligned:
            self.aligned.append(name)

    def add_operand(self, name: str, value: Any) -> None:
        """Add an operand of any kind, and what of memory it reads or writes."""
        if isinstance(value, TensorMap):
            self.add(name, f"tensormap<{value.dtype}[{value.box[0]},{value.box[1]}]>", value)
            self._uses(value.region, name in self.written)
        elif isinstance(value, Table):
            self.add(name, value.type, value, aligned=True)
            for field_name, region in value.regions():
                self._uses(region, field_name in value.writes)
        elif isinstance(value, Counter):
            self.add(name, "*i32", value, aligned=True)
        elif isinstance(value, Tensor | tuple):
            region, dtype = value if isinstance(value, tuple) else (part(value), value.dtype)
            self.add(name, POINTER[dtype], region, aligned=region.start % 16 == 0)  # Triton may then load 16 bytes at once
            self._uses(region, name in self.written)
        else:
            self.add(name, "i32", value)

    def _uses(self, region: Region, written: bool) -> None:
        (self.writes if written else self.reads).append(region)


@dataclass
class Lowering:
    """Turns one op into calls: launches, library GEMMs and collectives, in order. `decodes`: whether its program has a KV cache,
    and so runs with a few rows as often as with many. `scratch_tensors`: memory that the op needs while it runs."""

    op: Op
    target: Target
    decodes: bool = False
    launches: list[Call] = field(default_factory=list)
    scratch_tensors: list[Tensor] = field(default_factory=list)

    def scratch(self, name: str, shape: tuple[int, ...], dtype: str = "fp32") -> Tensor:
        """A tensor that lives as long as the op. Shapes are planned maxima."""
        t = Tensor(f"{self.op.name}.{name}", shape, dtype, "scratch")
        self.scratch_tensors.append(t)
        return t

    def rows(self, t: Tensor) -> Count:
        """The number of rows of an activation (..., C), all axes but the last."""
        axes = t.shape[:-1]
        return Count(tuple(n.name for n in axes if isinstance(n, Dim)), prod(n for n in axes if not isinstance(n, Dim)))

    def elements(self, t: Tensor) -> Count:
        return Count(tuple(d.name for d in t.dims), t.width)

    def own(self, name: str) -> Any:
        """What the parameter `name` of a kernel is for this op: a tensor (for a split weight the plane that GEMMs read), an
        attribute, `seq`; or, as constants, MODE, how the first output is written, NAME_MODE that of output NAME, and NAME_STRIDE,
        the elements from a row of NAME to the next. None for what the op does not have."""
        op, (tensor, _, kind) = self.op, name.rpartition("_")
        if kind == "MODE":
            output = tensor.lower() or next(iter(op.outputs))
            return mode(op, output) if output in op.outputs else None
        if name == "seq":
            return lambda s: s.seq
        value = {**op.attrs, **op.inputs, **op.outputs}.get(tensor.lower() if kind == "STRIDE" else name)
        if kind == "STRIDE":
            return value and value.row_stride
        return weight_operand(value) if isinstance(value, Tensor) else value

    def launch(
        self, function: DeviceFunction, operands: dict[str, Any], constants: dict[str, Any] | None = None,
        *, grid: Callable[[Sizes], tuple[int, ...]], writes: str = "", warps: int = 4, stages: int = 3, registers: int = 0,
    ) -> None:  # fmt: skip
        """Append a launch of `function`. Its parameters are the names in `operands` and `constants`, `scalars`, which is filled in,
        and the op's own (`own`). An operand is a Tensor, (Region, dtype), a TensorMap, a Table, COUNTER, an int or a Size (both
        i32), or None where an optional tensor is absent (a constant None in the code). `writes`: names of the operands that are
        written, by spaces; without them the op's outputs. `grid`: of the sizes of a run. `warps`, `stages`, `registers`:
        num_warps, num_stages and maxnreg of the compiler (0: it decides)."""
        fixed = dict(constants or {})
        arguments = _Arguments(set(writes.split() or self.op.outputs))
        for name in function.parameters:
            if name == "scalars":
                arguments.add(name, "*i64", None, aligned=True)
            elif name not in fixed:
                value = operands[name] if name in operands else self.own(name)
                if value is None or name in function.constants:
                    fixed[name] = value
                else:
                    arguments.add_operand(name, value)
        unknown = (set(operands) | set(fixed)) - set(function.parameters)
        assert not unknown, f"{function} has no parameters {sorted(unknown)}"
        assert warps in (1, 2, 4, 8, 16, 32), f"{function} by {warps} warps, expected a power of two up to 32"
        options = {"num_warps": warps, "num_stages": stages} | ({"maxnreg": registers} if registers else {})
        pairs = tuple(sorted(fixed.items())), tuple(sorted(options.items()))
        spec = Specialisation(function, tuple(arguments.signature), *pairs, tuple(arguments.aligned))
        self.launches.append(Launch(spec, arguments.values, grid, arguments.reads, arguments.writes, self.op))


REGISTRY: Registry[Lowering] = Registry("cuda", floats=("fp32", "bf16", "fp16"))
lowering = REGISTRY.lowering
MODES = {name: i for i, name in enumerate(registry.MODES)}


def mode(op: Op, output: str) -> int:
    """How an output is written (stored, added, by the run), as the constant MODE of `kernels.common.store_or_add`."""
    return MODES[op.modes[output]]
