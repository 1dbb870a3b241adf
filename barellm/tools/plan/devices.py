"""The backends as the tools see them: programs as a device runs them, and the machine in words.

What `lower` gives has on every backend `lowered` (program -> its ops after fusion), `calls` (program -> calls of kernels in order,
each with its `spec` and `op`), `plan`, `specs` and `machine`, what the code is for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from barellm.errors import UserError, nearest
from barellm.program.builder import Program
from barellm.runtime.backend import backend
from barellm.tools.plan.roofline import NAMED, Ceiling, Mix

if TYPE_CHECKING:
    from barellm.cpu import step as cpu
    from barellm.cpu.isa import ISA
    from barellm.cuda import step as cuda
    from barellm.cuda.kernel import Target

    Built = cpu.LoweredPrograms | cuda.LoweredPrograms

DEVICES = ("cpu", "cuda")
REACHED = 0.9  # of the published bandwidth: what the best streaming kernels reach


@dataclass(frozen=True)
class Published:
    """A card by its data sheet, in place of a measurement: FLOP/s by the dtype of a matmul's operands, bytes/s of its memory."""

    flops: Mapping[str, float]
    memory: float

    def peak(self, dtype: str) -> float:
        return self.flops[dtype]

    def bandwidth(self, mix: Mix) -> float:
        return REACHED * self.memory

    def close(self) -> None:
        return


HOPPER = {"fp8": 1978.9e12, "bf16": 989.4e12, "fp16": 989.4e12, "fp32": 66.9e12}  # dense; fp32 outside the tensor cores
CARDS = {"h100": Published(HOPPER, 3.35e12), "h200": Published(HOPPER, 4.8e12)}


def sheet(card: str) -> Published:
    """A card's data sheet. UserError for a card that is not known."""
    if card not in CARDS:
        raise UserError(f"unknown card {card!r}{nearest(card, CARDS)} (known: {', '.join(CARDS)})")
    return CARDS[card]


def published(card: str) -> Ceiling:
    """The bound by a card's data sheet."""
    found = sheet(card)
    bandwidth = {mix: found.bandwidth(mix) for mix in NAMED.values()}
    return Ceiling(dict(found.flops), bandwidth, lambda: found, f"{card}'s data sheet, {REACHED:.0%} of its bandwidth")


def check(device: str) -> None:
    """Raise a UserError for a device that has no kernels of ours."""
    if device not in DEVICES:
        raise UserError(f"unknown device {device!r}{nearest(device, DEVICES)} (known: {', '.join(DEVICES)})")


def lower(programs: dict[str, Program], machine: str | ISA | Target, **products: Any) -> Built:
    """Lower programs for a device, as it is here or as `machine` describes it, to kernel calls with planned addresses. Nothing is
    allocated, and "cuda" needs no GPU. `products`: GEMM options, as from `assembly.build.gemm_options`."""
    from barellm.cuda.kernel import Target

    if machine == "cuda" or isinstance(machine, Target):
        from barellm.cuda.step import lower_and_plan

        target = machine if isinstance(machine, Target) else target_here()
        return lower_and_plan(programs, replace(target, **products))  # pyright: ignore
    from barellm.cpu.step import lower_and_plan

    return lower_and_plan(programs, isa=None if isinstance(machine, str) else machine)  # pyright: ignore


def open_session(programs: dict[str, Program], device: str, **products: Any) -> Any:
    return backend(device).open_session(programs, **products)


def replay_seconds(session: Any, program: str, calls: int, **sizes: int) -> list[float]:
    """Seconds of each of `calls` consecutive runs of a program with inputs in the arena; on a GPU their mean."""
    if hasattr(session, "replay"):
        from barellm.cuda.bench import replay_seconds

        return [replay_seconds(session.context, lambda: session.replay(program, **sizes), calls)] * calls
    table, found = session.records[program], []
    for _ in range(calls):
        start = time.perf_counter()
        session.pool.run(table.ctypes.data, len(table))
        found.append(time.perf_counter() - start)
    return found


def target_here() -> Target:
    """This machine's GPU; a Hopper GPU if none is usable."""
    from barellm.cuda import driver
    from barellm.cuda.kernel import Target

    try:
        found = driver.device()
    except UserError:
        return Target()
    return Target.of(found)


def device_bytes(device: str) -> int | None:
    """Memory of the GPU; None for the CPU, and where there is none."""
    from barellm.cuda import driver

    try:
        return driver.device().nbytes if device == "cuda" else None
    except UserError:
        return None


def where(r: dict[str, Any]) -> str:
    units = f"{r['threads']} threads" if "threads" in r else f"{r['multiprocessors']} multiprocessors"
    return f"{r['isa']}, {units}"
