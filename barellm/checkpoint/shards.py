"""A run's tensors as checkpoints have them, where each rank holds only a share of some.

Every rank reads a checkpoint itself, and keeps its share. To save, rank 0 writes the files and asks the others for the rows of
which it has none, piece by piece: no rank ever holds more than a piece of what is not its own. So the files are those of one
process, and a run goes on with any number of ranks. While the training goes on, threads do that, and read snapshots."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from barellm.checkpoint.snapshot import Snapshot, pieces_of
from barellm.program.ranks import Ranks
from barellm.program.tensor import Tensor
from barellm.runtime.session import Session

Request = tuple[str, int, int]  # a tensor, and its elements from and to


class ShardedState:
    """A session of one rank as if it had all. `tensors`: every parameter and state, as one process has it. `parts`: the elements
    [from, to) of each that each rank holds; what is not in it is on every rank the same. Of a parameter all ranks have something,
    which may be rounded, and the rank that holds it has it exactly. `background`: threads read it, beside the run."""

    def __init__(
        self, session: Session, tensors: Mapping[str, Tensor], parts: Mapping[str, Sequence[tuple[int, int]]], ranks: Ranks, *,
        background: bool = False,
    ) -> None:  # fmt: skip
        self.tensors = dict(tensors)
        self._session, self._parts, self._ranks, self._background = session, parts, ranks, background

    def snapshot(self, names: Collection[str], *, threads: int) -> "tuple[ShardedState, Snapshot]":
        """(these tensors as they are now, readable across ranks by a thread of each; this rank's part of them)."""
        pieces = []
        for name, lo, hi in pieces_of(self.tensors, names):
            width = _width(self.tensors[name])
            first, end = self._part(name, self._ranks.rank)
            low, high = max(first, lo * width), min(end, hi * width)
            if low < high:
                pieces.append((name, *self._rows(name, low, high)))
        own_part = Snapshot(self._session, pieces, threads=threads, waits=False)
        return ShardedState(own_part, self.tensors, self._parts, self._ranks, background=True), own_part  # pyright: ignore[reportArgumentType]

    def _part(self, name: str, rank: int) -> tuple[int, int]:
        """The elements of a tensor, from and to, that a rank gives to a checkpoint."""
        if name in self._parts:
            return self._parts[name][rank]
        return (0, self.tensors[name].size) if rank == 0 else (0, 0)

    def write_rows(self, name: str, lo: int, values: np.ndarray) -> None:
        """Write leading rows from `lo` on, of which this rank keeps only its shard."""
        t = self.tensors[name]
        if t.role == "parameter" or name not in self._parts:
            self._session.write_rows(name, lo, values)
            return
        first, end = self._parts[name][self._ranks.rank]
        begin, flat = lo * _width(t), values.reshape(-1)
        low, high = max(first, begin), min(end, begin + flat.size)
        if low < high:
            local = self._session.tensors[name]
            width = _width(local)
            self._session.write_rows(name, (low - first) // width, flat[low - begin : high - begin].reshape(-1, *local.shape[1:]))

    @contextmanager
    def served(self) -> Iterator[None]:
        """On rank 0: while entered, the others give what it asks for."""
        try:
            yield
        finally:
            for rank in range(1, self._ranks.count):
                self._ranks.send(rank, None, background=self._background)

    def serve(self) -> None:
        """On the other ranks: give rank 0 what it asks for, until it has all."""
        while (request := self._ranks.receive(0, no_timeout=True, background=self._background)) is not None:
            self._ranks.send(0, self._own(*request), background=self._background)

    def read_rows(self, name: str, lo: int, hi: int) -> np.ndarray:
        """Leading rows [lo, hi) at full precision, on rank 0, which requests missing parts from other ranks."""
        t = self.tensors[name]
        begin, end = lo * _width(t), hi * _width(t)
        parts = []
        for rank in range(self._ranks.count):
            first, last = self._part(name, rank)
            low, high = max(first, begin), min(last, end)
            if low >= high:
                continue
            if rank == self._ranks.rank:
                parts.append(self._own(name, low, high))
                continue
            self._ranks.send(rank, (name, low, high), background=self._background)
            parts.append(self._ranks.receive(rank, background=self._background))
        return np.concatenate(parts).reshape(hi - lo, *t.shape[1:])

    def _own(self, name: str, a: int, b: int) -> np.ndarray:
        """Elements [a, b) of a tensor, which this rank holds."""
        low, high = self._rows(name, a, b)
        rows = self._session.read_rows(name, low, high).reshape(-1)
        skipped = a - self._first(name) - low * _width(self._session.tensors[name])
        return rows[skipped : skipped + b - a]

    def _rows(self, name: str, a: int, b: int) -> tuple[int, int]:
        """The leading rows, from and to, of what this rank has of a tensor, in which its elements [a, b) are."""
        first, width = self._first(name), _width(self._session.tensors[name])
        return (a - first) // width, -(-(b - first) // width)

    def _first(self, name: str) -> int:
        """The element of a tensor with which what this rank has of it begins."""
        whole = name not in self._parts or self._session.tensors[name].role == "parameter"
        return 0 if whole else self._parts[name][self._ranks.rank][0]


def _width(t: Tensor) -> int:
    return t.size // max(1, int(t.shape[0]))
