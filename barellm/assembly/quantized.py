"""A model whose matrices have few bits: programs that multiply with codes, and how weights become codes while they are loaded."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from barellm.program import ops, quantization
from barellm.program.builder import Program, Store
from barellm.program.dtypes import format_of
from barellm.program.ops.base import Op, Tensor
from barellm.runtime.session import Session

HEAD = "int8"  # the classifier's matrix: a few percent of a model's bytes, and the one whose errors reach the loss unmixed

TOGETHER = 16 * quantization.TILE  # rows that are quantised at a time: what is made of them on the way stays in the caches


@dataclass(frozen=True)
class Matrix:
    """A parameter (N, K), and the codes that matmuls read instead. It `stays` if another op, as an embedding, reads it too."""

    parameter: Tensor
    how: quantization.Scheme
    codes: Tensor
    scales: Tensor
    stays: bool


def products_of(p: Program) -> list[Op]:
    """The matmuls of a program that can read codes; the last is the model's classifier."""
    return [op for op in p.ops if op.name == "matmul" and op.weight.role == "parameter"]


def quantize_programs(programs: Mapping[str, Program], weights: str) -> dict[str, Matrix]:
    """Rewrite forward-only programs so that matmuls read quantized weights: {parameter name: its matrix}. The last matmul, the
    classifier, uses HEAD instead if `weights` have fewer bits."""
    store = next(iter(programs.values())).store
    found: dict[str, Matrix] = {}
    for p in programs.values():
        products = products_of(p)
        for op in products:
            name = op.weight.name
            if name not in found:
                how = quantization.scheme(HEAD if op.weight is products[-1].weight else weights)
                found[name] = _matrix(store, op.weight, how)
            p.ops[p.ops.index(op)] = _with_codes(op, found[name])
    _leave_out(programs, found)
    return found


def quantize_frozen(programs: dict[str, Program], weights: str) -> None:
    """Rewrite the matmuls with frozen weights, and those of their input gradients, to read quantized weights (QLoRA, Dettmers et
    al. 2023). Embedding and head are not quantized. The matrices are put into `store.matrices`."""
    store = next(iter(programs.values())).store
    how = quantization.scheme(weights)
    for p in programs.values():
        for i, op in enumerate(p.ops):
            if op.name in ("matmul", "matmul_dx") and (t := store.linears.get(op.weight.name)) is not None and t.frozen:
                if t.name not in store.matrices:
                    store.matrices[t.name] = _matrix(store, t, how)
                p.ops[i] = _with_codes(op, store.matrices[t.name])
    del programs["init_frozen"]  # `CompiledModel.initialize` draws the whole base in a session of its own
    _leave_out(programs, store.matrices)


def _with_codes(op: Op, m: Matrix) -> Op:
    """The same matmul, reading quantized weights."""
    attrs = {"weights": m.how.name, "columns": int(op.weight.shape[0])} | op.attrs
    operands: dict[str, Tensor | None] = {"codes": m.codes, "scales": m.scales}
    if op.name == "matmul":
        made: Op = ops.QuantizedMatmul({"x": op.x} | operands, attrs)
    else:
        made = ops.QuantizedMatmulDx({"dy": op.dy} | operands, attrs | {"depth": int(op.weight.shape[1])})
    made.outputs, made.modes, made.segment, made.recomputed = op.outputs, op.modes, op.segment, op.recomputed
    return made


def _leave_out(programs: Mapping[str, Program], found: dict[str, Matrix]) -> None:
    """Take the parameters that are codes now out of the store, but for those that other ops read."""
    store = next(iter(programs.values())).store
    read = {t.base for p in programs.values() for op in p.ops for t in op.inputs.values()}
    for name, m in found.items():
        if m.parameter in read:
            found[name] = Matrix(m.parameter, m.how, m.codes, m.scales, True)
        else:
            del store.tensors[name]


def _matrix(store: Store, parameter: Tensor, how: quantization.Scheme) -> Matrix:
    codes, scales = how.shapes(*(int(n) for n in parameter.shape))
    return Matrix(
        parameter, how, store.get(f"{parameter.name}.codes", codes, how.codes, "parameter", frozen=True),
        store.get(f"{parameter.name}.scales", scales, "fp16", "parameter", frozen=True), False,
    )  # fmt: skip


def keep_operands(programs: Mapping[str, Program], bf16: Collection[str]) -> None:
    """Store of each matrix of forward-only programs what GEMMs read of it alone, half of bf16_i16, with the same results: unless
    another op reads all bits of a weight, as an embedding does, and it is not one of `bf16`, which have no more."""
    store = next(iter(programs.values())).store
    readers: dict[Tensor, set[str]] = {}
    for p in programs.values():
        for op in p.ops:
            for t in op.inputs.values():
                readers.setdefault(t.base, set()).add(op.name)
    for t in store.of_role("parameter"):
        exact = t in store.exact and not (t.name in bf16 and t.dtype == "bf16_i16")
        if t in readers and readers[t] <= {"matmul", "embedding"} and not exact:
            t.dtype = format_of(t.dtype).operand


class Quantizing:
    """The session of such programs as a loader of weights sees it: it has the parameters that the model declares, and rows that are
    written to one whose matmuls read codes become codes. Rows are written in their order."""

    def __init__(self, session: Session, matrices: Mapping[str, Matrix]) -> None:
        self.session, self.matrices = session, matrices
        made = {t.name for m in matrices.values() for t in (m.codes, m.scales)}
        self.tensors = {name: t for name, t in session.tensors.items() if name not in made}
        self.tensors |= {name: m.parameter for name, m in matrices.items()}
        self._left: dict[str, np.ndarray] = {}  # rows that are no whole tile yet

    def write_rows(self, name: str, lo: int, array: np.ndarray) -> None:
        """Write rows of a parameter, in order; quantized ones are collected to whole tiles and encoded."""
        m = self.matrices.get(name)
        if m is None or m.stays:
            self.session.write_rows(name, lo, array)
        if m is None:
            return
        pending = self._left.pop(name, array[:0])
        first, end = lo - len(pending), lo + len(array)
        assert first % quantization.TILE == 0, f"rows of {name} from {lo} on do not follow those before"
        rows = np.concatenate([pending, array])
        complete = len(rows) if end == m.parameter.shape[0] else len(rows) // quantization.TILE * quantization.TILE
        if complete < len(rows):
            self._left[name] = rows[complete:].copy()
        for at in range(0, complete, TOGETHER):
            tile_rows = rows[at : min(at + TOGETHER, complete)]
            self.write_codes(name, first + at, *quantization.quantize(tile_rows, m.how, name=name, first=first + at))

    def write_codes(self, name: str, lo: int, codes: np.ndarray, scales: np.ndarray) -> None:
        """Set rows from `lo` on, a multiple of a tile, which are codes already."""
        m = self.matrices[name]
        for t, array in zip((m.codes, m.scales), quantization.pack(codes, scales, m.how), strict=True):
            self.session.write_rows(t.name, lo // quantization.TILE, array)
