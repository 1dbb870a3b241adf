"""A piece of work to tune, a product or a kernel of attention, and ways to do it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from barellm.cuda import choices, tuning
from barellm.cuda.choices import AttentionTile
from barellm.cuda.kernel import Call, Launch, Target
from barellm.cuda.kernels.pointwise.activations import ACTIVATIONS, SLOPES
from barellm.cuda.lang import DeviceFunction
from barellm.cuda.step import lower_and_plan
from barellm.program.builder import Program

EPILOGUES_BY_KIND = {
    "nt": ("", *ACTIVATIONS, "residual", *SLOPES),
    "nn": ("", *SLOPES),
    "tn": ("", "add", "start"),
}  # epilogues that a bed has
KERNELS = {
    "forward": ("attention_forward", "hopper_attention"),
    "keys": ("attention_dkv", "hopper_attention_backward"),
    "queries": ("attention_dq", "hopper_attention_backward"),
}
ATTENTION_RATE = 0.4  # of a product's rate that attention reaches, to tell what takes longest


@dataclass(frozen=True)
class GemmProblem(tuning.GemmKey):
    """A product with the sizes of a run."""

    @property
    def subject(self) -> tuning.GemmKey:
        return tuning.GemmKey(**vars(self))

    @property
    def tokens(self) -> int:
        return self.depth if self.role == "tn" else self.rows

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.cols * self.depth

    @property
    def sizes(self) -> dict[str, Any]:
        return {"rows": self.rows, "cols": self.cols, "depth": self.depth}

    def target(self, target: Target) -> Target:
        """The target for which this product is lowered."""
        return replace(target, tf32=self.dtype == "tf32")

    def times(self, call: Call) -> bool:
        """Whether a call of the bed's program is what is timed."""
        return True

    def __str__(self) -> str:
        return f"{self.role} {self.rows} x {self.cols} from {self.depth} {self.dtype} {self.epilogue}".strip()


@dataclass(frozen=True)
class AttentionProblem(tuning.AttentionKey):
    """A kernel of attention with the sizes of a run."""

    @property
    def subject(self) -> tuning.AttentionKey:
        return tuning.AttentionKey(**vars(self))

    @property
    def flops(self) -> int:
        """The operations of the causal half: two products forward, four for dk and dv, three for dq."""
        products = {"forward": 2, "keys": 4, "queries": 3}[self.role]
        return products * self.batch * self.heads * self.seq * (self.seq + 1) * self.head

    @property
    def sizes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("batch", "seq", "heads", "kv_heads", "head", "dropout")}

    def target(self, target: Target) -> Target:
        return target

    def times(self, call: Call) -> bool:
        return isinstance(call, Launch) and call.spec.name in KERNELS[self.role]

    def __str__(self) -> str:
        dropout = " dropout" if self.dropout else ""
        heads = f"{self.heads}/{self.kv_heads}" if self.kv_heads else f"{self.heads}"
        return f"attention {self.role} {self.batch}x{heads}x{self.seq}x{self.head} {self.dtype}{dropout}"


Problem = GemmProblem | AttentionProblem


@dataclass(frozen=True)
class Candidate:
    """A way to cut the work, and by name a kernel other than its own where a self-test injects one (faults.py). `other_bits`: than
    the default's, so that it is never kept, only told."""

    choice: tuning.Choice
    fault: str = ""
    other_bits: bool = False

    def function(self) -> DeviceFunction | None:
        from barellm.cuda.tuner import faults

        return getattr(faults, self.fault) if self.fault else None

    def __str__(self) -> str:
        return f"{self.fault} {self.choice}".strip()


def works_of(programs: dict[str, Program], target: Target) -> list[Problem]:
    """The pieces of work of these programs that a bed can make; those that take longest come first."""
    with tuning.watching() as found:
        lower_and_plan(programs, target)

    def seconds(work: Problem) -> float:
        return found[work.subject] * work.flops / (1.0 if isinstance(work, GemmProblem) else ATTENTION_RATE)

    works: list[Problem] = []
    for subject in found:
        if isinstance(subject, tuning.AttentionKey):
            works.append(AttentionProblem(**vars(subject)))
        elif subject.epilogue in EPILOGUES_BY_KIND[subject.role]:
            works.append(GemmProblem(**vars(subject)))
    return sorted(works, key=seconds, reverse=True)


def candidates(work: Problem, target: Target) -> list[Candidate]:
    """The default first. All have its bits."""
    default = work.default(target.arch)
    others = [t for t in work.choices(target.arch) if t != default]
    return [Candidate(t) for t in (default, *others)]


def refined(best: Candidate) -> list[Candidate]:
    """The candidates to try when the best tile or form is known: its tiles in another order."""
    if isinstance(best.choice, AttentionTile):
        return []
    return [Candidate(t) for t in choices.orders(best.choice)[1:]]


def rivals(work: Problem, target: Target) -> list[Candidate]:
    """The candidates that would give other bits than the default."""
    if isinstance(work, GemmProblem):
        return []
    return [Candidate(t, other_bits=True) for t in work.rivals(target.arch)]
