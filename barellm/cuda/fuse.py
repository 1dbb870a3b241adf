"""The GPU's fusion table: which sequences of primitive ops one kernel does, first match wins; and which ops share a launch, those
of equal keys."""

from dataclasses import replace
from typing import Any

from barellm.cuda.kernels.collectives import sum_unit
from barellm.cuda.kernels.common import matrix_unit, unit_of
from barellm.cuda.kernels.pointwise.activations import IN_EPILOGUES
from barellm.program.fusion import Fusion
from barellm.program.grouping import Alike
from barellm.runtime.fusions import CLASSIFIER, CODED, NORMS_BACKWARD, RMSNORMS_BACKWARD, layernorm_backward, products, quantized

LONGEST = 4096  # columns of a row whose whole backward pass fits in registers

_NORM = {"weight": "1.weight", "bias": "1.bias"}
_SUM = {"total": "0.y", "y": "1.y", "mean": "1.mean", "rstd": "1.rstd"}
_SUM_OF_DROPPED = {"total": "1.y", "y": "2.y", "mean": "2.mean", "rstd": "2.rstd"}

# An addition to the residual stream goes with the norm that reads it, not with the GEMM before: as many bytes, and the GEMM's
# epilogue, which its pipeline waits for, stays short.
NORMS: list[Fusion] = [
    Fusion("dropout_add_layernorm", [("dropout", {}), ("add", {"b": "0.y"}), ("layernorm", {"x": "1.y"})],
           {"a": "1.a", "b": "0.x", "weight": "2.weight", "bias": "2.bias"}, _SUM_OF_DROPPED, optional=("bias",),
           when=lambda ops: int(ops[2].x.shape[-1]) <= LONGEST),
    Fusion("add_layernorm", [("add", {}), ("layernorm", {"x": "0.y"})], {"a": "0.a", "b": "0.b", **_NORM}, _SUM,
           optional=("bias",)),
    Fusion("add_rmsnorm", [("add", {}), ("rmsnorm", {"x": "0.y"})], {"a": "0.a", "b": "0.b", "weight": "1.weight"},
           {"total": "0.y", "y": "1.y", "rstd": "1.rstd"}, optional=("weight",)),
]  # fmt: skip


_DROPPED = ("dropout_backward", {"dy": "0.dx"})
BACKWARD: list[Fusion] = [
    replace(row, when=lambda ops: int(ops[0].x.shape[-1]) <= LONGEST)
    for row in (
        layernorm_backward(_DROPPED, ("bias_grad", {"dy": "2.dx"}), dropped="2.dx", dx_sum="3.dbias"),
        layernorm_backward(_DROPPED, dropped="2.dx"),
        *NORMS_BACKWARD,
        *RMSNORMS_BACKWARD,
    )
]

# The gradients of a weight and of its bias sum the same rows.
WEIGHT_AND_BIAS = Fusion(
    "matmul_dw_dbias", [("bias_grad", {}), ("matmul_dw", {"dy": "0.dy"})], {"dy": "0.dy", "x": "1.x"},
    {"dweight": "1.dweight", "dbias": "0.dbias"},
)  # fmt: skip

FUSIONS: list[Fusion] = [
    *NORMS, *BACKWARD, *CLASSIFIER, *CODED, *products(IN_EPILOGUES), *quantized(IN_EPILOGUES), WEIGHT_AND_BIAS
]  # fmt: skip


def alike_adam(op: Any) -> tuple[Any, ...]:
    """The key that the updates of one launch share."""
    dtypes = (t.dtype for t in op.outputs.values())
    return (op.clip, *dtypes, op.beta1, op.beta2, op.eps, op.lr_scale, op.stream is None, op.bf16, unit_of(op.param))


# Initial values and the update of all parameters: a launch takes a microsecond or two, and most parameters no time at all. What is
# code is in the key: formats in memory, and how wide the accesses are.
GROUPS: dict[str, Alike] = {
    "normal_init": lambda op: (op.param.dtype, op.param.shape[-1], op.bf16, unit_of(op.param)),
    "uniform_init": lambda op: (op.param.dtype, op.param.shape[-1], op.bf16, unit_of(op.param)),
    "constant_init": lambda op: (op.param.dtype, unit_of(op.param)),
    "sum_squares": lambda op: unit_of(op.x),
    "sum_over_ranks": lambda op: (op.rank, op.others.shape[0], sum_unit(op)),
    "adamw": alike_adam,
    "cautious_adam": alike_adam,
    "muon_momentum": lambda op: (op.clip, op.u.dtype, matrix_unit(op, op.grad), op.nesterov),
    "muon_normalize": lambda op: (op.u.dtype, matrix_unit(op, op.u)),
    "gram": lambda op: (op.one(op.x), op.x.dtype),
    "gram_polynomial": lambda op: (op.one(op.a), op.a.dtype),
    "gram_apply": lambda op: (op.one(op.x), op.x.dtype),
    "muon_update": lambda op: (
        op.clip, op.rate, op.param.dtype, op.x.dtype, matrix_unit(op, op.param), op.cautious, op.squared, op.scales is None,
        op.scales is not None and op.one(op.x)[0] < op.one(op.x)[1],
    ),
}  # fmt: skip
