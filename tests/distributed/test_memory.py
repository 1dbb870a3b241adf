"""Reading the memory of another process: whole, in pieces, and refused in time."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from barellm.distributed import memory
from barellm.distributed.memory import Reading, can_read

OTHER = """
import sys, numpy as np
from barellm.distributed.memory import allow_reading
allow_reading()
a = np.arange(5000, dtype=np.float32)
print(a.ctypes.data, flush=True)
sys.stdin.read()
"""
VALUES = np.arange(5000, dtype=np.float32)


@pytest.fixture(scope="module")
def other():
    """Another process with VALUES, and their address; None where this system forbids to read it."""
    process = subprocess.Popen([sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    address = int(process.stdout.readline())
    if not can_read(process.pid, (address + 400, 400), VALUES[100:200].tobytes()):
        pytest.skip("this system forbids to read another process")
    yield process, address
    process.communicate(b"")


def test_pieces_arrive_where_they_belong(other):
    process, address = other
    places = [(address + 4 * first, 4 * count) for first, count in ((10, 3), (4000, 1000), (0, 1))]
    arrays = [np.full(nbytes // 4, -1, np.float32) for _, nbytes in places]
    read = Reading(process.pid, arrays, places)
    for _ in range(2):
        read()
        for array, (place, nbytes) in zip(arrays, places, strict=True):
            first = (place - address) // 4
            assert np.array_equal(array, VALUES[first : first + nbytes // 4])
            array[:] = -1


def test_many_pieces_and_long_ones_are_read_in_several_calls(other, monkeypatch):
    monkeypatch.setattr(memory, "MOST_PIECES", 3)
    monkeypatch.setattr(memory, "MOST_BYTES", 1000)
    process, address = other
    arrays = [np.zeros(n, np.float32) for n in (1, 1, 1, 1, 700, 5)]
    firsts = [0, 7, 20, 300, 1000, 4995]
    read = Reading(process.pid, arrays, [(address + 4 * f, a.nbytes) for f, a in zip(firsts, arrays, strict=True)])
    assert [(count, nbytes) for *_, count, nbytes in read._calls] == [(3, 12), (1, 4), (1, 1000), (1, 1000), (2, 820)]
    read()
    for first, array in zip(firsts, arrays, strict=True):
        assert np.array_equal(array, VALUES[first : first + len(array)])


def test_what_is_not_there_is_an_error(other):
    process, address = other
    with pytest.raises(OSError):
        Reading(process.pid, [np.zeros(8, np.uint8)], [(8, 8)])()
    assert not can_read(process.pid, (address, 4), b"\x01\x00\x00\x00"), "it reads something else"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(OSError):
        Reading(gone.pid, [np.zeros(8, np.uint8)], [(address, 8)])()


def test_both_sides_must_know_the_same_sizes():
    with pytest.raises(AssertionError):
        Reading(os.getpid(), [np.zeros(8, np.uint8)], [(0, 9)])
