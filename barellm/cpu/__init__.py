"""The CPU backend: kernels written in Python, made into machine code by LLVM."""
