"""One op on a backend against its float64 reference: what the kernel tests of every backend share.

The arena is filled with NaN before a run; afterwards inputs, the bytes beyond the actual sizes and the gaps must be as they
were, the outputs within their bound of the reference, and the bits equal for every variant of the run.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from barellm.program.builder import Program, Store
from barellm.program.dtypes import FORMATS, decode, encode
from barellm.program.ops.base import Op
from barellm.program.tensor import Dim, Tensor, View

EPS = 2.0**-24
ROUNDING = {name: f.half_ulp for name, f in FORMATS.items()}
SCALARS = {"pos": 0, "accumulate": 0, "step": 1, "seed": 0, "sample": 0, "lr": 1e-3, "inv_targets": 1.0}
RUN_TIME_AXES = {"tokens": 2, "sequences": 1}  # by the kind of an operand


@dataclass
class Given:
    """An operand: values as float64 that its dtype holds exactly. Kind "tokens": the first two axes are batch and seq. Kind
    "sequences": the first is batch. Other kinds are roles of persistent tensors."""

    values: np.ndarray
    dtype: str
    kind: str

    def __post_init__(self) -> None:
        self.values = stored(self.values, self.dtype)


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values rounded to a storage dtype, as float64 (integers stay)."""
    if dtype == "i32":
        return np.asarray(values, np.int32)
    return decode(encode(values, dtype), dtype).astype(np.float64).reshape(np.shape(values))


def operand_of(values: np.ndarray, dtype: str) -> np.ndarray:
    """What a product reads of values in a storage dtype: the first plane, as float64."""
    return decode(encode(values, dtype)[:1], FORMATS[dtype].operand).astype(np.float64)


def tokens(values: np.ndarray, dtype: str = "fp32") -> Given:
    """An activation (batch, seq, ...)."""
    return Given(values, dtype, "tokens")


def persistent(values: np.ndarray, dtype: str = "fp32", role: str = "parameter") -> Given:
    return Given(values, dtype, role)


@dataclass
class Case:
    """`bounds`: absolute error allowed for an output besides its dtype's rounding, a number or an array; None: any. `views`:
    operands and outputs that are columns of a shared tensor, as (its name, first column, width); that of operands is among
    `given`, that of outputs ends with the last view or has as many columns as a fourth number says."""

    op_type: type[Op]
    given: dict[str, Given]
    attrs: dict[str, Any]
    bounds: dict[str, Any] = field(default_factory=dict)
    modes: dict[str, str] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    plan: tuple[int, int] | None = None
    views: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def values(self, name: str) -> np.ndarray:
        """What an operand holds."""
        if name not in self.views:
            return self.given[name].values
        base, first, width, *_ = self.views[name]
        return self.given[base].values[..., first : first + width]


def check_case(case: Case, sessions: Mapping[str, Callable[[dict[str, Program]], Any]]) -> dict[str, np.ndarray]:
    """Raises AssertionError with one line that reproduces the failure; gives the outputs. `sessions`: for each variant ("2
    threads") of a run, whose bits must not differ, how to open an ArenaSession whose `arena` (uint8) this process can touch."""
    first: tuple[str, dict[str, np.ndarray]] | None = None
    for variant, open_session in sessions.items():
        outputs = _run(case, open_session)
        first = first or (variant, outputs)
        for name, values in outputs.items():
            same = np.array_equal(_bits(values), _bits(first[1][name]))
            assert same, failed(f"{name} has different bits with {variant} than with {first[0]}")
    assert first is not None
    record_outputs(first[1].values())
    return first[1]


def record_outputs(outputs: Iterable[np.ndarray]) -> None:
    """Appends the running test and a digest of its outputs' bits to the file that BARELLM_RECORD_OUTPUTS names, if it does:
    `benchmarks.same_code` compares those of two builds. Names are not part of a digest. Tests run side by side, so it is one
    write at the end of the file."""
    if path := os.environ.get("BARELLM_RECORD_OUTPUTS"):
        bits = hashlib.sha256()
        for values in outputs:
            bits.update(f"{values.dtype} {values.shape}".encode())
            bits.update(_bits(values).tobytes())
        with open(path, "ab", buffering=0) as file:
            file.write(f"{running_test()} {bits.hexdigest()[:16]}\n".encode())


