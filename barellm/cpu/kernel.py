"""Kernels as Python functions: registration, specialisation, and what they see of the machine.

    @kernel("layernorm", constants=lambda op: {"C": op.x.shape[-1], "eps": op.eps})
    def layernorm(k, y, mean, rstd, x, weight, bias, *, C, eps): ...

Positional parameters are the op's tensors by name, given as typed Pointers (None where an optional one is absent), or integers that
differ between ops which share the code: attributes of the op, or what a lowering passes. Keyword-only parameters are constants of
the code. One specialisation is compiled for each combination of dtypes and constants, and shared by all ops that need it.

What files of kernels need has its name here too: ISA, Op, Tensor, operands of calls (`runtime.lowering`), PLANES (dtypes of
weights in two planes), and of the kernel language Pointer, Value and Var."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from barellm.cpu import sources
from barellm.cpu.extern import Prepare, callback, extern
from barellm.cpu.isa import ISA
from barellm.cpu.lang import Pointer, Value, Var
from barellm.cpu.specialisation import Emit, KernelBuilder, Specialisation
from barellm.program.dtypes import PLANES
from barellm.program.ops.base import Op, Tensor
from barellm.program.tensor import Dim
from barellm.runtime.lowering import Region, part, plane, rows_of, share, view_stride, weight_operand
from barellm.runtime.registry import Registry

__all__ = [
    "ISA", "PLANES", "REGISTRY", "Call", "Emit", "KernelBuilder", "Lowering", "Op", "Pointer", "Region", "Specialisation", "Tensor",
    "Value", "Var", "dims_of", "kernel", "lowering", "part", "plane", "positional", "rows_of", "share", "view_stride",
    "weight_operand",
]  # fmt: skip


@dataclass
class Call:
    """One entry of the step's table: a specialisation and its arguments, before addresses are known."""

    spec: Specialisation
    args: list[Region | int]
    reads: list[Region]
    writes: list[Region]
    op: Op
    keeps: object = None  # what must live as long as the call may run


@dataclass
class Lowering:
    """Lowers one op to calls. `threads` may size scratch, never the result. `skinny_gemm`: runs may have few rows, for which GEMMs
    get a second kernel. `config`: a GEMM config to use instead of a tuned or default one (`given_config`)."""

    op: Op
    isa: ISA
    threads: int
    skinny_gemm: bool = False
    config: Any = None
    calls: list[Call] = field(default_factory=list)
    scratch_tensors: list[Tensor] = field(default_factory=list)
    thread_scratch_bytes: int = 0

    def workspace(self, name: str, nbytes: int) -> Tensor:
        """A tensor of `nbytes` bytes, shared by all threads, that lives as long as the op."""
        t = Tensor(f"{self.op.name}.{name}", (nbytes // 2 + nbytes % 2,), "bf16", "scratch")
        self.scratch_tensors.append(t)
        return t

    def thread_scratch(self, nbytes: int) -> None:
        """Bytes of each thread's own scratch, at `k.private()`."""
        self.thread_scratch_bytes = max(self.thread_scratch_bytes, nbytes)

    def own(self, name: str) -> Any:
        """The operand of the op called `name`: a tensor (for a split weight the plane that GEMMs read), an attribute, or None."""
        value = {**self.op.attrs, **self.op.inputs, **self.op.outputs}.get(name)
        return weight_operand(value) if isinstance(value, Tensor) else value

    def call(self, emit: Emit, operands: dict[str, Any], constants: dict[str, Any] | None = None, *, writes: str = "") -> None:
        """Append a call of `emit`. An operand is a Tensor, (Region, dtype), an int, or None; those that are not given are the op's
        own. `writes` names the written ones, "": the op's outputs."""
        written = set(writes.split() or self.op.outputs)
        kinds: list[str | None] = []
        args: list[Region | int] = []
        reads: list[Region] = []
        out: list[Region] = []
        for name in positional(emit):
            value = operands[name] if name in operands else self.own(name)
            if value is None:
                kinds.append(None)
                continue
            if isinstance(value, int):
                kinds.append("int")
                args.append(value)
                continue
            region, dtype = value if isinstance(value, tuple) else (part(value), value.dtype)
            kinds.append(dtype)
            args.append(region)
            (out if name in written else reads).append(region)
        spec = Specialisation(emit, tuple(kinds), tuple(sorted((constants or {}).items())))
        self.calls.append(Call(spec, args, reads, out, self.op))

    def extern(self, prepare: Prepare, reads: list[Region], writes: list[Region], *, scalar: str = "") -> None:
        """Append a call out of the step (`cpu.extern`) that reads and writes these bytes; with `scalar` only if that is not 0."""
        target, kept = callback(prepare, [*reads, *writes])
        spec = Specialisation(extern, ("int",), (("scalar", scalar),))
        self.calls.append(Call(spec, [target, *reads, *writes], reads, writes, self.op, kept))


def positional(emit: Emit) -> list[str]:
    """Names of a kernel's operands: its parameters behind the builder and before the constants."""
    code = emit.__code__
    return list(code.co_varnames[1 : code.co_argcount])


def constant_names(emit: Emit) -> tuple[str, ...]:
    """Names of a kernel's keyword-only parameters. (`inspect.signature` took a tenth of a warm start.)"""
    code = emit.__code__
    return code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]


REGISTRY: Registry[Lowering] = Registry("cpu", floats=("fp32", "bf16", "fp16"), replaced=sources.forget)
lowering = REGISTRY.lowering  # of ops for which one kernel call is not enough


def kernel(op_name: str, *, constants: Callable[[Any], dict[str, Any]] = lambda op: {}, **takes: Any) -> Callable[[Emit], Emit]:
    """Register a kernel that is all of `op_name`. Constants `mode_<output>` are filled in from the op: an output that has one can
    be added to and started. `takes`: further arguments of `Registry.add`."""

    def register(emit: Emit) -> Emit:
        moded = [name.removeprefix("mode_") for name in constant_names(emit) if name.startswith("mode_")]

        def lower(c: Lowering) -> None:
            c.call(emit, {}, constants(c.op) | {f"mode_{name}": c.op.modes[name] for name in moded})

        REGISTRY.add(op_name, lower, starts=" ".join(moded), **takes)
        return emit

    return register


def batch_and_seq(tensor: Tensor) -> dict[str, int | str]:
    """The first two sizes of a tensor as constants, which `k.size` takes: a number, or the name of the run-time size."""
    return {key: n.name if isinstance(n, Dim) else int(n) for key, n in zip(("batch", "seq"), tensor.shape, strict=False)}


def dims_of(tensor: Tensor) -> tuple[str, ...]:
    """Names of the run-time sizes of a tensor, the constant that `k.num_elements` takes."""
    return tuple(d.name for d in tensor.dims)
