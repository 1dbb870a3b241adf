"""Kernels, one file per family. Importing the package fills the registry."""

from barellm.cuda.kernels import columns, dropout, elementwise, embedding, init, layernorm, matmul, optimizer

__all__ = ["columns", "dropout", "elementwise", "embedding", "init", "layernorm", "matmul", "optimizer"]