def _run(case: Case, open_session: Callable[[dict[str, Program]], Any]) -> dict[str, np.ndarray]:
    shapes = [g.values.shape[:2] for g in case.given.values() if g.kind == "tokens"]
    batches = [g.values.shape[0] for g in case.given.values() if g.kind == "sequences"]
    batch, seq = shapes[0] if shapes else (batches[0] if batches else 1, 1)
    most = case.plan or (batch, seq)
    op, p = _program(case, (Dim("batch", most[0]), Dim("seq", most[1])))
    session = open_session({"op": p})
    scalars = SCALARS | case.scalars | {"batch": batch, "seq": seq}

    def actual(t: Tensor) -> tuple[int, ...]:
        return tuple(scalars[n.name] if isinstance(n, Dim) else n for n in t.shape)

    session.arena[:] = 0xFF  # NaN in every dtype
    r = np.random.default_rng(7)
    current = {name: stored(r.standard_normal(actual(op.outputs[name])), op.outputs[name].dtype) for name in case.modes}
    for name, g in case.given.items():
        session.write(name, g.values)
    added = {t.base: None for n, t in op.outputs.items() if case.modes.get(n, "store") != "store"}
    for base in added:
        parts = {n: t for n, t in op.outputs.items() if t.base is base}
        assert set(parts) <= set(case.modes), "columns of one tensor are all written in the same mode"
        before = np.zeros(actual(base))
        for n, t in parts.items():
            before[..., t.first_column : t.first_column + t.shape[-1]] = current[n]
        session.write(base.name, before)
    try:
        session.run("op", **scalars)
        got = {}
        for name, t in op.outputs.items():
            whole = _read(session, t.base, actual(t.base))
            got[name] = whole if t.base is t else whole[..., t.first_column : t.first_column + t.shape[-1]]
        for base in {t.base: None for t in op.outputs.values() if t.base is not t}:
            _check_other_columns(op, base, _read(session, base, actual(base)), 0 if base in added else 0xFF)
        _check_bytes(case, op, session, actual)
    finally:
        session.close()
    # Products read the first plane of a parameter.
    read = {name: case.given[name].dtype for name in op.rounded if name in case.given}
    values = {name: case.values(name) for name in op.inputs}
    arrays = {name: operand_of(v, read[name]) if name in read else v for name, v in values.items()}
    want = op.run(arrays, scalars, {name: values for name, values in current.items() if op.adds(name, scalars)})
    for name, values in got.items():
        if case.bounds.get(name, 0.0) is not None:
            _compare(name, values, want[name].reshape(values.shape), op.outputs[name].dtype, case.bounds.get(name, 0.0))
    return got


def _program(case: Case, dims: tuple[Dim, Dim]) -> tuple[Op, Program]:
    store = Store()
    p = Program(store)
    inputs: dict[str, Tensor] = {}
    for name, g in case.given.items():
        if g.kind in RUN_TIME_AXES:
            axes = RUN_TIME_AXES[g.kind]
            inputs[name] = p.input(name, (*dims[:axes], *g.values.shape[axes:]), g.dtype)
        else:
            inputs[name] = store.get(name, g.values.shape, g.dtype, g.kind, valid_rows=case.attrs.get("valid_rows", 0))  # pyright: ignore
    inputs |= {n: View(inputs[v[0]], v[1], v[2]) for n, v in case.views.items() if v[0] in inputs}
    inputs = {n: t for n, t in inputs.items() if n not in {base for base, *_ in case.views.values()}}
    probe = case.op_type(inputs, case.attrs)
    into: dict[str, tuple[Tensor, str]] = {}
    shared: dict[str, Tensor] = {}
    for name, (shape, dtype) in probe.infer(**inputs).items():
        if name in case.views:
            base, first, width, *_ = case.views[name]
            if base not in shared:
                whole = max([f + w, *more][-1] for b, f, w, *more in case.views.values() if b == base)
                full, mode = (*shape[:-1], whole), case.modes.get(name, "store")
                new = p.activation(base, full, dtype) if mode == "store" else p.input(f"{base}.out", full, dtype)
                shared[base] = new if mode != "store" else p.output(f"{base}.out", new)
            into[name] = View(shared[base], first, width), case.modes.get(name, "store")
        elif name in case.modes:
            dynamic = any(isinstance(n, Dim) for n in shape)
            if dynamic and case.modes[name] == "store":
                continue
            t = p.input(f"{name}.out", shape, dtype) if dynamic else store.get(f"{name}.out", shape, dtype, "gradient")
            into[name] = t, case.modes[name]
    op = p.apply(case.op_type, into=into, **inputs, **case.attrs)
    for name, t in op.outputs.items():
        if t.base is t and t.role == "activation":
            p.output(f"{name}.out", t)
    return op, p


