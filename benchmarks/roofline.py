"""The roofline of a whole step, that steps are held against."""

from collections.abc import Mapping

from barellm.program.builder import Program
from barellm.tools.plan.roofline import Ceiling


def step_bound(programs: Mapping[str, Program], dtype: str, ceiling: Ceiling, shares: Mapping[str, float] | None = None) -> float:
    """The roofline of a step in seconds: model FLOPs at the peak of `dtype`, and what the optimizers do with each parameter.
    `shares`: how often a program runs in a step, where it is not the program "optimizer_step" once."""
    ends = {name: share for name, share in (shares or {"optimizer_step": 1.0}).items() if name != "forward_backward"}
    update = sum(share * ceiling.seconds(op) for name, share in ends.items() for op in programs[name].ops if op.update)
    return programs["forward_backward"].flops / ceiling.peak(dtype) + update
