"""Benchmarks: products, attention, single ops and whole steps, beside their peers."""
