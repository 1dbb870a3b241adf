"""Finds the fastest way to cut products on a GPU."""
