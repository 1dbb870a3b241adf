"""The CPU's fusion table: which sequences of primitive ops one kernel does. First row wins."""

from __future__ import annotations

from barellm.program.fusion import Fusion
from barellm.runtime.fusions import CLASSIFIER, NORMS_BACKWARD, PRODUCTS, RMSNORMS_BACKWARD

FUSIONS: list[Fusion] = [*CLASSIFIER, *PRODUCTS, *NORMS_BACKWARD, *RMSNORMS_BACKWARD]
