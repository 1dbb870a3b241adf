"""Finds the fastest choice for a product: candidates, a child process that proves and times them, the decision."""