def _read(session: Any, t: Tensor, shape: tuple[int, ...]) -> np.ndarray:
    if FORMATS[t.dtype].kind in ("planes", "code"):
        return session.read(t.name)
    return session.stored(t, shape).copy()


def _check_bytes(case: Case, op: Op, session: Any, actual: Any) -> None:
    """Inputs hold what was written, and nothing else was written."""
    for t in {t.base: None for t in op.inputs.values()}:
        if t not in op.outputs.values():
            values = _read(session, t, actual(t)).astype(np.float64)
            same = np.array_equal(values, case.given[t.name].values, equal_nan=True)
            assert same, failed(f"the kernel changed its input {t.name}")
    check_gaps(session, actual)


def check_gaps(session: Any, actual: Callable[[Tensor], tuple[int, ...]]) -> None:
    """Every byte that belongs to no tensor of the `actual` shape is still 0xFF."""
    free = np.ones(session.arena.size, bool)
    for t in session.plan.offsets:
        start, nbytes = session.plan.offsets[t], t.nbytes
        if t.dims:
            nbytes = nbytes // t.size * int(np.prod(actual(t)))
        free[start : start + nbytes] = False
    touched = np.flatnonzero(free & (session.arena != 0xFF))
    assert not touched.size, failed(f"the kernel wrote outside its tensors, first at byte {touched[:1]} of the arena")


def _check_other_columns(op: Op, base: Tensor, values: np.ndarray, byte: int) -> None:
    """The bytes of columns that no output has are as they were."""
    other = np.ones(base.shape[-1], bool)
    for t in op.outputs.values():
        if t.base is base:
            other[t.first_column : t.first_column + t.shape[-1]] = False
    touched = np.flatnonzero(_bits(values[..., other]) != byte)
    assert not touched.size, failed(f"the kernel wrote outside its columns of {base.name}")


def _compare(name: str, got: np.ndarray, want: np.ndarray, dtype: str, bound: Any) -> None:
    got = got.astype(np.float64)
    if dtype == "i32":
        assert np.array_equal(got, want), failed(f"{name} is {got}, expected {want}")
        return
    with np.errstate(invalid="ignore"):
        error = np.where((got == want) | (np.isnan(got) & np.isnan(want)), 0.0, np.abs(got - want))
        allowed = ROUNDING[dtype] * 1.001 * np.abs(want) + bound + FORMATS[dtype].half_least + 1e-40
        bad = (error != 0) & ~(error <= allowed)
    if bad.any():
        at = (
            np.unravel_index(np.argmax(np.where(bad, error / allowed, 0)), got.shape)
            if not np.isnan(error).any()
            else np.argwhere(bad)[0]
        )
        at = tuple(int(i) for i in at)
        allowed = np.broadcast_to(allowed, got.shape)
        what = f"{name}{list(at)} is {got[at]:.9g}, expected {want[at]:.9g}: off by {error[at]:.3g}, allowed {allowed[at]:.3g}"
        raise AssertionError(failed(f"{what} ({int(bad.sum())} of {bad.size} wrong)"))


def _bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def failed(what: str) -> str:
    return f"{what}\nreproduce: python -m pytest '{running_test()}'"


def running_test() -> str:
    return os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" ", 1)[0]
