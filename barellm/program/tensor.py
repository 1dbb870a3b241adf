"""Tensors of a program: a name, a shape, a dtype and a role. They hold no data."""

from dataclasses import dataclass, field
from math import prod
from typing import Literal

import numpy as np

from barellm.program import dtypes, scalars

Role = Literal["parameter", "gradient", "state", "cache", "constant", "input", "activation", "output", "scratch"]

PERSISTENT: tuple[Role, ...] = ("parameter", "gradient", "state", "cache", "constant")


class Dim(int):
    """A size known only at run time: the integer is the planned maximum, `name` the scalar with the actual size. Any name will
    do: one that no scalar has yet becomes a scalar."""

    name: str

    def __new__(cls, name: str, maximum: int) -> "Dim":
        dim = super().__new__(cls, maximum)
        dim.name = name
        scalars.declare(name)
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
    # Of parameters only: ("normal", std), ("uniform", bound), ("constant", value) or ("transposed", another's name).
    init: tuple[str, float | str] | None = None
    valid_rows: int = field(default=0)  # rows that are initialised and used; the rest stay zero (padded vocabulary)
    bf16: bool = False  # of parameters only: its updates round to bf16, whatever its dtype has room for
    frozen: bool = False  # of parameters only: it is given and stays, so it has no gradient and no optimizer state
    value: np.ndarray | None = None  # what a tensor of role "constant" holds

    @property
    def base(self) -> "Tensor":
        """The tensor that owns the bytes: this one, but for a View."""
        return self

    @property
    def trained(self) -> int:
        """Elements in use: all but those of padded rows. What is counted as a model's parameters."""
        return self.size // int(self.shape[0]) * self.valid_rows if self.shape else self.size

    @property
    def first_column(self) -> int:
        """The column of `base` at which its rows begin."""
        return 0

    @property
    def first_element(self) -> int:
        """The element of `base` at which it begins."""
        return self.first_column

    @property
    def row_stride(self) -> int:
        """Elements from one row of the last axis to the next."""
        return int(self.base.shape[-1]) if self.shape else 1

    @property
    def size(self) -> int:
        return prod(int(n) for n in self.shape)

    @property
    def nbytes(self) -> int:
        return dtypes.FORMATS[self.dtype].nbytes(self.size)

    @property
    def dims(self) -> tuple[Dim, ...]:
        return tuple(n for n in self.shape if isinstance(n, Dim))

    @property
    def width(self) -> int:
        """Product of the constant axes: the row length of an activation."""
        return prod(n for n in self.shape if not isinstance(n, Dim))

    def __repr__(self) -> str:
        return f"{self.name}{list(self.shape)} {self.dtype}"


class View(Tensor):
    """Columns [first, first + width) of another tensor's last axis. It owns no bytes: its rows lie `row_stride` elements apart."""

    def __init__(self, base: Tensor, first: int, width: int) -> None:
        assert base.base is base, "a view is of a tensor, not of a view"
        if not 0 <= first < first + width <= base.shape[-1]:
            raise ValueError(f"columns {first} to {first + width} are not in {describe(tensor=base)}")
        super().__init__(f"{base.name}[{first}:{first + width}]", (*base.shape[:-1], width), base.dtype, base.role)
        self._base, self._first = base, first

    @property
    def base(self) -> Tensor:
        return self._base

    @property
    def first_column(self) -> int:
        return self._first

    def on(self, base: Tensor) -> "View":
        """The same columns of another tensor."""
        return View(base, self._first, int(self.shape[-1]))


class Span(Tensor):
    """Elements [first, first + count) of another tensor, one after the other: a rank's share of it. It owns no bytes."""

    def __init__(self, base: Tensor, first: int, count: int) -> None:
        assert base.base is base, "a span is of a tensor, not of a view"
        if not 0 <= first < first + count <= base.size:
            raise ValueError(f"elements {first} to {first + count} are not in {describe(tensor=base)}")
        super().__init__(f"{base.name}[{first}:{first + count}]", (count,), base.dtype, base.role)
        self._base, self._first = base, first

    @property
    def base(self) -> Tensor:
        return self._base

    @property
    def first_element(self) -> int:
        return self._first

    @property
    def row_stride(self) -> int:
        return self.size


@dataclass(frozen=True)
class Documents:
    """Documents packed in rows, of which each token sees its own alone: of each token (B, T) i32 its position in its document, and
    that of the document's first token in the row."""

    positions: Tensor
    starts: Tensor


def describe(**tensors: Tensor | None) -> str:
    """`x (batch<=4, 768), w (2304, 768)`: the offending shapes of an error message."""
    return ", ".join(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in tensors.items() if t is not None)
