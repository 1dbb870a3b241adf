"""A product to tune, and ways to do it."""

from __future__ import annotations

from dataclasses import dataclass

from barellm.cuda import choices, tuning
from barellm.cuda.choices import Tile
from barellm.cuda.kernel import Target
from barellm.cuda.lang import DeviceFunction
from barellm.cuda.step import lower_and_plan
from barellm.program.builder import Program


@dataclass(frozen=True)
class Work:
    """`rows` x `cols` of a result from a contraction of `depth`. Role "nt": y = x weight^T, "nn": dx = dy weight; "tn": gradient
    of the weight. Of "tn" the depth is the tokens, of the others the rows are."""

    role: str
    dtype: str
    rows: int
    cols: int
    depth: int

    @property
    def product(self) -> tuning.Product:
        return self.role, self.dtype, self.rows, self.cols, self.depth

    @property
    def tokens(self) -> int:
        return self.depth if self.role == "tn" else self.rows

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.cols * self.depth

    def __str__(self) -> str:
        return f"{self.role} {self.rows} x {self.cols} from {self.depth} {self.dtype}"


@dataclass(frozen=True)
class Candidate:
    """A tile, and by name a kernel other than its own where a self-test injects one (faults.py)."""

    choice: Tile
    fault: str = ""

    def function(self) -> DeviceFunction | None:
        from barellm.cuda.tuner import faults

        return getattr(faults, self.fault) if self.fault else None

    def __str__(self) -> str:
        t = self.choice
        return f"{self.fault} {t.rows}x{t.cols}x{t.depth} {t.warps}w {t.stages}s".strip()


def works_of(programs: dict[str, Program], target: Target) -> list[Work]:
    """The products that these programs do with Triton's kernel, those with most operations first."""
    with tuning.watching() as found:
        lower_and_plan(programs, target)
    return sorted((Work(*product) for product in found), key=lambda w: -w.flops)


def candidates(work: Work, target: Target) -> list[Candidate]:
    """The default first."""
    default = tuning.default(target, work.product)
    others = [t for t in choices.tiles(work.dtype, target.arch) if t != default]
    return [Candidate(t) for t in (default, *others)]
