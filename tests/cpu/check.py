"""One op on the CPU backend against its float64 reference: what its kernel tests call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest

from barellm.cpu import isa as isa_module
from barellm.cpu import jit
from barellm.cpu.isa import ISA
from barellm.cpu.step import CpuSession
from barellm.program.builder import Program
from barellm.program.ops.base import Op
from barellm.program.tensor import Dim, Tensor
from tests.check import EPS, ROUNDING, Case, Given, check_case, check_gaps, persistent, stored, tokens

__all__ = [
    "EPS", "ISAS", "ROUNDING", "Given", "changed", "check_op", "isa_named", "persistent", "run_fused", "stored", "tokens",
]  # fmt: skip

ISAS = isa_module.available()
THREADS = (1, 2, 5)


def isa_named(name: str) -> ISA:
    """As `BARELLM_ISA=name` gives it."""
    return isa_module._host(name)


def changed(monkeypatch: pytest.MonkeyPatch, module: Any, **constants: Any) -> None:
    """Kernels are made with other constants of a module, and cached as such."""
    for name, value in constants.items():
        monkeypatch.setattr(module, name, value)
    versions = jit.versions()
    monkeypatch.setattr(jit, "versions", lambda: f"{versions} {constants}")


def check_op(
    op_type: type[Op],
    isa: ISA,
    given: dict[str, Given],
    *,
    bounds: dict[str, Any] | None = None,
    modes: dict[str, str] | None = None,
    scalars: dict[str, Any] | None = None,
    plan: tuple[int, int] | None = None,
    views: dict[str, tuple[Any, ...]] | None = None,
    threads: tuple[int, ...] = THREADS,
    guarded: bool = False,
    **attrs: Any,
) -> dict[str, np.ndarray]:
    """Raises AssertionError with one line that reproduces the failure; gives the outputs. Bits must not depend on threads.
    `guarded`: the op may not write behind the private scratch that it asked for."""
    case = Case(op_type, given, attrs, bounds or {}, modes or {}, scalars or {}, plan, views or {})
    return check_case(
        case, {f"{n} threads": partial(Guarded if guarded else Session, threads=n, isa=isa) for n in threads}
    )


class Session(CpuSession):
    """Code is loaded once for the runs of a check, which differ in their threads."""

    _last: tuple[Any, jit.Library] | None = None

    def _compile(self) -> None:
        wanted = (self.isa, jit.versions(), [spec.key for spec in self.specs])
        if Session._last is None or Session._last[0] != wanted:
            super()._compile()
            Session._last = wanted, self.code
        self.code = Session._last[1]


class Guarded(Session):
    """What an op leaves of a thread's own scratch must stay as it is."""

    def _spare(self) -> np.ndarray:
        """The bytes (threads, n) of the threads' scratch that no op asked for. A thread's scratch is whole pages."""
        (private,) = [t for t in self.plan.offsets if t.name == "threads.private"]
        start, asked = self.plan.offsets[private], max(low.private_bytes for low in self.lowered.values())
        rooms = self.arena[start : start + private.nbytes].reshape(self.threads, self.private_bytes)
        return rooms[:, asked:]

    def run(self, program: str, **values: Any) -> None:
        self._spare()[:] = 0xFF
        super().run(program, **values)
        touched = np.flatnonzero((self._spare() != 0xFF).any(0))
        assert not touched.size, f"{program} writes {touched[0] + 1} bytes and more behind its private scratch"


def run_fused(
    program: Callable[[], Program], isa: ISA, arrays: Mapping[str, np.ndarray], scalars: dict[str, int], *, name: str
) -> tuple[Op, dict[str, np.ndarray]]:
    """The fused op `name` that the ops of `program` become on this backend, and its outputs. `arrays` are given to the tensors of
    these names before the run; those that the op does not write must hold them afterwards, and no byte beside its tensors may
    change. Bits must not depend on threads."""
    runs: list[dict[str, np.ndarray]] = []
    for threads in THREADS:
        session = Session({"op": program()}, isa=isa, threads=threads)
        (op,) = session.lowered["op"].ops
        assert op.name == name
        session.arena[:] = 0xFF  # NaN in every dtype
        for given, values in arrays.items():
            session.write(given, values)

        def actual(t: Tensor) -> tuple[int, ...]:
            return tuple(scalars[n.name] if isinstance(n, Dim) else n for n in t.shape)

        try:
            session.run("op", **scalars)
            for t in set(op.inputs.values()) - set(op.outputs.values()):
                held = session.stored(t, actual(t)) if t.role == "input" else session.read(t.name)
                assert np.array_equal(held, arrays[t.name]), f"the kernel changed its input {t.name}"
            check_gaps(session, actual)
            runs.append({n: session.stored(t, actual(t)).astype(np.float64) for n, t in op.outputs.items()})
        finally:
            session.close()
        for output, values in runs[-1].items():
            assert np.array_equal(values, runs[0][output]), f"{output} has other bits with {threads} threads"
    return op, runs[0]
