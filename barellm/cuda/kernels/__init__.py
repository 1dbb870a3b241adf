"""Kernels, one file per family. Importing the package fills the registry."""

from barellm.cuda.kernels import elementwise, matmul

__all__ = ["elementwise", "matmul"]
