"""Kernels, one file per family. Importing the package fills the registry."""

from barellm.cuda.kernels import (
    columns,
    dropout,
    elementwise,
    embedding,
    init,
    layernorm,
    layernorm_backward,
    matmul,
    optimizer,
)

__all__ = [
    "columns",
    "dropout",
    "elementwise",
    "embedding",
    "init",
    "layernorm",
    "layernorm_backward",
    "matmul",
    "optimizer",
]
