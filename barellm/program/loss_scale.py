"""The dynamic loss scale of fp16 programs, whose gradients would vanish without one (Micikevicius et al. 2018).

Its state is (2,) i32: [the scale's power of two less FIRST_SCALE, good updates since it last changed]. Every state begins with
zeros, which are a scale of 65536."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from barellm.program.graph import Graph
    from barellm.program.tensor import Tensor

FIRST_SCALE, LEAST_SCALE, MOST_SCALE = 16, 0, 30  # powers of two
GROWTH_STEPS = 2000  # good updates after which the scale doubles


def loss_scale_of(p: Graph) -> Tensor | None:
    """The state of the loss scale, or None where the precision of the program has none."""
    return p.state("loss_scale", (2,), "i32") if p.precision.scaled else None


def scale_of(loss_scale: np.ndarray) -> float:
    return 2.0 ** (FIRST_SCALE + int(loss_scale[0]))
