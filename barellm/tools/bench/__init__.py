"""Benchmarks: matmuls, attention, single ops and whole steps, beside baselines."""
