"""The CPU's fusion table: which sequences of primitive ops one kernel does. First row wins."""

from __future__ import annotations

from barellm.program.fusion import Fusion
from barellm.runtime.fusions import CLASSIFIER, PRODUCTS


def _layernorm_backward(bias: bool, cast: bool) -> Fusion:
    """A LayerNorm's gradients, and what the residual stream's gradient is for next: the bias before, an operand of products."""
    sequence: list[tuple[str, dict[str, str]]] = [("layernorm_dx", {})]
    sequence += [("layernorm_dparams", {name: f"0.{name}" for name in ("dy", "x", "mean", "rstd")})]
    outputs = {"dx": "0.dx", "dweight": "1.dweight", "dbias": "1.dbias"}
    if bias:
        outputs["dx_sum"] = f"{len(sequence)}.dbias"
        sequence.append(("bias_grad", {"dy": "0.dx"}))
    if cast:
        outputs["rounded"] = f"{len(sequence)}.y"
        sequence.append(("cast", {"x": "0.dx"}))
    inputs = {name: f"0.{name}" for name in ("dy", "x", "weight", "mean", "rstd")}
    return Fusion("layernorm_backward", sequence, inputs=inputs, outputs=outputs)


FUSIONS: list[Fusion] = [
    *CLASSIFIER,
    *PRODUCTS,
    # One pass over a LayerNorm's input and both gradients instead of up to four.
    *(_layernorm_backward(bias, cast) for bias, cast in ((True, True), (False, True), (True, False), (False, False))),
]
