"""The machine code of kernels: what was compiled, and what its inner loops do."""
