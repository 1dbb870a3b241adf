"""The dynamic loss scale of fp16 programs, whose gradients would vanish without one (Micikevicius et al. 2018).

With `Precision.branch_scales` each residual branch has a gradient scale of its own (Ramesh et al. 2021, appendix D). The residual
stream's gradient carries the loss scale. Where it enters a branch in the backward pass it gets the branch's scale, and at the exit,
before it is added to the stream's, the loss scale. So do, once in an update, the gradients of the branch's parameters.

The state of a scale is (2,) i32: [its power of two less FIRST_SCALE, good updates since it last changed]. Zeros mean 65536."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from barellm.program.graph import Graph
    from barellm.program.tensor import Tensor

FIRST_SCALE, LEAST_SCALE, MOST_SCALE = 16, 0, 30  # powers of two
GROWTH_STEPS = 2000  # good updates after which the scale doubles


def loss_scale_of(p: "Graph") -> "Tensor | None":
    """The state of the loss scale, or None where the precision of the program has none."""
    return branch_scale(p, None) if p.precision.scaled else None


def branch_scale(p: "Graph", branch: str | None) -> "Tensor":
    """The state of a residual branch's gradient scale; None: of the loss scale."""
    return p.state(f"{branch}.gradient_scale" if branch else "loss_scale", (2,), "i32")


def scale_of(loss_scale: "np.ndarray") -> float:
    return 2.0 ** (FIRST_SCALE + int(loss_scale[0]))
