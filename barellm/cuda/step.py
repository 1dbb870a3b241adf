"""From programs to a running session: lower, plan, compile, bind, launch."""

from __future__ import annotations

from dataclasses import dataclass

from barellm.cuda.fuse import FUSIONS
from barellm.cuda.kernel import REGISTRY, Launch, Lowering, Spec, Target
from barellm.program.builder import Program
from barellm.program.planner import Plan
from barellm.runtime.lowering import LoweredProgram, plan_lowered


class Lowered(LoweredProgram[Lowering]):
    """A program's ops after fusion, each with its launches and scratch."""

    def __init__(self, program: Program, target: Target) -> None:
        import barellm.cuda.kernels  # noqa: F401  (fills the registry)

        super().__init__(
            program, name="cuda", table=FUSIONS, registry=REGISTRY, lowering=lambda op: Lowering(op, target)
        )

    @property
    def launches(self) -> list[Launch]:
        return [launch for op in self.ops for launch in self.of[op].launches]


@dataclass(frozen=True)
class LoweredPrograms:
    """Programs as launches, with an address for every byte; nothing is allocated."""

    target: Target
    lowered: dict[str, Lowered]
    plan: Plan

    @property
    def specs(self) -> dict[Spec, str]:
        """Every specialisation that must be compiled, with the op that needs it first."""
        found: dict[Spec, str] = {}
        for low in self.lowered.values():
            for launch in low.launches:
                found.setdefault(launch.spec, launch.op.name)
        return found


def lower_and_plan(programs: dict[str, Program], target: Target) -> LoweredPrograms:
    """What a session of `programs` allocates, to the byte, and what it launches."""
    lowered = {name: Lowered(p, target) for name, p in programs.items()}
    return LoweredPrograms(target, lowered, plan_lowered(lowered, next(iter(programs.values())).store))
