"""A product to tune: the specialisations that programs use it by, and what their operands are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from barellm.cpu import tuning
from barellm.cpu.gemm_config import FEW_ROLE, default
from barellm.cpu.isa import ISA
from barellm.cpu.kernel import Call, Emit, Specialisation, positional
from barellm.cpu.kernels.gemm import gemm, weight_gradient
from barellm.cpu.kernels.gemm.linear import few_role_of, role_of, tokens_of
from barellm.cpu.kernels.gemm.skinny_gemm import FEW, skinny_configs, skinny_gemm
from barellm.program.dtypes import itemsize
from barellm.program.integers import ceil_div
from barellm.program.ops.gemm.block_squares import BLOCK
from barellm.runtime.lowering import Region


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
class Work:
    """`rows` x `cols` of a result from a contraction of `depth`; `tokens`: which of those a run may lessen is its rows, or the
    depth of a weight gradient. `specs` with their default choice; the first is the one that programs call most."""

    role: str
    dtype: str
    cols: int
    depth: int
    rows: int
    specs: tuple[Specialisation, ...]
    operands: tuple[tuple[Operand | None, ...], ...]  # of each specialisation, by position; None: absent, or an integer

    @property
    def tokens(self) -> int:
        return self.depth if self.role == "weight_gradient" else self.rows

    @property
    def few(self) -> bool:
        """Whether it is a product of few rows: right for up to FEW, and timed for one, as text is written."""
        return self.role.startswith(FEW_ROLE)

    @property
    def timed(self) -> int:
        """Tokens of a run that is timed."""
        return 1 if self.few else self.tokens

    @property
    def flops(self) -> int:
        return 2 * (self.timed if self.few else self.rows) * self.cols * self.depth

    @property
    def sizes(self) -> dict[str, int]:
        return {"rows": self.rows, "cols": self.cols, "depth": self.depth}

    def default(self, isa: ISA) -> Any:
        """The choice where nothing was tuned: a FewChoice if `few`, else a Choice."""
        if self.few:
            return skinny_configs(isa, self.dtype, self.cols, self.depth)[0]
        return default(isa, self.role, self.dtype, self.cols, self.depth, self.rows)

    def key(self, isa: ISA, threads: int) -> str:
        return tuning.key(isa, threads, self.role, self.dtype, self.cols, self.depth, self.rows)

    def __str__(self) -> str:
        return f"{self.role} {self.rows} x {self.cols} from {self.depth} {self.dtype}"


@dataclass(frozen=True)
class Candidate:
    """A way to do the work: the choice, and a kernel other than its own where a self-test injects one."""

    choice: Any  # a Choice, or of few rows a FewChoice
    emit: Emit | None = None

    def spec(self, of: Specialisation) -> Specialisation:
        constants = dict(of.constants) | {"choice": self.choice}
        return replace(of, emit=self.emit or of.emit, constants=tuple(sorted(constants.items())))

    def __str__(self) -> str:
        return f"{self.emit.__name__} {self.choice}" if self.emit else str(self.choice)


def works_of(calls: Iterable[Call]) -> list[Work]:
    """The products among `calls`, each once, those with most operations first."""
    found: dict[tuple[str, str, int, int, int], dict[Specialisation, tuple[int, tuple[Operand | None, ...]]]] = {}
    for call in calls:
        if call.spec.emit not in (gemm.product, weight_gradient.weight_gradient, skinny_gemm):
            continue
        product, operands = _described(call)
        specs = found.setdefault(product, {})
        # The bed says by its scalars how many rows a run has, and lays them side by side. How a program counts them and how far
        # apart the rows of its views lie make no difference to the tuning.
        constants = dict(call.spec.constants) | {"dims": ("batch", "seq"), "inner": 1}
        constants.pop("strides", None)
        spec = replace(call.spec, constants=tuple(sorted(constants.items())))
        count, _ = specs.get(spec, (0, operands))
        specs[spec] = count + 1, operands
    works = []
    for product, specs in found.items():
        order = sorted(specs, key=lambda spec: -specs[spec][0])
        works.append(Work(*product, tuple(order), tuple(specs[spec][1] for spec in order)))
    return sorted(works, key=lambda w: -w.flops)


def _described(call: Call) -> tuple[tuple[str, str, int, int, int], tuple[Operand | None, ...]]:
    """The (role, dtype, cols, depth, rows) of a call, and its operands."""
    constants = dict(call.spec.constants)
    names, kinds = positional(call.spec.emit), [str(kind or "") for kind in call.spec.operands]
    args = iter(call.args)
    given = {name: next(args) for name, kind in zip(names, kinds, strict=True) if kind}
    dtypes = dict(zip(names, kinds, strict=True))
    few = call.spec.emit is skinny_gemm
    limit, inputs = FEW if few else given["row_limit"], call.op.inputs
    assert isinstance(limit, int)
    tokens = FEW if few else tokens_of(inputs["x"] if "x" in inputs else inputs["dy"], (0, limit))
    if call.spec.emit is weight_gradient.weight_gradient:
        N, K = constants["N"], constants["K"]
        product = ("weight_gradient", dtypes["dy"], K, tokens, N)
        shapes = {"dweight": (N, K), "dy": (tokens, N), "x": (tokens, K)}
        shapes["squares"] = ceil_div(N, BLOCK), ceil_div(K, BLOCK)
    else:
        cols, depth, transposed = constants["cols"], constants["depth"], constants.get("transposed", True)
        role = few_role_of(constants["epilogues"]) if few else role_of(transposed, constants["epilogues"])
        product = (role, dtypes["a"], cols, depth, tokens)
        shapes = dict.fromkeys(("out", "second", "other"), (tokens, cols))
        shapes |= {"a": (tokens, depth), "bias": (cols,), "weight": (cols, depth) if transposed else (depth, cols)}
    operands = [
        Operand(name, dtypes[name], shapes[name], given[name] in call.writes)
        if isinstance(given.get(name), Region)
        else None
        for name in names
    ]
    return product, tuple(operands)
