"""One op on the CPU backend against its float64 reference: what its kernel tests call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest

from barellm.cpu import isa as isa_module
from barellm.cpu import jit, step
from barellm.cpu.gemm_config import GemmConfig, default
from barellm.cpu.isa import ISA
from barellm.cpu.step import CpuSession
from barellm.program.builder import Program
from barellm.program.integers import round_up
from barellm.program.ops.base import Op
from barellm.program.tensor import Dim, Tensor
from tests.check import (
    EPS,
    ROUNDING,
    Case,
    Given,
    check_case,
    check_gaps,
    failed,
    persistent,
    record_outputs,
    stored,
    tokens,
)  # fmt: skip

__all__ = [
    "EPS", "ISAS", "ROUNDING", "Given", "changed", "check_op", "isa_named", "persistent", "run_fused", "stored", "tokens",
]  # fmt: skip

ISAS = isa_module.available()
THREADS = (1, 2, 5)
PAGE = 4096


def isa_named(name: str) -> ISA:
    """As `BARELLM_ISA=name` gives it."""
    return isa_module._host(name)


def changed(monkeypatch: pytest.MonkeyPatch, module: Any, **constants: Any) -> None:
    """Kernels are made with other constants of a module, and cached as such."""
    for name, value in constants.items():
        monkeypatch.setattr(module, name, value)
    versions = jit.versions()
    monkeypatch.setattr(jit, "versions", lambda: f"{versions} {constants}")


@contextmanager
def code_generation(isa: ISA) -> Iterator[None]:
    """How code is generated: as for users for this machine's best instruction set, without optimisations (LLVM's level 0) for its
    others. No bit of a result depends on it (test_check.py), as no operation may be contracted or reordered; it takes half the
    time."""
    if isa.triple or isa.name == ISAS[0] or isa.name not in ISAS:
        yield
        return
    usual = jit.versions()
    with pytest.MonkeyPatch.context() as m:
        m.setattr(jit, "target_machine", _unoptimised)
        m.setattr(jit, "versions", lambda: f"{usual}, level 0")  # objects of their own in the cache
        m.setattr(step, "allowed_cpus", lambda: (0,))  # helpers are other processes, which would optimise
        yield


@cache
def _unoptimised(isa: ISA) -> llvm.TargetMachine:
    jit._initialise()
    return llvm.Target.from_default_triple().create_target_machine(cpu=isa.cpu, features=isa.features, opt=0, jit=True)


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
    config: Any = None,
    **attrs: Any,
) -> dict[str, np.ndarray]:
    """Raises AssertionError with one line that reproduces the failure; gives the outputs. Bits must not depend on threads,
    and the op may not write behind the private scratch that it asked for."""
    case = Case(op_type, given, attrs, bounds or {}, modes or {}, scalars or {}, plan, views or {})
    return check_case(case, {f"{n} threads": partial(Session, threads=n, isa=isa, config=config) for n in threads})


def configs_of(isa: ISA, shape: tuple[int, int, int, int], dtype: str, **fields: Any) -> dict[str, GemmConfig]:
    """The default configs of a linear layer's three GEMMs with these fields; the layer is (batch, seq, N, K)."""
    batch, seq, N, K = shape
    sizes = {"forward": (N, K, batch * seq), "input_gradient": (K, N, batch * seq), "weight_gradient": (K, batch * seq, N)}
    return {kind: replace(default(isa, kind, dtype, *size), **fields) for kind, size in sizes.items()}


class Session(CpuSession):
    """Code is loaded once for the runs of a check, which differ in their threads. Each thread's own scratch ends where the op asked
    for it to end, with bytes behind it that a run must leave as they are."""

    _last: tuple[Any, jit.Library] | None = None

    def __init__(self, programs: dict[str, Program], **how: Any) -> None:
        super().__init__(programs, **how)
        # The arena rounds scratch up to whole pages and puts that of the threads side by side: what an op writes behind its own
        # would often go unseen. So the check has scratch of its own.
        self._asked = max(low.thread_scratch_bytes for low in self.lowered.values())
        room = round_up(self._asked, PAGE) + PAGE
        raw = np.full(self.threads * room + PAGE, 0xFF, np.uint8)  # NaN in every dtype
        self._rooms = raw[-raw.ctypes.data % PAGE :][: self.threads * room].reshape(self.threads, room)
        memory = (self.arena, self.code, self._keep, self._block, raw)
        self.pool.bind(self._block.address, self._rooms.ctypes.data, room, memory=memory)

    def run(self, program: str, **values: Any) -> None:
        super().run(program, **values)
        touched = np.flatnonzero((self._rooms[:, self._asked :] != 0xFF).any(0))
        assert not touched.size, failed(f"the kernel writes up to {touched[-1] + 1} bytes behind its private scratch")

    def _compile(self) -> None:
        wanted = (self.isa, jit.versions(), [spec.key for spec in self.specs])
        if Session._last is None or Session._last[0] != wanted:
            with code_generation(self.isa):
                super()._compile()
            Session._last = wanted, self.code
        self.code = Session._last[1]


def run_fused(
    program: Callable[[], Program],
    isa: ISA,
    arrays: Mapping[str, np.ndarray],
    scalars: dict[str, int],
    *,
    name: str,
    config: Any = None,
) -> tuple[Op, dict[str, np.ndarray]]:
    """The fused op `name` that the ops of `program` become on this backend, and its outputs. `arrays` are given to the tensors of
    these names before the run; those that the op does not write must hold them afterwards, and no byte beside its tensors may
    change. Bits must not depend on threads."""
    runs: list[dict[str, np.ndarray]] = []
    for threads in THREADS:
        session = Session({"op": program()}, isa=isa, threads=threads, config=config)
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
    record_outputs(runs[0].values())
    return op, runs[0]
