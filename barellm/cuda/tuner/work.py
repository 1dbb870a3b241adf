"""A product to tune, and ways to do it."""

from __future__ import annotations

from dataclasses import dataclass

from barellm.cuda import tuning
from barellm.cuda.choices import Form
from barellm.cuda.kernel import Target
from barellm.cuda.lang import DeviceFunction
from barellm.cuda.step import lower_and_plan
from barellm.program.builder import Program

MADE = {
    "nt": ("", "gelu", "residual"),
    "nn": ("", "gelu_backward"),
    "tn": ("", "add", "start"),
}  # epilogues that a bed has


@dataclass(frozen=True)
class Work(tuning.Product):
    """A product with the sizes of a run."""

    @property
    def product(self) -> tuning.Product:
        return tuning.Product(**vars(self))

    @property
    def tokens(self) -> int:
        return self.depth if self.role == "tn" else self.rows

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.cols * self.depth

    def __str__(self) -> str:
        return f"{self.role} {self.rows} x {self.cols} from {self.depth} {self.dtype} {self.epilogue}".strip()


@dataclass(frozen=True)
class Candidate:
    """A tile or form, and by name a kernel other than its own where a self-test injects one (faults.py)."""

    choice: tuning.Choice
    fault: str = ""

    def function(self) -> DeviceFunction | None:
        from barellm.cuda.tuner import faults

        return getattr(faults, self.fault) if self.fault else None

    def __str__(self) -> str:
        t = self.choice
        if isinstance(t, Form):
            return f"128x{t.cols} {t.stages} stages {t.slots} slots"
        return f"{self.fault} {t.rows}x{t.cols}x{t.depth} {t.warps}w {t.stages}s".strip()


def works_of(programs: dict[str, Program], target: Target) -> list[Work]:
    """The products that these programs do and a bed can make, those with most operations first."""
    with tuning.watching() as found:
        lower_and_plan(programs, target)
    works = [Work(**vars(product)) for product in found if product.epilogue in MADE[product.role]]
    return sorted(works, key=lambda w: -w.flops)


def candidates(work: Work, target: Target) -> list[Candidate]:
    """The default first."""
    default = tuning.default(target, work.product)
    others = [t for t in tuning.choices_of(work, target.arch) if t != default]
    return [Candidate(t) for t in (default, *others)]
