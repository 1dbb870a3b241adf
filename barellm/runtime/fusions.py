"""Rows of fusion tables that backends share: what a matmul with a weight, and a LayerNorm's backward pass, take along."""

from collections.abc import Iterable, Iterator
from typing import Any

from barellm.program.fusion import Fusion

_LINEAR = {"x": "0.x", "weight": "0.weight", "bias": "1.bias"}
_QUANTIZED = {"x": "0.x", "codes": "0.codes", "scales": "0.scales", "bias": "1.bias"}
_BIAS = ("bias", {"x": "0.y"})


def _losses(matmul: str) -> Iterator[Fusion]:
    """The loss of a classifier without its gradients, and the loss of each token by itself."""
    kind, operands = matmul.removesuffix("matmul"), _QUANTIZED if matmul == "quantized_matmul" else _LINEAR
    inputs = {k: v for k, v in operands.items() if k != "bias"} | {"targets": "1.targets"}
    for name, op, outputs in (("loss", "cross_entropy", ["loss"]), ("scores", "token_losses", ["losses", "margins"])):
        sequence = [(matmul, {}), (op, {"logits": "0.y"})]
        yield Fusion(f"{kind}classifier_{name}", sequence, inputs, {output: f"1.{output}" for output in outputs})


_HEAD: list[tuple[str, dict[str, str]]] = [
    ("matmul", {}),
    ("cross_entropy", {"logits": "0.y"}),
    ("cross_entropy_backward", {"logits": "0.y", "targets": "1.targets", "lse": "1.lse"}),
    ("matmul_dx", {"dy": "2.dlogits", "weight": "0.weight"}),
    ("matmul_dw", {"dy": "2.dlogits", "x": "0.x"}),
]
_OF_HEAD = {"x": "0.x", "weight": "0.weight", "targets": "1.targets", "loss_scale": "2.loss_scale"}
_LOSS = {"loss": "1.loss", "dx": "3.dx"}
_FROZEN: dict[str, Any] = {"optional": ("loss_scale",), "kernel": "classifier", "when": lambda ops: ops[0].weight.base.frozen}

CLASSIFIER: list[Fusion] = [
    # Loss, logit gradient, input gradient and weight gradient, a chunk of tokens at a time: logits never exist as a whole.
    Fusion("classifier", _HEAD, _OF_HEAD, _LOSS | {"dweight": "4.dweight"}, optional=("loss_scale",)),
    Fusion("classifier_frozen", _HEAD[:-1], _OF_HEAD, _LOSS, **_FROZEN),
    *_losses("matmul"),
    # The loss and its gradients of softcapped logits, whose head is stored (C, V), or (V, C).
    *(
        Fusion(
            "softcapped_classifier",
            [
                (first, {}),
                ("softcap_cross_entropy", {"logits": f"0.{logits}"}),
                ("softcap_cross_entropy_backward", {"logits": f"0.{logits}", "targets": "1.targets", "lse": "1.lse"}),
                (second, {x2: "2.dlogits", "weight": "0.weight"}),
                ("matmul_dw", {"dy": "0.dy", "x": "2.dlogits"} if x == "dy" else {"dy": "2.dlogits", "x": "0.x"}),
            ],
            inputs={"x": f"0.{x}", "weight": "0.weight", "targets": "1.targets", "loss_scale": "2.loss_scale"},
            outputs={"loss": "1.loss", "next_loss": "1.next_loss", "dx": f"3.{dx}", "dweight": "4.dweight"},
            optional=("loss_scale",),
            attrs={"transposed": x == "dy"},
        )
        for first, x, logits, second, x2, dx in (
            ("matmul_dx", "dy", "dx", "matmul", "x", "y"),
            ("matmul", "x", "y", "matmul_dx", "dy", "dx"),
        )
    ),
    *(
        Fusion("softcapped_classifier_loss", [(matmul, {}), ("softcap_cross_entropy", {"logits": f"0.{logits}"})],
               {"x": f"0.{x}", "weight": "0.weight", "targets": "1.targets"}, {"loss": "1.loss", "next_loss": "1.next_loss"},
               attrs={"transposed": matmul == "matmul_dx"})
        for matmul, x, logits in (("matmul_dx", "dy", "dx"), ("matmul", "x", "y"))
    ),
]  # fmt: skip

