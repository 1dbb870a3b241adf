"""The view that training, generation and evaluation have of a backend: programs that are run by name over one set of tensors."""

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from barellm.program.tensor import Tensor


class Session(Protocol):
    """Tensors have names. Inputs and outputs are dense for the sizes of a run, parameters are seen as fp32.

    `tensors`: everything that outlives a run, by name: parameters, gradients, optimizer state, caches. `default_scalars`:
    those that every run has unless it is given others. `piece`: tokens of a prompt that are fed at a time, so that they have the
    bits that they have one by one; 0: all at once."""

    piece: int
    tensors: "dict[str, Tensor]"
    default_scalars: dict[str, Any]

    def run(self, program: str, /, **scalars: Any) -> None:
        """One pass over a program; `program.scalars` lists the scalars and what they are when not given."""

    def write(self, name: str, values: "np.ndarray", /) -> None:
        """Set an input, for the runs to come, or a tensor of `tensors`."""

    def read(self, name: str, /) -> "np.ndarray":
        """A copy of a tensor of `tensors`, or of an output at the latest run's sizes."""
        ...

    def read_rows(self, name: str, lo: int, hi: int, /) -> "np.ndarray":
        """Leading rows [lo, hi) of a tensor of `tensors`: big ones are moved in pieces."""
        ...

    def write_rows(self, name: str, lo: int, values: "np.ndarray", /) -> None:
        """Set leading rows from `lo`."""
