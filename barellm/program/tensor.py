"""Tensors of a program: a name, a shape, a dtype and a role. They hold no data."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Literal

Role = Literal["parameter", "gradient", "state", "cache", "input", "activation", "output", "scratch"]

PERSISTENT: frozenset[str] = frozenset({"parameter", "gradient", "state", "cache"})

# "split" is a matrix parameter of a bf16 program: a plane of bf16 (the nearest), then a plane of signed 16-bit rests;
# the fp32 master weight has the bits (hi << 16) + rest, so both planes together lose nothing.
# "e6m9" and "ue6m10" are the 16-bit floats of optimizer state (`program.ops.moments`).
ITEMSIZE: dict[str, int] = {"fp64": 8, "fp32": 4, "split": 4, "i32": 4, "bf16": 2, "e6m9": 2, "ue6m10": 2}


class Dim(int):
    """A size known only at run time: the integer is the planned maximum, `name` the scalar with the actual size."""

    name: str

    def __new__(cls, name: str, maximum: int) -> Dim:
        dim = super().__new__(cls, maximum)
        dim.name = name
        return dim

    def __repr__(self) -> str:
        return f"{self.name}<={int(self)}"


@dataclass(eq=False)
class Tensor:
    """`shape` may contain Dims; data is row-major and dense for the actual sizes of a run."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    init: tuple[str, float] | None = None  # ("normal", std) or ("constant", value), parameters only
    valid_rows: int = field(default=0)  # rows that are initialised and used; the rest stay zero (padded vocabulary)

    @property
    def size(self) -> int:
        return prod(int(n) for n in self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * ITEMSIZE[self.dtype]

    @property
    def dims(self) -> tuple[Dim, ...]:
        return tuple(n for n in self.shape if isinstance(n, Dim))

    @property
    def width(self) -> int:
        """Product of the constant axes: the row length of an activation."""
        return prod(n for n in self.shape if not isinstance(n, Dim))

    def __repr__(self) -> str:
        return f"{self.name}{list(self.shape)} {self.dtype}"


def describe(**tensors: Tensor | None) -> str:
    """`x (batch<=4, 768), w (2304, 768)`: the offending shapes of an error message."""
    return ", ".join(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in tensors.items() if t is not None)