CODED: list[Fusion] = [
    # The gradient of softcapped logits is written as codes: it never exists in another form.
    Fusion("softcap_codes", [("softcap_cross_entropy_backward", {}), ("quantise", {"x": "0.dlogits"})],
           {"logits": "0.logits", "targets": "0.targets", "lse": "0.lse", "scale": "1.scale"}, {"y": "1.y"})
]  # fmt: skip


def products(activations: Iterable[str]) -> list[Fusion]:
    """Fusions of a matmul with its epilogue, for the `activations` that a backend has emitters of. One kernel, "product", computes
    all. The attribute `epilogues` lists what follows the matmul: "bias", then an activation, the slope of one, or "residual"."""
    names = list(activations)
    return [
        *(_forward(f"linear_{name}", biased, (name, "x"), name) for name in names for biased in (True, False)),
        *(_forward("linear_residual", biased, ("add", "b"), "residual") for biased in (True, False)),
        Fusion("linear", [("matmul", {}), _BIAS], _LINEAR, {"y": "1.y"}, kernel="product", attrs={"epilogues": ("bias",)}),
        *(_input_gradient(f"matmul_dx_{name}", "matmul_dx", "dy", "dx", name) for name in names),
        # Of a matmul whose weight is stored the other way round (`transposed_weight`).
        *(_input_gradient(f"matmul_{name}_backward", "matmul", "x", "y", name) for name in names),
    ]


def rescaled(activations: Iterable[str]) -> list[Fusion]:
    """Fusions of a matmul times a constant, then an activation or its slope, for backends whose kernel "product" has `forward`."""
    ahead, inputs = [("matmul", {}), ("rescale", {"x": "0.y"})], {"x": "0.x", "weight": "0.weight"}
    back, gradient = [("matmul_dx", {}), ("rescale", {"x": "0.dx"})], {"dy": "0.dy", "weight": "0.weight"}

    def row(name: str, sequence: list, inputs: dict[str, str], outputs: dict[str, str], *then: str) -> Fusion:
        return Fusion(name, sequence, inputs, outputs, kernel="product", attrs={"epilogues": ("rescale", *then)})

    rows = []
    for name in activations:
        slope = f"{name}_backward"
        with_pre = {"pre": "1.y", "y": "2.y"}
        rows.append(row(f"linear_rescale_{name}", [*ahead, (name, {"x": "1.y"})], inputs, with_pre, name))
        sequence, read = [*back, (slope, {"dy": "1.y"})], gradient | {"pre": "2.x"}
        rows.append(row(f"matmul_dx_rescale_{name}", sequence, read, {"dx": "2.dx"}, slope))
    plain = [row("linear_rescale", ahead, inputs, {"y": "1.y"})]
    return [*rows, *plain, row("matmul_dx_rescale", back, gradient, {"dx": "1.y"})]


def quantized(activations: Iterable[str]) -> list[Fusion]:
    """The same of matmuls with quantized weights, which have no gradients. The kernel is "quantized_product"."""
    names = list(activations)
    return [
        *_losses("quantized_matmul"),
        *(_forward(f"linear_{name}", b, (name, "x"), name, "quantized_") for name in names for b in (True, False)),
        *(_forward("linear_residual", b, ("add", "b"), "residual", "quantized_") for b in (True, False)),
        Fusion(
            "quantized_linear", [("quantized_matmul", {}), _BIAS], _QUANTIZED, {"y": "1.y"}, kernel="quantized_product",
            attrs={"epilogues": ("bias",)},
        ),
    ]  # fmt: skip


