"""Reading the memory of another process of this machine: one copy, where a message takes two, through memory that both share.

Linux has a call for it, process_vm_readv. Systems may forbid it, so that ranks try first, and send messages where it fails."""

import ctypes
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

MOST_PIECES, MOST_BYTES = 1024, 1 << 30  # of one call
PR_SET_PTRACER, ANY = 0x59616D61, -1
Place = tuple[int, int]  # address, bytes


class _Piece(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


def allow_reading() -> None:
    """Let the other processes of this user read this one, where the system asks for that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(ANY), 0, 0, 0)


class Reading:
    """Pieces of another process's memory, read into arrays of this one as often as asked."""

    def __init__(self, process: int, arrays: Sequence[np.ndarray], places: Sequence[Place]) -> None:
        """Prepare process_vm_readv calls that fill `arrays` from the equally large `places` of the process."""
        assert [array.nbytes for array in arrays] == [nbytes for _, nbytes in places], "both know the same sizes"
        self._process, self._arrays = process, list(arrays)
        self._calls: list[tuple[Any, Any, int, int]] = []
        pieces = []
        for array, (address, nbytes) in zip(arrays, places, strict=True):
            for lo in range(0, nbytes, MOST_BYTES):
                pieces.append((array.ctypes.data + lo, address + lo, min(MOST_BYTES, nbytes - lo)))
        for run in _calls(pieces):
            ours = (_Piece * len(run))(*((here, n) for here, _, n in run))
            theirs = (_Piece * len(run))(*((there, n) for _, there, n in run))
            self._calls.append((ours, theirs, len(run), sum(n for *_, n in run)))
        self._read = ctypes.CDLL(None, use_errno=True).process_vm_readv
        self._read.restype = ctypes.c_ssize_t

    def __call__(self) -> None:
        """OSError where the system forbids it, or the process is gone."""
        for ours, theirs, count, nbytes in self._calls:
            if self._read(self._process, ours, ctypes.c_ulong(count), theirs, ctypes.c_ulong(count), 0) != nbytes:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))


def _calls(pieces: Sequence[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Group pieces into system calls within their limits."""
    found: list[list[tuple[int, int, int]]] = []
    size = 0
    for piece in pieces:
        if not found or len(found[-1]) == MOST_PIECES or size + piece[2] > MOST_BYTES:
            found.append([])
            size = 0
        found[-1].append(piece)
        size += piece[2]
    return found


def can_read(process: int, place: Place, expected: bytes) -> bool:
    """Whether this process may read that one: a look at some of its bytes."""
    if sys.platform != "linux":
        return False
    found = np.zeros(len(expected), np.uint8)
    try:
        Reading(process, [found], [place])()
    except (OSError, AttributeError):
        return False
    return found.tobytes() == expected
