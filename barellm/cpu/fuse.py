"""The CPU's fusion table: which sequences of primitive ops one kernel does. First row wins."""

from __future__ import annotations

from barellm.cpu.kernels.activations import EMITTERS
from barellm.program.fusion import Fusion
from barellm.runtime.fusions import CLASSIFIER, CODED, NORMS_BACKWARD, RMSNORMS_BACKWARD, products, quantized, rescaled

FUSIONS: list[Fusion] = [
    *CLASSIFIER,
    *CODED,
    *rescaled(EMITTERS),
    *products(EMITTERS),
    *quantized(EMITTERS),
    *NORMS_BACKWARD,
    *RMSNORMS_BACKWARD,
]
