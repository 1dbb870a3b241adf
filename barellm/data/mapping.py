"""Memory-mapped files that may be truncated while they are read. Reading a page behind the end of the file, or one that the disk
cannot deliver, raises SIGBUS, which ends the process by default. Here such a page of one of our maps is replaced by zeros and the
read continues; `check` reports it and must be called after reading, before the values are used. The handler runs synchronously on
the reading thread, so it may run Python."""

import ctypes
import mmap
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from barellm.errors import UserError

MAC = sys.platform == "darwin"
FIXED, ADDRESS_AT, SA_SIGINFO = 0x10, 24 if MAC else 16, 0x40 if MAC else 4  # MAP_FIXED; si_addr in siginfo_t
SIGBUS = int(signal.SIGBUS)
_maps: dict[int, tuple[int, Path]] = {}  # first address -> end, file
_pages: weakref.WeakSet[Any] = weakref.WeakSet()
_handlers: list[Any] = []  # kept alive
_lost: dict[int, tuple[Path, set[int]]] = {}  # first address -> file, the threads that met it


class LostFile(UserError):
    """A file that was cut short, or whose disk failed, while it was read. All that was made before stands."""


class _Action(ctypes.Structure):
    """struct sigaction of glibc, musl and macOS."""

    _fields_ = [("handler", ctypes.c_void_p), ("mask", ctypes.c_byte * (4 if MAC else 128)), ("flags", ctypes.c_int)] + (
        [] if MAC else [("restorer", ctypes.c_void_p)]
    )


def mapped(path: Path, dtype: Any = np.uint8, *, offset: int = 0, shape: int | tuple[int, ...] | None = None) -> np.ndarray:
    """The numbers in a file from byte `offset` on, read when they are used: read-only, all of it unless `shape` says less."""
    _listen()
    found = np.memmap(path, dtype, "r", offset=offset, shape=shape)
    pages: Any = found._mmap  # pyright: ignore[reportAttributeAccessIssue]
    begin = np.frombuffer(pages, np.uint8).ctypes.data
    _maps[begin] = begin + len(pages), path
    _pages.add(pages)
    weakref.finalize(pages, _forget, begin)
    return found.view(np.ndarray)  # slicing np.memmap itself costs 3 us a slice in Python


def _forget(begin: int) -> None:
    _maps.pop(begin, None)
    _lost.pop(begin, None)


def release() -> None:
    """Give back the pages that were read, which count as this process's memory: the system has them still, for whoever reads."""
    for pages in list(_pages):
        pages.madvise(mmap.MADV_DONTNEED)


def check(arrays: Iterable[np.ndarray] | None = None) -> None:
    """Raise LostFile if this thread has read a lost page since the last check. Lost pages stay zero for all readers, so threads
    that share maps pass the `arrays` that they have read."""
    if not _lost:
        return
    own, begins = threading.get_ident(), [array.ctypes.data for array in arrays or ()]
    for begin, (path, threads) in list(_lost.items()):
        if own in threads or any(begin <= at < _maps[begin][0] for at in begins):
            threads.discard(own)
            raise LostFile(f"{path} was cut short or its disk failed while it was read")


@cache
def _listen() -> None:
    """Install the SIGBUS handler, once per process. Faults outside our maps are handed to the handler installed before."""
    libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | FIXED
    before = _Action()

    def on_fault(number: int, info: int, context: int) -> None:
        address = ctypes.c_size_t.from_address(info + ADDRESS_AT).value
        for begin, (end, path) in _maps.items():
            if begin <= address < end:
                libc.mmap(address // page * page, page, mmap.PROT_READ, flags, -1, 0)
                _lost.setdefault(begin, (path, set()))[1].add(threading.get_ident())
                return
        libc.sigaction(number, ctypes.byref(before), None)  # not ours: whoever handled it before meets it again

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t)(on_fault)
    action = _Action(handler=ctypes.cast(handler, ctypes.c_void_p).value, flags=SA_SIGINFO)
    if libc.sigaction(SIGBUS, ctypes.byref(action), ctypes.byref(before)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    _handlers.append(handler)
