"""Matmuls: dense, block-sparse, quantised, binary, FP8."""
