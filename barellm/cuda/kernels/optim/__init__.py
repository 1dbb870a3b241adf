"""Optimizers, gradient norms and statistics."""
