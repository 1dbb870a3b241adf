"""The backends as the tools see them: programs as a device runs them, and the machine in words.

What `lower` gives has on every backend `lowered` (program -> its ops after fusion), `calls` (program -> calls of kernels in order,
each with its `spec` and `op`), `plan`, `specs` and `machine`, what the code is for."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from barellm.cuda import driver
from barellm.cuda.kernel import Target
from barellm.errors import UserError, check_known
from barellm.program.builder import Program
from barellm.runtime.backend import backend
from barellm.tools.plan.roofline import NAMED, Ceiling, Mix

if TYPE_CHECKING:
    from barellm.cpu import step as cpu
    from barellm.cpu.isa import ISA
    from barellm.cuda import step as cuda

    Built = cpu.LoweredPrograms | cuda.LoweredPrograms

DEVICES = ("cpu", "cuda")
REACHED = 0.9  # of the published bandwidth: what the best streaming kernels reach


@dataclass(frozen=True)
class Published:
    """A card by its data sheet, in place of a measurement: dense FLOP/s by the dtype of a matmul's operands, with sums in fp32;
    bytes/s and bytes of its memory; compute capability and multiprocessors."""

    flops: Mapping[str, float]
    memory: float
    nbytes: int
    arch: int = 90
    sms: int = 132

    def peak(self, dtype: str) -> float:
        return self.flops[dtype]

    def bandwidth(self, mix: Mix) -> float:
        return REACHED * self.memory

    def close(self) -> None:
        return


def _flops(fp32: float, bf16: float, fp8: float) -> dict[str, float]:
    """In TFLOP/s, fp32 outside the tensor cores. Before compute capability 8.9 tensor cores multiply fp8 as fp16."""
    return {"fp8": fp8 * 1e12, "bf16": bf16 * 1e12, "fp16": bf16 * 1e12, "fp32": fp32 * 1e12}


# NVIDIA's data sheets and architecture white papers, of the boards with SXM. GeForce tensor cores add in fp32 at half their rate.
HOPPER = _flops(66.9, 989.4, 1978.9)
CARDS = {
    "a100": Published(_flops(19.5, 312, 312), 2.039e12, 80 << 30, 80, 108),
    "h100": Published(HOPPER, 3.35e12, 80 << 30),
    "h200": Published(HOPPER, 4.8e12, 141 * 10**9),
    "rtx3060": Published(_flops(12.7, 25.5, 25.5), 0.36e12, 12 << 30, 86, 28),
    "rtx3090": Published(_flops(35.6, 71, 71), 0.936e12, 24 << 30, 86, 82),
    "rtx4090": Published(_flops(82.6, 165.2, 330.3), 1.008e12, 24 << 30, 89, 128),
    "rtx5090": Published(_flops(104.8, 209.5, 419), 1.792e12, 32 << 30, 120, 170),
}


def sheet(card: str) -> Published:
    """A card's data sheet. UserError for a card that is not known."""
    check_known("card", card, CARDS)
    return CARDS[card]


def published(card: str) -> Ceiling:
    """The bound by a card's data sheet."""
    found = sheet(card)
    bandwidth = {mix: found.bandwidth(mix) for mix in NAMED.values()}
    return Ceiling(dict(found.flops), bandwidth, lambda: found, f"{card}'s data sheet, {REACHED:.0%} of its bandwidth")


def check(device: str) -> None:
    """Raise a UserError for a device that has no kernels of ours."""
    check_known("device", device, DEVICES)


def lower(programs: dict[str, Program], machine: "str | ISA | Target", **products: Any) -> "Built":
    """Lower programs for a device, as it is here or as `machine` describes it, to kernel calls with planned addresses. Nothing is
    allocated, and "cuda" needs no GPU. `products`: GEMM options, as from `assembly.build.gemm_options`."""
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


def target_of(card: str) -> Target:
    """The card as a target of the compiler. UserError for one that is not known."""
    found = sheet(card)
    return Target(found.arch, found.sms)


def target_here() -> Target:
    """This machine's GPU; a Hopper GPU if none is usable."""
    try:
        found = driver.device()
    except UserError:
        return Target()
    return Target.of(found)


def device_bytes(device: str) -> int | None:
    """Memory of the GPU; None for the CPU, and where there is none."""
    try:
        return driver.device().nbytes if device == "cuda" else None
    except UserError:
        return None


def where(r: dict[str, Any]) -> str:
    units = f"{r['threads']} threads" if "threads" in r else f"{r['multiprocessors']} multiprocessors"
    return f"{r['isa']}, {units}"
