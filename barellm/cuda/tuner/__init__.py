"""Autotuner of GEMM and attention configurations on a GPU."""
