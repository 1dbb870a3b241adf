"""The GPU's fusion table: which sequences of primitive ops one kernel does. First row wins."""

from __future__ import annotations

from barellm.program.fusion import Fusion
from barellm.runtime.fusions import CLASSIFIER, PRODUCTS

LONGEST = 4096  # columns of a row whose whole backward pass fits in registers

_NORM = {"weight": "1.weight", "bias": "1.bias"}
_SUM = {"total": "0.y", "y": "1.y", "mean": "1.mean", "rstd": "1.rstd"}
_SUM_OF_DROPPED = {"total": "1.y", "y": "2.y", "mean": "2.mean", "rstd": "2.rstd"}

# An addition to the residual stream goes with the norm that reads it, not with the product before: as many bytes, and the product's
# epilogue, which its pipeline waits for, stays short.
NORMS: list[Fusion] = [
    Fusion(
        "dropout_add_layernorm",
        [("dropout", {}), ("add", {"b": "0.y"}), ("layernorm", {"x": "1.y"})],
        inputs={"a": "1.a", "b": "0.x", "weight": "2.weight", "bias": "2.bias"},
        outputs=_SUM_OF_DROPPED,
        optional=("bias",),
        when=lambda ops: int(ops[2].x.shape[-1]) <= LONGEST,
    ),
    Fusion(
        "add_layernorm",
        [("add", {}), ("layernorm", {"x": "0.y"})],
        inputs={"a": "0.a", "b": "0.b", **_NORM},
        outputs=_SUM,
        optional=("bias",),
    ),
]


def _backward(*then: tuple[str, dict[str, str]], **outputs: str) -> Fusion:
    """Both gradients of a norm, then what reads the one that goes on."""
    return Fusion(
        "layernorm_backward",
        [("layernorm_dx", {}), ("layernorm_dparams", {k: f"0.{k}" for k in ("dy", "x", "mean", "rstd")}), *then],
        inputs={k: f"0.{k}" for k in ("dy", "x", "weight", "mean", "rstd")},
        outputs={"dx": "0.dx", "dweight": "1.dweight", "dbias": "1.dbias", **outputs},
        when=lambda ops: int(ops[0].x.shape[-1]) <= LONGEST,
    )


_DROP, _CAST = ("dropout_backward", {"dy": "0.dx"}), ("cast", {"x": "0.dx"})
BACKWARD: list[Fusion] = [
    _backward(_DROP, ("bias_grad", {"dy": "2.dx"}), narrow="2.dx", dnext="3.dbias"),
    _backward(_DROP, narrow="2.dx"),
    _backward(("bias_grad", {"dy": "0.dx"}), _CAST, dnext="2.dbias", narrow="3.y"),
    _backward(_CAST, narrow="2.y"),
    _backward(("bias_grad", {"dy": "0.dx"}), dnext="2.dbias"),
    _backward(),
]

FUSIONS: list[Fusion] = [*NORMS, *BACKWARD, *CLASSIFIER, *PRODUCTS]
