"""Optimizers: each appends its ops to a Program."""
