"""What a launch did on the PTX machine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Counts:
    """`sectors`: of 32 bytes, of global memory; `asked`: as few as the bytes could lie in; `passes`: over the banks of shared
    memory, `needed`: as few as would do."""

    instructions: Counter[str] = field(default_factory=Counter)
    sectors: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    passes: Counter[str] = field(default_factory=Counter)
    needed: Counter[str] = field(default_factory=Counter)
