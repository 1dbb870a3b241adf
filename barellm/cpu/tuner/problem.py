"""GEMM problems to tune: their sizes, the specialisations that programs call, and their operands."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from barellm.cpu import tuning
from barellm.cpu.gemm_config import SKINNY_KIND, default
from barellm.cpu.isa import ISA
from barellm.cpu.kernel import Call, Emit, Specialisation, positional
from barellm.cpu.kernels.gemm import gemm, linear, weight_gradient
from barellm.cpu.kernels.gemm.skinny_gemm import FEW, skinny_configs, skinny_gemm
from barellm.program.dtypes import itemsize
from barellm.program.integers import ceil_div
from barellm.program.ops.gemm.block_squares import BLOCK
from barellm.runtime.lowering import Region
from barellm.runtime.tuner.problem import Gemm


@dataclass(frozen=True)
class Operand:
    """`shape` of the planned operand, (columns,) or (rows, columns). Integers of a call have none and are not operands."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    written: bool

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True)
class GemmProblem(Gemm):
    """A GEMM that programs call. `operation`: its `gemm_kind`, `skinny_kind` or "weight_gradient". A run may have fewer `tokens`:
    rows, or the depth of a weight gradient. `specs` have their default config; programs call the first most often."""

    specs: tuple[Specialisation, ...]
    operands: tuple[tuple[Operand | None, ...], ...]  # of each specialisation, by position; None: absent, or an integer

    @property
    def tokens(self) -> int:
        return self.depth if self.operation == "weight_gradient" else self.rows

    @property
    def skinny(self) -> bool:
        """Whether it is a skinny GEMM: checked for up to FEW rows, timed for one (decoding)."""
        return self.operation.startswith(SKINNY_KIND)

    @property
    def timed(self) -> int:
        """Tokens of a run that is timed."""
        return 1 if self.skinny else self.tokens

    @property
    def flops(self) -> int:
        return super().flops // self.rows if self.skinny else super().flops

    def default(self, isa: ISA) -> Any:
        """The untuned config: a SkinnyGemmConfig if `skinny`, else a GemmConfig."""
        if self.skinny:
            return skinny_configs(isa, self.dtype, self.cols, self.depth)[0]
        return default(isa, self.operation, self.dtype, self.cols, self.depth, self.rows)

    def key(self, isa: ISA, threads: int) -> str:
        return tuning.key(isa, threads, self.operation, self.dtype, self.cols, self.depth, self.rows)


def configured(spec: Specialisation, config: Any, emit: Emit | None = None) -> Specialisation:
    """The specialisation with another config, and with another kernel where a self-test injects one."""
    constants = dict(spec.constants) | {"config": config}
    return replace(spec, emit=emit or spec.emit, constants=tuple(sorted(constants.items())))


def problems_of(calls: Iterable[Call]) -> list[GemmProblem]:
    """The distinct GEMMs among `calls`, those with most operations first, each with the kernel instances that compute it."""
    specs_by_gemm: dict[Gemm, dict[Specialisation, tuple[int, tuple[Operand | None, ...]]]] = {}
    for call in calls:
        if call.spec.emit not in (gemm.gemm, weight_gradient.weight_gradient, skinny_gemm):
            continue
        sizes, operands = _described(call)
        specs = specs_by_gemm.setdefault(sizes, {})
        # The harness passes the number of rows as a scalar, with contiguous rows. How a program counts them and the row strides of
        # its views make no difference to the tuning.
        constants = dict(call.spec.constants) | {"dims": ("batch", "seq"), "inner": 1}
        constants.pop("strides", None)
        spec = replace(call.spec, constants=tuple(sorted(constants.items())))
        count, _ = specs.get(spec, (0, operands))
        specs[spec] = count + 1, operands
    problems = []
    for sizes, specs in specs_by_gemm.items():
        order = sorted(specs, key=lambda spec: -specs[spec][0])
        problems.append(GemmProblem(**vars(sizes), specs=tuple(order), operands=tuple(specs[spec][1] for spec in order)))
    return sorted(problems, key=lambda problem: -problem.flops)


def _described(call: Call) -> tuple[Gemm, tuple[Operand | None, ...]]:
    """(sizes of the GEMM that a call computes, its operands by position: None for an absent one or an integer)."""
    names = positional(call.spec.emit)
    dtypes = {name: kind for name, kind in zip(names, call.spec.operands, strict=True) if kind is not None}
    args = dict(zip(dtypes, call.args, strict=True))  # an absent operand has no argument
    sizes, shapes = _sizes_and_shapes(call, dtypes, args)
    operands: list[Operand | None] = []
    for name in names:
        region = args.get(name)
        is_tensor = isinstance(region, Region)
        operands.append(Operand(name, dtypes[name], shapes[name], written=region in call.writes) if is_tensor else None)
    return sizes, tuple(operands)


def _sizes_and_shapes(call: Call, dtypes: dict[str, str], args: dict[str, Any]) -> tuple[Gemm, dict[str, tuple[int, ...]]]:
    """(sizes of the GEMM, the shape of each operand by name) of a call; `dtypes`, `args`: of its operands. A weight gradient has
    N x K results and the tokens as depth; a skinny GEMM is sized at FEW rows, whatever a run has."""
    constants, inputs = dict(call.spec.constants), call.op.inputs
    skinny = call.spec.emit is skinny_gemm
    activation = inputs["x"] if "x" in inputs else inputs["dy"]
    tokens = FEW if skinny else linear.tokens_of(activation, (0, args["row_limit"]))
    if call.spec.emit is weight_gradient.weight_gradient:
        N, K = constants["N"], constants["K"]
        squares = ceil_div(N, BLOCK), ceil_div(K, BLOCK)
        shapes = {"dweight": (N, K), "dy": (tokens, N), "x": (tokens, K), "squares": squares}
        return Gemm("weight_gradient", dtypes["dy"], N, K, tokens), shapes
    cols, depth, epilogues = constants["cols"], constants["depth"], constants["epilogues"]
    transposed = constants.get("transposed", True)
    kind = linear.skinny_kind(epilogues) if skinny else linear.gemm_kind(transposed, epilogues)
    result = (tokens, cols)
    shapes = {"out": result, "second": result, "other": result, "a": (tokens, depth), "bias": (cols,)}
    shapes["weight"] = (cols, depth) if transposed else (depth, cols)
    return Gemm(kind, dtypes["a"], tokens, cols, depth), shapes
