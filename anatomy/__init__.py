"""The anatomy of a matrix product: one short file a rung, from three loops to the kernel that barellm trains with.

Read `cpu/` and `gpu/` in the order of their numbers. `python -m anatomy` runs the rungs of this machine; docs/anatomy.md
explains them.
"""
