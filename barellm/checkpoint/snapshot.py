"""The tensors of a checkpoint as they were at one moment, for a thread that writes them while the training goes on.

Nothing is copied as long as nothing changes: forward and backward passes only read weights and the optimizer's state, so the writer
reads them where they lie. Before a program runs that changes some of them, the rows that the writer has not had yet are copied."""

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import TYPE_CHECKING, Any

from barellm.checkpoint import tensorfile
from barellm.runtime.memory import available

if TYPE_CHECKING:
    import numpy as np

    from barellm.checkpoint.checkpoint import Source

BLOCK = 8  # pieces that are copied together
Piece = tuple[str, int, int]  # a tensor's name and its leading rows, from and to
SPARE = 256 << 20  # bytes of memory that copies leave free


def pieces_of(tensors: Mapping[str, Any], names: Collection[str]) -> Iterator[Piece]:
    """The pieces in which `tensorfile.write` asks for these tensors."""
    for name in names:
        for lo, hi in tensorfile.pieces(tensors[name].shape, tensorfile.itemsize(tensors[name])):
            yield name, lo, hi


class Snapshot:
    """A `checkpoint.Source` of some pieces of a session's tensors: `read_rows` gives each once, in any order of tensors. `waits`:
    whether `keep` may wait for the reader."""

    def __init__(self, session: "Source", pieces: Iterable[Piece], *, threads: int, waits: bool = True) -> None:
        self.tensors: Mapping[str, Any] = session.tensors
        self.copied = 0  # bytes, so far
        self._session, self._threads, self._waits = session, threads, waits
        self._left: dict[Piece, None] = dict.fromkeys(pieces)
        self._copies: dict[Piece, np.ndarray] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()

    def read_rows(self, name: str, lo: int, hi: int) -> "np.ndarray":
        piece = (name, lo, hi)
        with self._lock:  # nothing changes while a piece is read
            del self._left[piece]
            copy = self._copies.pop(piece, None)
            return self._session.read_rows(*piece) if copy is None else copy

    def keep(self, names: Collection[str]) -> None:
        """Copy the unread rows of these tensors before they change; without memory for that, wait until the writer has read all."""
        with self._lock:
            unread = [piece for piece in self._left if piece[0] in names and piece not in self._copies]
            if not unread:
                return
            nbytes = sum(map(self._nbytes, unread))
            if not self._waits or has_room(nbytes):
                with ThreadPoolExecutor(self._threads) as pool:
                    for copies in pool.map(self._copy, _blocks(unread)):
                        self._copies |= copies
                self.copied += nbytes
                return
        self._over.wait()

    def fits(self) -> bool:
        """Whether there is memory for copies of all that is left."""
        return has_room(sum(map(self._nbytes, self._left)))

    def _copy(self, block: Sequence[Piece]) -> "dict[Piece, np.ndarray]":
        """Copies of neighbouring pieces of one tensor, in memory of their own: large, for the system gives that huge pages."""
        name, first, _ = block[0]
        rows = self._session.read_rows(name, first, block[-1][2])
        return {piece: rows[piece[1] - first : piece[2] - first] for piece in block}

    def _nbytes(self, piece: Piece) -> int:
        name, lo, hi = piece
        t = self.tensors[name]
        return (hi - lo) * (t.size // int(t.shape[0])) * tensorfile.itemsize(t)

    def end(self) -> None:
        """Nobody reads any more: the save is done, or has failed."""
        self._over.set()
        with self._lock:
            self._left, self._copies = {}, {}


def has_room(nbytes: int) -> bool:
    return nbytes + SPARE <= available()


def _blocks(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Neighbouring pieces of one tensor together, at most BLOCK of them. Those that are due are the last ones of a tensor."""
    for _, found in groupby(pieces, key=lambda piece: piece[0]):
        own = list(found)
        for i in range(0, len(own), BLOCK):
            yield own[i : i + BLOCK]
