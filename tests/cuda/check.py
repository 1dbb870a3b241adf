"""One op on the CUDA backend against its float64 reference, interpreted, as PTX or on a GPU: what its kernel tests call."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from barellm.cuda import driver
from barellm.cuda.kernel import Counter, Sizes, Target
from barellm.cuda.step import CudaSession, lower_and_plan
from barellm.program.builder import Program
from barellm.program.ops.base import Op
from barellm.program.scalars import NBYTES, SCALARS
from barellm.runtime.arena import ArenaSession
from barellm.runtime.lowering import Region
from tests.check import EPS, ROUNDING, Case, Given, check_case, persistent, stored, tokens
from tests.simulators import interpreter
from tests.simulators.interpreter import Execute

__all__ = ["EPS", "ROUNDING", "Given", "InterpretedSession", "check_op", "persistent", "stored", "tokens"]

DEVICE = "interpreter"  # where checks run: conftest.py has the option
PLAIN = Target(arch=80)  # no TMA, no wgmma: what the interpreter knows
ALIGN = 512  # of device memory


class InterpretedSession(ArenaSession):
    """Programs of the CUDA backend over host memory. `execute`: who runs a launch, given its specialisation, parameters and
    grid."""

    def __init__(self, programs: dict[str, Program], *, target: Target = PLAIN, execute: Execute = interpreter.execute) -> None:
        built = lower_and_plan(programs, target)
        super().__init__(programs, built.plan)
        self.lowered = built.lowered
        raw = np.zeros(self.plan.arena_bytes + ALIGN, np.uint8)
        skip = -raw.ctypes.data % ALIGN
        self.arena = raw[skip : skip + self.plan.arena_bytes]
        self.counter = np.zeros(16, np.int32)
        self._inputs = self._input_rooms(lambda t: self.stored(t).reshape(-1))
        self._starts = {name: partial(self._interpret, name) for name in programs}
        self.execute = execute
        self.write_constants()

    def _interpret(self, program: str) -> None:
        sizes = Sizes.of({name: int(self._block.ints[SCALARS[name].index]) for name in self._limits[program]})
        for launch in self.lowered[program].launches:
            interpreter.run(launch, sizes, self._address, (self._block.address, self._block.address + NBYTES), self.execute)
            assert not self.counter.any(), f"{launch.spec.name} leaves the counter at {self.counter[0]}"

    def _address(self, region: Region | Counter) -> tuple[int, int]:
        if isinstance(region, Counter):
            return self.counter.ctypes.data, self.counter.ctypes.data + self.counter.itemsize
        start = self.arena.ctypes.data + self.plan.offsets[region.tensor]
        return start + region.start, start + region.stop

    def _get(self, start: int, stop: int) -> np.ndarray:
        return self.arena[start:stop]

    def _set(self, start: int, data: np.ndarray) -> None:
        self.arena[start : start + data.nbytes] = data.reshape(-1).view(np.uint8)

    def _fill(self, start: int, stop: int, byte: int) -> None:
        self.arena[start:stop] = byte

    def close(self) -> None:
        """Nothing to stop."""


class Arena:
    """The arena of a session on a GPU, as far as a check touches it."""

    def __init__(self, session: CudaSession) -> None:
        self.session, self.size = session, session.plan.arena_bytes

    def __setitem__(self, where: slice, value: int) -> None:
        assert where == slice(None)
        self.session._set(0, np.full(self.size, value, np.uint8))

    def __ne__(self, value: Any) -> Any:
        return self.session._get(0, self.size) != value

    __hash__ = None  # pyright: ignore


class DeviceSession(CudaSession):
    """Programs of the CUDA backend on a GPU, or on what stands for its driver."""

    def __init__(self, programs: dict[str, Program], *, sms: int | None = None, config: Any = None, **options: Any) -> None:
        """`sms`: multiprocessors that persistent grids fill, at most; the card's own where a test does not say."""
        target = Target.of(driver.device(), **options)
        target = replace(target, sms=min(sms or target.sms, target.sms), config=config)
        super().__init__(programs, built=lower_and_plan(programs, target))

    @property
    def arena(self) -> Arena:
        return Arena(self)


def check_op(
    op_type: type[Op],
    given: dict[str, Given],
    *,
    bounds: dict[str, Any] | None = None,
    modes: dict[str, str] | None = None,
    scalars: dict[str, Any] | None = None,
    plan: tuple[int, int] | None = None,
    views: dict[str, tuple[Any, ...]] | None = None,
    target: Target = PLAIN,
    **attrs: Any,
) -> dict[str, np.ndarray]:
    """Raises AssertionError with one line that reproduces the failure; gives the outputs. Bits must not depend on the order of
    blocks, on a GPU not on the run. `bounds`: absolute error allowed besides the dtype's rounding; `plan`: planned (batch, seq),
    else the given."""
    case = Case(op_type, given, attrs, bounds or {}, modes or {}, scalars or {}, plan, views or {})
    if DEVICE == "ptx-sm_90":
        target = replace(target, arch=90)
    if DEVICE in ("mock", "cuda"):  # the GPU decides the target
        session = partial(DeviceSession, sms=target.sms, tf32=target.tf32, config=target.config)
        return check_case(case, {"the first run": session, "the second": session})
    return check_case(case, {n: partial(InterpretedSession, target=target, execute=e) for n, e in ways(target).items()})


def ways(target: Target) -> dict[str, Execute]:
    """To run a launch here, which must give equal bits."""
    if DEVICE.startswith("ptx"):
        from tests.simulators.ptx.launch import RUNS, execute

        return {name: partial(execute, arch=target.arch, run=run) for name, run in RUNS.items()}
    forward = interpreter.execute
    return {"blocks forward": forward, "blocks backward": partial(forward, backward=True)}
