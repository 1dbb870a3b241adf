"""Finds the fastest tile of Triton's products on a GPU."""
