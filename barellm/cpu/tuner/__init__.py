"""GEMM autotuning: candidate configs, a child process that verifies and times them, the decision."""