def _forward(name: str, biased: bool, then: tuple[str, str], epilogue: str, kind: str = "") -> Fusion:
    """A matmul, its bias where it is `biased`, and `then` an op, with the name of its input, as `epilogue`. `kind` stands
    before the names of the matmul's op and kernel."""
    op, slot = then
    last = 1 + biased
    before = f"{last - 1}.y"
    inputs = {k: v for k, v in (_QUANTIZED if kind else _LINEAR).items() if biased or k != "bias"}
    residual = epilogue == "residual"
    return Fusion(
        kind + name, [(f"{kind}matmul", {}), *([_BIAS] if biased else []), (op, {slot: before})],
        inputs | ({"residual": f"{last}.a"} if residual else {}), ({} if residual else {"pre": before}) | {"y": f"{last}.y"},
        kernel=f"{kind}product", attrs={"epilogues": (*(("bias",) if biased else ()), epilogue)},
    )  # fmt: skip


def _input_gradient(name: str, matmul: str, operand: str, result: str, activation: str) -> Fusion:
    """A matmul's input gradient times the slope of the activation before it."""
    slope = f"{activation}_backward"
    return Fusion(
        name, [(matmul, {}), (slope, {"dy": f"0.{result}"})], {operand: f"0.{operand}", "weight": "0.weight", "pre": "1.x"},
        {result: "1.dx"}, kernel="product", attrs={"epilogues": (slope,)},
    )  # fmt: skip


def _of_first(*names: str) -> dict[str, str]:
    """These operands of a sequence's first op."""
    return {name: f"0.{name}" for name in names}


def layernorm_backward(*then: tuple[str, dict[str, str]], **outputs: str) -> Fusion:
    """A LayerNorm's gradients in one pass over its input, and the ops `then` that read the residual stream's gradient next."""
    sequence = [("layernorm_dx", {}), ("layernorm_dparams", _of_first("dy", "x", "mean", "rstd")), *then]
    results = {"dx": "0.dx", "dweight": "1.dweight", "dbias": "1.dbias", **outputs}
    return Fusion("layernorm_backward", sequence, _of_first("dy", "x", "weight", "mean", "rstd"), results)


def rmsnorm_backward(*then: tuple[str, dict[str, str]], **outputs: str) -> Fusion:
    """The same of an RMSNorm with a weight."""
    sequence = [("rmsnorm_dx", {}), ("rmsnorm_dweight", _of_first("dy", "x", "rstd")), *then]
    results = {"dx": "0.dx", "dweight": "1.dweight", **outputs}
    return Fusion("rmsnorm_backward", sequence, _of_first("dy", "x", "weight", "rstd"), results)


_DX_SUM, _ROUNDED = ("bias_grad", {"dy": "0.dx"}), ("cast", {"x": "0.dx"})

NORMS_BACKWARD: list[Fusion] = [
    # The bias of the matmul before, and an operand of matmuls.
    layernorm_backward(_DX_SUM, _ROUNDED, dx_sum="2.dbias", rounded="3.y"),
    layernorm_backward(_ROUNDED, rounded="2.y"),
    layernorm_backward(_DX_SUM, dx_sum="2.dbias"),
    layernorm_backward(),
    Fusion("layernorm_backward", [("layernorm_dx", {}), _ROUNDED], _of_first("dy", "x", "weight", "mean", "rstd"),
           {"dx": "0.dx", "rounded": "1.y"}, when=lambda ops: ops[0].weight.base.frozen),
]  # fmt: skip

RMSNORMS_BACKWARD: list[Fusion] = [
    rmsnorm_backward(_ROUNDED, rounded="2.y"),
    rmsnorm_backward(),
    # Without a weight, or with one that is frozen, there is nothing but dx to round.
    Fusion("rmsnorm_backward", [("rmsnorm_dx", {}), _ROUNDED], _of_first("dy", "x", "weight", "rstd"),
           {"dx": "0.dx", "rounded": "1.y"}, optional=("weight",),
           when=lambda ops: ops[0].weight is None or ops[0].weight.base.frozen),
]  # fmt: skip
