"""Rows of fusion tables that backends share: what a product with a weight, and a LayerNorm's backward pass, take along."""

from __future__ import annotations

from barellm.program.fusion import Fusion

_LINEAR = {"x": "0.x", "weight": "0.weight", "bias": "1.bias"}
_BIAS = ("bias", {"x": "0.y"})

CLASSIFIER: list[Fusion] = [
    # Loss, logit gradient, input gradient and weight gradient, a chunk of tokens at a time: logits never exist as a whole.
    Fusion(
        "classifier",
        [
            ("matmul", {}),
            ("cross_entropy", {"logits": "0.y"}),
            ("cross_entropy_backward", {"logits": "0.y", "targets": "1.targets", "lse": "1.lse"}),
            ("matmul_dx", {"dy": "2.dlogits", "weight": "0.weight"}),
            ("matmul_dw", {"dy": "2.dlogits", "x": "0.x"}),
        ],
        inputs={"x": "0.x", "weight": "0.weight", "targets": "1.targets"},
        outputs={"loss": "1.loss", "dx": "3.dx", "dweight": "4.dweight"},
    ),
    Fusion(
        "classifier_loss",
        [("matmul", {}), ("cross_entropy", {"logits": "0.y"})],
        inputs={"x": "0.x", "weight": "0.weight", "targets": "1.targets"},
        outputs={"loss": "1.loss"},
    ),
]

PRODUCTS: list[Fusion] = [
    Fusion(
        "linear_gelu",
        [("matmul", {}), _BIAS, ("gelu", {"x": "1.y"})],
        inputs=_LINEAR,
        outputs={"pre": "1.y", "y": "2.y"},
    ),
    Fusion(
        "linear_gelu",
        [("matmul", {}), ("gelu", {"x": "0.y"})],
        inputs={"x": "0.x", "weight": "0.weight"},
        outputs={"pre": "0.y", "y": "1.y"},
    ),
    Fusion(
        "linear_residual",
        [("matmul", {}), _BIAS, ("add", {"b": "1.y"})],
        inputs=_LINEAR | {"residual": "2.a"},
        outputs={"y": "2.y"},
    ),
    Fusion(
        "linear_residual",
        [("matmul", {}), ("add", {"b": "0.y"})],
        inputs={"x": "0.x", "weight": "0.weight", "residual": "1.a"},
        outputs={"y": "1.y"},
    ),
    Fusion("linear", [("matmul", {}), _BIAS], inputs=_LINEAR, outputs={"y": "1.y"}),
    Fusion(
        "matmul_dx_gelu",
        [("matmul_dx", {}), ("gelu_backward", {"dy": "0.dx"})],
        inputs={"dy": "0.dy", "weight": "0.weight", "pre": "1.x"},
        outputs={"dx": "1.dx"},
    ),
]


def layernorm_backward(*then: tuple[str, dict[str, str]], **outputs: str) -> Fusion:
    """A LayerNorm's gradients in one pass over its input, and the ops `then` that read the residual stream's gradient next."""
    return Fusion(
        "layernorm_backward",
        [("layernorm_dx", {}), ("layernorm_dparams", {k: f"0.{k}" for k in ("dy", "x", "mean", "rstd")}), *then],
        inputs={k: f"0.{k}" for k in ("dy", "x", "weight", "mean", "rstd")},
        outputs={"dx": "0.dx", "dweight": "1.dweight", "dbias": "1.dbias", **outputs},
    )


def rmsnorm_backward(*then: tuple[str, dict[str, str]], **outputs: str) -> Fusion:
    """The same of an RMSNorm with a weight."""
    return Fusion(
        "rmsnorm_backward",
        [("rmsnorm_dx", {}), ("rmsnorm_dweight", {k: f"0.{k}" for k in ("dy", "x", "rstd")}), *then],
        inputs={k: f"0.{k}" for k in ("dy", "x", "weight", "rstd")},
        outputs={"dx": "0.dx", "dweight": "1.dweight", **outputs},
    )


_DX_SUM, _ROUNDED = ("bias_grad", {"dy": "0.dx"}), ("cast", {"x": "0.dx"})

NORMS_BACKWARD: list[Fusion] = [
    # The bias of the product before, and an operand of products.
    layernorm_backward(_DX_SUM, _ROUNDED, dx_sum="2.dbias", rounded="3.y"),
    layernorm_backward(_ROUNDED, rounded="2.y"),
    layernorm_backward(_DX_SUM, dx_sum="2.dbias"),
    layernorm_backward(),
]

RMSNORMS_BACKWARD: list[Fusion] = [
    rmsnorm_backward(_ROUNDED, rounded="2.y"),
    rmsnorm_backward(),
    # Without a weight there is nothing but dx to round.
    Fusion(
        "rmsnorm_backward",
        [("rmsnorm_dx", {}), ("cast", {"x": "0.dx"})],
        inputs={k: f"0.{k}" for k in ("dy", "x", "rstd")},
        outputs={"dx": "0.dx", "rounded": "1.y"},
    ),
]
