"""Primitive ops, one file per family."""

from barellm.program.ops.elementwise import Add, Cast, Gelu, GeluBackward
from barellm.program.ops.layernorm import LayerNorm, LayerNormDparams, LayerNormDx
from barellm.program.ops.matmul import Bias, BiasGrad, Matmul, MatmulDw, MatmulDx

__all__ = [
    "Add",
    "Bias",
    "BiasGrad",
    "Cast",
    "Gelu",
    "GeluBackward",
    "LayerNorm",
    "LayerNormDparams",
    "LayerNormDx",
    "Matmul",
    "MatmulDw",
    "MatmulDx",
]
