"""The figures of the booklet docs/book: each is a function that draws on a sheet of one style. Importing this fills FIGURES."""

from anatomy.figures import cpu, cuda, machine, schedule, shared, tensor, tiles, traces
from anatomy.figures.style import FIGURES

__all__ = ["FIGURES", "cpu", "cuda", "machine", "schedule", "shared", "tensor", "tiles", "traces"]
