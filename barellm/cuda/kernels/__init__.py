"""Kernels, one file per family. Importing the package fills the registry."""

from barellm.cuda.kernels import (
    attention,
    attention_cached,
    classifier,
    columns,
    cross_entropy,
    dropout,
    elementwise,
    embedding,
    init,
    layernorm,
    layernorm_backward,
    matmul,
    muon,
    optimizer,
    symmetric,
)

__all__ = [
    "attention",
    "attention_cached",
    "classifier",
    "columns",
    "cross_entropy",
    "dropout",
    "elementwise",
    "embedding",
    "init",
    "layernorm",
    "layernorm_backward",
    "matmul",
    "muon",
    "optimizer",
    "symmetric",
]
