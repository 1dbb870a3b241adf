"""Runs of one process, and one rank that is planned without the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from barellm.program.ranks import Ranks

if TYPE_CHECKING:
    import numpy as np


class Alone:
    """A run of one process."""

    rank: int = 0
    count: int = 1
    direct: bool = False

    def prepared(
        self, sends: Sequence[tuple[int, np.ndarray]], receives: Sequence[tuple[int, np.ndarray]]
    ) -> Callable[[], None]:
        raise AssertionError("there is nobody else")

    def beginning(
        self, number: int, sends: Sequence[tuple[int, np.ndarray]], receives: Sequence[tuple[int, np.ndarray]]
    ) -> Callable[[], None]:
        raise AssertionError("there is nobody else")

    def ending(self, number: int) -> Callable[[], None]:
        raise AssertionError("there is nobody else")

    def places(self, sends: Sequence[tuple[int, np.ndarray]]) -> list[tuple[int, list[int]]]:
        raise AssertionError("there is nobody else")

    def meet(self, *, whole: bool = True) -> None:
        raise AssertionError("there is nobody else")

    def gather(self, value: Any, *, patient: bool = False) -> list[Any]:
        return [value]

    def send(self, rank: int, value: Any, *, beside: bool = False) -> None:
        raise AssertionError("there is nobody else")

    def receive(self, rank: int, *, patient: bool = False, beside: bool = False) -> Any:
        raise AssertionError("there is nobody else")


ALONE = Alone()


class Planned(Alone):
    """One of several ranks, for a plan: nobody is there to talk to."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count


def first(ranks: Ranks, value: Any) -> Any:
    """What rank 0 says, which may come late."""
    return ranks.gather(value if ranks.rank == 0 else None, patient=True)[0]
