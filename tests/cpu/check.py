"""One op on the CPU backend against its float64 reference: what its kernel tests call."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from barellm.cpu import isa as isa_module
from barellm.cpu import jit
from barellm.cpu.isa import ISA
from barellm.cpu.step import CpuSession
from barellm.program.ops.base import Op
from tests.check import EPS, ROUNDING, Case, Given, check_case, persistent, stored, tokens

__all__ = ["EPS", "ISAS", "ROUNDING", "Given", "changed", "check_op", "isa_named", "persistent", "stored", "tokens"]

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
    **attrs: Any,
) -> dict[str, np.ndarray]:
    """Raises AssertionError with one line that reproduces the failure; gives the outputs. Bits must not depend on threads."""
    case = Case(op_type, given, attrs, bounds or {}, modes or {}, scalars or {}, plan, views or {})
    return check_case(case, {f"{n} threads": partial(Session, threads=n, isa=isa) for n in threads})


class Session(CpuSession):
    """Code is loaded once for the runs of a check, which differ in their threads."""

    _last: tuple[Any, jit.Library] | None = None

    def _compile(self) -> None:
        wanted = (self.isa, jit.versions(), [spec.key for spec in self.specs])
        if Session._last is None or Session._last[0] != wanted:
            super()._compile()
            Session._last = wanted, self.code
        self.code = Session._last[1]
