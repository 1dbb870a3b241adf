"""The CPU's fusion table: which sequences of primitive ops one kernel does. First row wins."""

from __future__ import annotations

from typing import Any

FUSIONS: list[Any] = []
