"""Runs of one process, one rank that is planned without the others, and ranks on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from barellm.program.ranks import Ranks

if TYPE_CHECKING:
    import numpy as np


class Alone:
    """A run of one process."""

    rank: int = 0
    count: int = 1
    number: int = 0
    direct: bool = False

    def prepared(self, sends: Sequence[tuple[int, np.ndarray]], receives: Sequence[tuple[int, np.ndarray]]) -> Callable[[], None]:
        raise AssertionError("there is nobody else")

    def beginning(
        self, number: int, sends: Sequence[tuple[int, np.ndarray]], receives: Sequence[tuple[int, np.ndarray]]
    ) -> Callable[[], None]:
        raise AssertionError("there is nobody else")

    def ending(self, number: int) -> Callable[[], None]:
        raise AssertionError("there is nobody else")

    def peer_addresses(self, sends: Sequence[tuple[int, np.ndarray]]) -> list[tuple[int, list[int]]]:
        raise AssertionError("there is nobody else")

    def barrier(self, *, complete: bool = True) -> None:
        raise AssertionError("there is nobody else")

    def gather(self, value: Any, *, no_timeout: bool = False) -> list[Any]:
        return [value]

    def abort(self, status: int) -> None:
        raise AssertionError("there is nobody else")

    def send(self, rank: int, value: Any, *, background: bool = False) -> None:
        raise AssertionError("there is nobody else")

    def receive(self, rank: int, *, no_timeout: bool = False, background: bool = False) -> Any:
        raise AssertionError("there is nobody else")


ALONE = Alone()


class Planned(Alone):
    """One of several ranks, for a plan: nobody is there to talk to."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count


class _WithoutPeerAccess:
    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.direct = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)


def without_peer_access(ranks: Ranks) -> Ranks:
    """The same ranks, whose tensors lie where processes do not read each other's memory: on GPUs."""
    return cast(Ranks, _WithoutPeerAccess(ranks))


def first(ranks: Ranks, value: Any) -> Any:
    """What rank 0 says, which may come late."""
    return ranks.gather(value if ranks.rank == 0 else None, no_timeout=True)[0]
