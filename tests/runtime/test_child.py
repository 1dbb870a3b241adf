"""How the tuner's child reads its requests."""

from __future__ import annotations

import io

import pytest

from barellm.runtime.tuner.child import _exactly


class Pipe(io.BytesIO):
    """Gives at most three bytes at a time, as a pipe gives what is there; read at its end more than twice, it would hang."""

    ends = 0

    def read(self, count: int = -1) -> bytes:
        more = super().read(min(count, 3))
        self.ends += not more
        assert self.ends <= 2, "read on at the end"
        return more


@pytest.mark.parametrize("count", [0, 1, 3, 7, 8])
def test_as_many_bytes_as_asked_for_however_they_come(count):
    pipe = Pipe(b"12345678")
    assert _exactly(pipe, count) == b"12345678"[:count]
    assert pipe.tell() == count  # what follows belongs to the next request


def test_fewer_at_the_end():
    assert _exactly(Pipe(b"1234"), 8) == b"1234"
    assert _exactly(Pipe(b""), 8) == b""
