"""The NVIDIA GPU backend: kernels compiled ahead by Triton, loaded and launched through the driver."""
