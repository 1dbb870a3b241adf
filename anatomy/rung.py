"""What a rung of the CPU's ladder is: a kernel for C = A B, and what it needs.

Shapes, on every rung: c (M, N) fp32, a (M, K) and b (K, N) in the rung's dtype, all row-major and without padding. The sizes
are constants of the code. A kernel is written in barellm's kernel language: Python that emits machine code (docs/kernels.md).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from barellm.cpu.isa import ISA
from barellm.cpu.specialisation import Emit, Specialisation

Step = Callable[[ISA], tuple[int, int]]
RUNGS: list[Rung] = []


@dataclass(frozen=True)
class Rung:
    """`step(isa)`: (operations, bytes loaded and stored) of one turn of the inner loop. `threads`: whether all of them run it, or
    one. `scratch(isa, N, K)`: bytes that each thread needs besides the operands. `needs(isa)`: whether this instruction set can
    run it."""

    name: str
    emit: Emit
    step: Step
    dtype: str
    threads: bool
    scratch: Callable[[ISA, int, int], int]
    needs: Callable[[ISA], bool]

    @property
    def number(self) -> int:
        return RUNGS.index(self) + 1

    @property
    def file(self) -> str:
        return f"{self.emit.__module__.replace('.', '/')}.py"

    @property
    def changes(self) -> str:
        """What is new on this rung: the first sentence of its file, without its number and name."""
        text = " ".join((sys.modules[self.emit.__module__].__doc__ or "").split())
        return text.partition(": ")[2].partition(". ")[0].removesuffix(".")

    def specialised(self, M: int, N: int, K: int) -> Specialisation:
        return Specialisation(self.emit, ("fp32", self.dtype, self.dtype), (("K", K), ("M", M), ("N", N)))


def rung(
    name: str,
    *,
    step: Step,
    dtype: str = "fp32",
    threads: bool = False,
    scratch: Callable[[ISA, int, int], int] = lambda isa, N, K: 0,
    needs: Callable[[ISA], bool] = lambda isa: True,
) -> Callable[[Emit], Emit]:
    """Make a kernel the next rung of the ladder."""

    def add(emit: Emit) -> Emit:
        RUNGS.append(Rung(name, emit, step, dtype, threads, scratch, needs))
        return emit

    return add
