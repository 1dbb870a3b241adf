"""The GPU's fusion table: which sequences of primitive ops one kernel does. First row wins."""

from __future__ import annotations

from barellm.program.fusion import Fusion

FUSIONS: list[Fusion] = []
