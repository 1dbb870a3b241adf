"""The processes of a run, which are called ranks, as programs and those who run them see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np


class Ranks(Protocol):
    """This process among those of its run. All ranks call the same methods in the same order; each call returns when all that it
    waits for have made it. `no_timeout`: rank 0 may be at work alone, for however long, where the others call already."""

    @property
    def rank(self) -> int:
        """The number of this one, from 0."""
        ...

    @property
    def count(self) -> int: ...

    @property
    def number(self) -> int:
        """The number of this one among those of its machine, from 0."""
        ...

    def prepared(self, sends: Sequence[tuple[int, np.ndarray]], receives: Sequence[tuple[int, np.ndarray]]) -> Callable[[], None]:
        """A function that sends arrays to ranks, and fills arrays with what ranks send, in these orders: (rank, contiguous array).
        It may be called often, all ranks call theirs, and it returns when all have arrived."""
        ...

    def beginning(
        self, number: int, sends: Sequence[tuple[int, np.ndarray]], receives: Sequence[tuple[int, np.ndarray]]
    ) -> Callable[[], None]:
        """A function that begins what `prepared` does, as transfer `number`, and returns at once."""
        ...

    def ending(self, number: int) -> Callable[[], None]:
        """A function that waits until the transfer `number`, which has begun, is over."""
        ...

    @property
    def direct(self) -> bool:
        """Whether all ranks are on one machine and may read each other's memory."""
        ...

    def peer_addresses(self, sends: Sequence[tuple[int, np.ndarray]]) -> list[tuple[int, list[int]]]:
        """Where `direct` ranks read what each of the others has for this one, in the order of the ranks: its process, and the
        addresses of its arrays in their order. `sends`: the arrays of this one, and for whom each is."""
        ...

    def barrier(self, *, complete: bool = True) -> None:
        """Wait until all ranks are here. Not `complete`: what this one has read is not all, for a rank is gone; the run ends."""
        ...

    def gather(self, value: Any, *, no_timeout: bool = False) -> list[Any]:
        """Everybody's value, by rank. It may be whatever can be pickled."""
        ...

    def abort(self, status: int) -> None:
        """End all ranks at once, with this exit status."""
        ...

    def send(self, rank: int, value: Any, *, background: bool = False) -> None:
        """Give a value to one rank. `background`: a thread does it that works beside the run, and is received by another."""
        ...

    def receive(self, rank: int, *, no_timeout: bool = False, background: bool = False) -> Any:
        """The next value that a rank gives this one."""
        ...
